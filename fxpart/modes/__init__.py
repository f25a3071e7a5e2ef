"""How to choose a placement: one function for each mode, and one table from name to function."""

from collections.abc import Callable, Mapping

from fxpart.assignment import Assignment
from fxpart.errors import SpecError, nearest_names
from fxpart.modes.kl_based import kl_based
from fxpart.modes.single import single
from fxpart.modes.size_based import size_based
from fxpart.problem import Problem

__all__ = ["MODES", "Mode", "find_mode", "kl_based", "single", "size_based"]

Mode = Callable[[Problem, Mapping[str, object]], Assignment]
"""Takes a problem and the mode's options by name; returns an assignment that respects every
device's memory, or raises `InfeasibleError`; an option that it does not know is a `SpecError`."""

MODES: dict[str, Mode] = {
    "single": single,
    "size_based": size_based,
    "kl_based": kl_based,
}


def find_mode(name: str) -> Mode:
    """Return the mode called `name`.

    Raises:
        SpecError: when there is none; the message names the nearest.

    """
    if name not in MODES:
        raise SpecError(f"mode {name!r} does not exist; {nearest_names(name, MODES)}")
    return MODES[name]

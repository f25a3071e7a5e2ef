"""How to choose a placement: one function for each mode, and one table from name to function."""

from collections.abc import Callable, Mapping

from fxpart.assignment import Assignment
from fxpart.errors import SpecError, nearest_names
from fxpart.modes.aot_based import AotBasedOptions, aot_based
from fxpart.modes.cost_aware import cost_aware
from fxpart.modes.kl_based import kl_based
from fxpart.modes.options import NoOptions, read_options
from fxpart.modes.pipeline import PipelineOptions, pipeline
from fxpart.modes.refine import SearchOptions
from fxpart.modes.single import single
from fxpart.modes.size_based import size_based
from fxpart.modes.sparse_nn import sparse_nn
from fxpart.problem import Problem

__all__ = [
    "MODES",
    "AotBasedOptions",
    "NoOptions",
    "PipelineOptions",
    "Place",
    "SearchOptions",
    "aot_based",
    "cost_aware",
    "kl_based",
    "make_mode",
    "pipeline",
    "single",
    "size_based",
    "sparse_nn",
]

Place = Callable[[Problem], Assignment]
"""Returns an assignment that respects every device's memory, or raises `InfeasibleError`."""

MODES: dict[str, tuple[type, Callable[..., Assignment]]] = {
    "single": (NoOptions, single),
    "size_based": (NoOptions, size_based),
    "sparse_nn": (NoOptions, sparse_nn),
    "aot_based": (AotBasedOptions, aot_based),
    "cost_aware": (SearchOptions, cost_aware),
    "kl_based": (SearchOptions, kl_based),
    "pipeline": (PipelineOptions, pipeline),
}
"""Name to the options that a mode takes, and the function of a problem and such options."""


def make_mode(name: str, options: Mapping[str, object] | None = None) -> Place:
    """Return the mode called `name` with its options, ready to place any problem.

    Raises:
        SpecError: when there is no such mode, or it has no such option; the message names the
            nearest.

    """
    if name not in MODES:
        raise SpecError(f"mode {name!r} does not exist; {nearest_names(name, MODES)}")
    options_class, place = MODES[name]
    chosen: object = read_options(options_class, name, options or {})
    return lambda problem: place(problem, chosen)

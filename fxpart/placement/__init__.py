"""Placement modes: one function per mode, and a table from name to function."""

from collections.abc import Callable, Mapping
from dataclasses import fields

from fxpart.core.assignment import Assignment
from fxpart.cost.problem import Problem
from fxpart.errors import NotApplicableError, SpecError, nearest_names
from fxpart.placement.accelerate import AccelerateOptions, accelerate
from fxpart.placement.aot_based import AotBasedOptions, aot_based
from fxpart.placement.cost_aware import cost_aware
from fxpart.placement.custom import CustomOptions, custom
from fxpart.placement.equal_layers import EqualLayersOptions, equal_layers
from fxpart.placement.kl_based import kl_based
from fxpart.placement.mtkahypar import MtkahyparOptions, mtkahypar
from fxpart.placement.optimal.mode import OptimalOptions, optimal
from fxpart.placement.options import NoOptions, read_options
from fxpart.placement.pipeline import PipelineOptions, pipeline
from fxpart.placement.search.refine import SearchOptions
from fxpart.placement.single import single
from fxpart.placement.size_based import size_based
from fxpart.placement.sparse_nn import sparse_nn

__all__ = [
    "MODES",
    "AccelerateOptions",
    "AotBasedOptions",
    "CustomOptions",
    "EqualLayersOptions",
    "MtkahyparOptions",
    "NoOptions",
    "OptimalOptions",
    "PipelineOptions",
    "Place",
    "SearchOptions",
    "accelerate",
    "aot_based",
    "cost_aware",
    "custom",
    "equal_layers",
    "kl_based",
    "make_mode",
    "mtkahypar",
    "optimal",
    "pipeline",
    "refuse_of_another",
    "single",
    "size_based",
    "sparse_nn",
]

Place = Callable[[Problem], Assignment]
"""Returns an assignment that fits in every device's memory, or raises `InfeasibleError`."""

MODES: dict[str, tuple[type, Callable[..., Assignment]]] = {
    "single": (NoOptions, single),
    "size_based": (NoOptions, size_based),
    "equal_layers": (EqualLayersOptions, equal_layers),
    "accelerate": (AccelerateOptions, accelerate),
    "mtkahypar": (MtkahyparOptions, mtkahypar),
    "sparse_nn": (NoOptions, sparse_nn),
    "aot_based": (AotBasedOptions, aot_based),
    "cost_aware": (SearchOptions, cost_aware),
    "kl_based": (SearchOptions, kl_based),
    "pipeline": (PipelineOptions, pipeline),
    "optimal": (OptimalOptions, optimal),
    "custom": (CustomOptions, custom),
}
"""Maps the name of a mode to its options class, and its function of a problem and options."""


def make_mode(name: str, options: object = None) -> Place:
    """Return the mode `name` bound to its options, ready to place any problem.

    `options` is a mapping of names to values, or an instance of the mode's class in `MODES`.

    Raises:
        SpecError: if the mode or an option does not exist; the message suggests similar names.
        NotApplicableError: if an option is one of another mode.

    """
    if name not in MODES:
        raise SpecError(f"mode {name!r} does not exist; {nearest_names(name, MODES)}")
    options_class, place = MODES[name]
    refuse_of_another(name, options)
    chosen: object = read_options(options_class, name, {} if options is None else options)
    return lambda problem: place(problem, chosen)


def refuse_of_another(name: str, options: object) -> None:
    """Raise `NotApplicableError` for the first of `options` that only other modes than `name` have.

    A sweep of several modes may set an option of one of them.
    """
    owners = {
        option.name: mode
        for mode, (options_class, _) in reversed(MODES.items())
        for option in fields(options_class)
    }
    own = {option.name for option in fields(MODES[name][0])} if name in MODES else set()
    for option in options if isinstance(options, Mapping) else ():
        if option not in own and (owner := owners.get(option)):
            raise NotApplicableError(
                f"mode {name} has no option {option!r}, which is one of mode {owner}; leave it out"
            )

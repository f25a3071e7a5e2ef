"""Which names of weights, in one stage or over several, mean one parameter."""

from typing import TYPE_CHECKING

from fxpart.capture.storage import place_in_memory

if TYPE_CHECKING:
    from fxpart.pipeline.chain import Chain

__all__ = ["TiedName", "tied_parameters"]

TiedName = tuple[int, str]
"""A stage, and the name of a parameter in it."""


def tied_parameters(chain: "Chain") -> tuple[tuple[TiedName, ...], ...]:
    """Return the groups of names of one parameter, those that are alone left out."""
    names: dict[tuple[object, ...], list[TiedName]] = {}
    for stage in chain.stages:
        for name, parameter in stage.module.named_parameters(remove_duplicate=False):
            names.setdefault(place_in_memory(parameter), []).append((stage.index, name))
    return tuple(tuple(group) for group in names.values() if len(group) > 1)

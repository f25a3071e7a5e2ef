"""Autocast regions and grad modes, entered and exited by each partition in them.

An autocast region extends from one node to another. If its operators are in several partitions,
each partition enters the region at its beginning and exits at its end, so that its results do not
depend on where and when it runs:

    enter           enter, exit copied to the end     | enter copied, exit
    a, b       ->   a, exit                           | enter, b, exit
    exit

A grad mode lasts until the next one is set. A partition that changes it saves the mode at its
beginning and restores it at its end; only the last partition leaves the graph's final mode set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.fx import Node

from fxpart.errors import CaptureError, CycleError

__all__ = ["STATE_TARGETS", "Regions", "regions_of"]

_ENTER = torch.amp.autocast_mode._enter_autocast
_EXIT = torch.amp.autocast_mode._exit_autocast
_SET_GRAD = torch._C._set_grad_enabled
STATE_TARGETS: frozenset[object] = frozenset({_ENTER, _EXIT, _SET_GRAD})
"""Functions that change a process-wide mode."""


@dataclass(frozen=True, slots=True)
class Regions:
    """Nodes that partitions repeat to enter and exit regions shared with other partitions."""

    entered: Mapping[int, Sequence[Node]]
    """Nodes that open a partition's regions, repeated at its beginning."""
    left: Mapping[int, Sequence[Node]]
    """Nodes that close a partition's autocast regions, repeated at its end."""
    restoring: frozenset[int]
    """Partitions that restore the grad mode at their end."""
    any: bool
    """Whether the graph has any region."""


@dataclass(slots=True)
class _Region:
    opened_by: Node
    parts: dict[int, None] = field(default_factory=dict)
    """Partitions of the region, in graph order."""
    closed_by: Node | None = None


def regions_of(ops: Sequence[Node], part_of: Mapping[Node, int], ids: Sequence[object]) -> Regions:
    """Return the nodes that partitions repeat for the regions among `ops`.

    Args:
        ops: all operators, in graph order.
        part_of: partition of each.
        ids: the caller's id of each partition.

    Raises:
        CycleError: if there is a region and partition ids decrease along the graph.
        CaptureError: if an autocast region is never exited, or exited without being entered.

    """
    if not any(node.op == "call_function" and node.target in STATE_TARGETS for node in ops):
        return Regions({}, {}, frozenset(), any=False)
    _check_forward(ops, part_of, ids)
    autocasts, modes = _walk(ops, part_of)
    entered: dict[int, list[Node]] = {}
    exited: dict[int, list[Node]] = {}
    for region in (*autocasts, *modes):
        for part in list(region.parts)[1:]:
            entered.setdefault(part, []).append(region.opened_by)
    for region in reversed(autocasts):
        if region.closed_by is None:
            raise CaptureError(
                f"autocast is entered by {region.opened_by.name} and never left; capture the whole"
                " 'with' block"
            )
        for part in list(region.parts)[:-1]:
            exited.setdefault(part, []).append(region.closed_by)
    changed = {part for mode in modes for part in mode.parts}
    return Regions(entered, exited, frozenset(changed - {part_of[ops[-1]]}), any=True)


def _walk(ops: Sequence[Node], part_of: Mapping[Node, int]) -> tuple[list[_Region], list[_Region]]:
    """Return the autocast regions and the grad modes, each in order of first node."""
    autocasts: list[_Region] = []
    modes: list[_Region] = []
    active: dict[Node, _Region] = {}
    for node in ops:
        closed = None
        if node.op == "call_function" and node.target is _SET_GRAD:
            modes.append(_Region(node))
        elif node.op == "call_function" and node.target is _ENTER:
            active[node] = _Region(node)
            autocasts.append(active[node])
        elif node.op == "call_function" and node.target is _EXIT:
            closed = _entry_of(node, active)
        for region in (*active.values(), *modes[-1:]):
            region.parts[part_of[node]] = None
        if closed is not None:
            active.pop(closed).closed_by = node
    return autocasts, modes


def _entry_of(leaving: Node, active: Mapping[Node, _Region]) -> Node:
    """Return the node that opened the region closed by `leaving`."""
    entry = leaving.args[0] if leaving.args else None
    if not isinstance(entry, Node) or entry not in active:
        raise CaptureError(
            f"autocast is left by {leaving.name}, which was not entered before; capture the whole"
            " 'with' block"
        )
    return entry


def _check_forward(ops: Sequence[Node], part_of: Mapping[Node, int], ids: Sequence[object]) -> None:
    """Refuse partition ids that decrease along the graph; non-numeric ids rank by first use."""
    numbered = all(isinstance(part_id, int) for part_id in ids)
    first_use = {part: rank for rank, part in enumerate(dict.fromkeys(part_of[op] for op in ops))}
    key = [part_id if numbered else first_use[part] for part, part_id in enumerate(ids)]
    for previous, node in pairwise(ops):
        highest, part = part_of[previous], part_of[node]
        if key[part] < key[highest]:  # type: ignore[operator]  # both are numbers
            raise CycleError(
                "autocast and grad modes need partition ids that never go back along the graph:"
                f" {node.name} is in partition {ids[part]}, {previous.name} before it in partition"
                f" {ids[highest]}; give {node.name} an id of {ids[highest]} or later"
            )

"""Where accelerate runs each operator of a model that it has dispatched by a device map.

Accelerate puts a hook on every module of the map, and on every module with tensors inside one: the
hook moves what the module is called with to the module's device. Operators that stand in such a
module run there. Those of a module around them, such as the residual sum of a block whose halves
lie on two devices, run where their inputs are; when these are on two devices, torch refuses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.module_paths import covering, is_within, owner, parents, shared_parent

__all__ = ["HookedRun", "hooked_run"]

_SAME = frozenset(
    {"aten.to.dtype", "aten.type_as.default", "aten.contiguous.default", "aten.dropout.default"}
)
"""Operators that give back their input when there is nothing to do."""
_MOVING = frozenset({"aten.to.device", "aten.to.dtype_layout", "aten.to.other"})
"""Operators by which a model moves a tensor to a device itself: to where it is then read."""


@dataclass(frozen=True, eq=False, slots=True)
class HookedRun:
    """What becomes of a plan when only modules can be placed."""

    device_of: IntArray
    """Device that runs each operator. Length n."""
    torn: tuple[str, ...]
    """Modules that have an operator of their own whose inputs are on several devices."""


def hooked_run(
    graph: OpGraph, entries: Mapping[str, int], homes: Mapping[str, int], main_device: int
) -> HookedRun:
    """Return where the operators run under the map `entries`.

    Args:
        graph: the captured model.
        entries: module path to device.
        homes: device of each module that holds tensors.
        main_device: device that the model's inputs are moved to.

    """
    hooks, flow = _hooks(graph, entries, homes, main_device), _flow(graph)
    moved_to = [next((hooks[m] for m in way if m in hooks), None) for way in flow.ways]
    made_on: list[int | None] = [None] * graph.n_values
    ran: list[int | None] = []
    torn: dict[str, None] = {}
    for op, module in enumerate(graph.modules):
        devices = dict.fromkeys([homes[holder] for holder in flow.holders[op]])
        for value, way in flow.reads[op]:
            seen_on = made_on[value] if moved_to[way] is None else moved_to[way]
            if seen_on is not None:
                devices[seen_on] = None
        if len(devices) > 1:
            torn[module] = None
        device = next(iter(devices), None)
        ran.append(device)
        for value in flow.makes[op]:
            made_on[value] = None if graph.targets[op] in _MOVING else device
    device_of = [
        _nearest_hook(hooks, graph.modules[op]) if device is None else device
        for op, device in enumerate(ran)
    ]
    return HookedRun(np.array(device_of, dtype=np.int64), tuple(torn))


@dataclass(frozen=True, eq=False, slots=True)
class _Flow:
    """What each operator of a graph needs and makes; tuples have an item for each operator."""

    holders: tuple[tuple[str, ...], ...]
    """The modules that hold the weights that it uses."""
    reads: tuple[tuple[tuple[int, int], ...], ...]
    """The values that it holds when it reads, and the place in `ways` of how each came to it."""
    makes: tuple[range, ...]
    """The values that it makes."""
    ways: tuple[tuple[str, ...], ...]
    """Modules through whose hooks a value comes down, from the reader's outwards."""


@lru_cache(maxsize=4)
def _flow(graph: OpGraph) -> _Flow:
    """Return what follows from the graph alone, which its plans share."""
    made_in = [graph.modules[op] if op >= 0 else None for op in graph.value_producer.tolist()]
    first_made = np.searchsorted(graph.value_producer, np.arange(graph.n_ops + 1)).tolist()
    ways: dict[tuple[str, ...], int] = {}
    reads = []
    for op, module in enumerate(graph.modules):
        objects = [_object_read(graph, value, module) for value in graph.reads_of(op).tolist()]
        down = [_way(module, made_in[value]) for value in objects]
        places = [ways.setdefault(way, len(ways)) for way in down]
        reads.append(tuple(zip(objects, places, strict=True)))
    return _Flow(
        holders=tuple(
            tuple(owner(graph.weight_names[weight]) for weight in graph.uses_of(op).tolist())
            for op in range(graph.n_ops)
        ),
        reads=tuple(reads),
        makes=tuple(range(first_made[op], first_made[op + 1]) for op in range(graph.n_ops)),
        ways=tuple(ways),
    )


@lru_cache(maxsize=4)
def _modules(graph: OpGraph) -> tuple[str, ...]:
    """Return all modules that operators stand in, in graph order."""
    return tuple(dict.fromkeys(parent for path in graph.modules for parent in parents(path)))


def _hooks(
    graph: OpGraph, entries: Mapping[str, int], homes: Mapping[str, int], main_device: int
) -> dict[str, int]:
    """Return the device of each module that has a hook; the model itself has one always."""
    stateful = {parent for path in homes for parent in parents(path)}
    hooks = {"": main_device}
    for module in _modules(graph):
        key = covering(module, entries)
        if key is not None and module and (module in stateful or module == key):
            hooks[module] = entries[key]
    return hooks


def _object_read(graph: OpGraph, value: int, reader: str) -> int:
    """Return the value whose tensor an operator of module `reader` holds when it reads `value`.

    An operator that changes nothing gives back the tensor that it was given. The trace of a model
    names the latest such operator, also where that stands in a module which the reader called, and
    whose inputs a hook had moved: the reader still holds what it passed in.
    """
    while graph.value_base[value] >= 0 and graph.value_producer[value] >= 0:
        maker = int(graph.value_producer[value])
        if is_within(reader, graph.modules[maker]) or graph.targets[maker] not in _SAME:
            break
        value = int(graph.value_base[value])
    return value


def _way(reader: str, maker: str | None) -> tuple[str, ...]:
    """Return the modules through whose hooks a value comes to an operator of module `reader`.

    It comes down from the innermost module around both. `maker` is None for what the model is
    called with. The first of them that has a hook decides where the operator finds the value.
    """
    around = parents(reader)
    return around if maker is None else around[: around.index(shared_parent(reader, maker))]


def _nearest_hook(hooks: Mapping[str, int], module: str) -> int:
    """Return the device of the innermost hook around: where a new tensor is taken to be made."""
    return next(hooks[parent] for parent in parents(module) if parent in hooks)

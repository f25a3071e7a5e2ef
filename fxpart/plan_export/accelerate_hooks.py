"""Predict where accelerate runs each operator of a model dispatched by a device map.

Accelerate hooks every module of the map, and every module with tensors inside one: the hook moves
the arguments of a call to the module's device, where its operators run. Operators of unhooked
modules around them, such as the residual sum of a block split over two devices, run where their
operands are; if these are on two devices, torch fails.
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
"""Operators that return their input unchanged if there is nothing to do."""
_MOVING = frozenset({"aten.to.device", "aten.to.dtype_layout", "aten.to.other"})
"""Operators by which a model itself moves a tensor, to wherever it is read next."""


@dataclass(frozen=True, eq=False, slots=True)
class HookedRun:
    """The run of a plan by accelerate, which can only place modules."""

    device_of: IntArray
    """Device that runs each operator. Length n."""
    torn: tuple[str, ...]
    """Modules with an operator of their own whose operands are on several devices."""


def hooked_run(
    graph: OpGraph, entries: Mapping[str, int], homes: Mapping[str, int], main_device: int
) -> HookedRun:
    """Return where operators run under the map `entries`.

    Args:
        graph: the captured model.
        entries: module path to device.
        homes: device of each module that holds tensors.
        main_device: device of the model's inputs.

    """
    hooks, flow = _hooks(graph, entries, homes, main_device), _flow(graph)
    moved_to = [next((hooks[m] for m in path if m in hooks), None) for path in flow.ways]
    made_on: list[int | None] = [None] * graph.n_values
    run_on: list[int | None] = []
    torn: dict[str, None] = {}
    for op, module in enumerate(graph.modules):
        devices = dict.fromkeys([homes[holder] for holder in flow.holders[op]])
        for value, path in flow.reads[op]:
            seen_on = made_on[value] if moved_to[path] is None else moved_to[path]
            if seen_on is not None:
                devices[seen_on] = None
        if len(devices) > 1:
            torn[module] = None
        device = next(iter(devices), None)
        run_on.append(device)
        for value in flow.makes[op]:
            made_on[value] = None if graph.targets[op] in _MOVING else device
    device_of = [
        _nearest_hook(hooks, graph.modules[op]) if device is None else device
        for op, device in enumerate(run_on)
    ]
    return HookedRun(np.array(device_of, dtype=np.int64), tuple(torn))


@dataclass(frozen=True, eq=False, slots=True)
class _Flow:
    """Operands and results of each operator of a graph; tuples have one item per operator."""

    holders: tuple[tuple[str, ...], ...]
    """The modules that hold its weights."""
    reads: tuple[tuple[tuple[int, int], ...], ...]
    """The values that it references, and the index in `ways` of the path by which each arrives."""
    makes: tuple[range, ...]
    """The values that it produces."""
    ways: tuple[tuple[str, ...], ...]
    """Modules whose hooks a value passes on its way to a reader, innermost first."""


@lru_cache(maxsize=4)
def _flow(graph: OpGraph) -> _Flow:
    """Return the data flow of a graph, cached for all of its plans."""
    made_in = [graph.modules[op] if op >= 0 else None for op in graph.value_producer.tolist()]
    first_made = np.searchsorted(graph.value_producer, np.arange(graph.n_ops + 1)).tolist()
    ways: dict[tuple[str, ...], int] = {}
    reads = []
    for op, module in enumerate(graph.modules):
        objects = [_object_read(graph, value, module) for value in graph.reads_of(op).tolist()]
        paths = [_way(module, made_in[value]) for value in objects]
        places = [ways.setdefault(path, len(ways)) for path in paths]
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
    """Return all modules with operators inside, in graph order."""
    return tuple(dict.fromkeys(parent for path in graph.modules for parent in parents(path)))


def _hooks(
    graph: OpGraph, entries: Mapping[str, int], homes: Mapping[str, int], main_device: int
) -> dict[str, int]:
    """Return the device of each hooked module; the model itself always has a hook."""
    stateful = {parent for path in homes for parent in parents(path)}
    hooks = {"": main_device}
    for module in _modules(graph):
        key = covering(module, entries)
        if key is not None and module and (module in stateful or module == key):
            hooks[module] = entries[key]
    return hooks


def _object_read(graph: OpGraph, value: int, reader: str) -> int:
    """Return the value whose tensor an operator of module `reader` references as `value`.

    An operator without effect returns its input tensor. The trace refers to the latest such
    operator, even if it is in a module called by the reader, whose inputs a hook had moved; but the
    reader still references the tensor that it passed in.
    """
    while graph.value_base[value] >= 0 and graph.value_producer[value] >= 0:
        maker = int(graph.value_producer[value])
        if is_within(reader, graph.modules[maker]) or graph.targets[maker] not in _SAME:
            break
        value = int(graph.value_base[value])
    return value


def _way(reader: str, maker: str | None) -> tuple[str, ...]:
    """Return the modules whose hooks a value passes on its way to an operator of module `reader`.

    The path starts at the innermost module around producer and reader; `maker` is None for the
    model's inputs. The first hooked module of the result decides on which device the operator sees
    the value.
    """
    around = parents(reader)
    return around if maker is None else around[: around.index(shared_parent(reader, maker))]


def _nearest_hook(hooks: Mapping[str, int], module: str) -> int:
    """Return the device of the innermost hook around, where new tensors are assumed to be made."""
    return next(hooks[parent] for parent in parents(module) if parent in hooks)

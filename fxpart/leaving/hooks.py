"""Where accelerate runs each operator of a model that it has dispatched by a device map.

Accelerate puts a hook on every module of the map, and on every module with tensors inside one: the
hook moves what the module is called with to the module's device. Operators that stand in such a
module run there. Those of a module around them, such as the residual sum of a block whose halves
lie on two devices, run where their inputs are; when these are on two devices, torch refuses.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fxpart.graph import IntArray, OpGraph
from fxpart.leaving.module_paths import covering, is_within, owner, parents, shared_parent

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
    hooks = _hooks(graph, entries, homes, main_device)
    made_on: list[int | None] = [None] * graph.n_values
    made_in = [graph.modules[op] if op >= 0 else None for op in graph.value_producer.tolist()]
    first_made = np.searchsorted(graph.value_producer, np.arange(graph.n_ops + 1)).tolist()
    ran: list[int | None] = []
    torn: dict[str, None] = {}
    for op, module in enumerate(graph.modules):
        weights = [homes[owner(graph.weight_names[w])] for w in graph.uses_of(op).tolist()]
        reads = [_object_read(graph, v, module) for v in graph.reads_of(op).tolist()]
        inputs = [_seen_on(hooks, module, made_in[v], made_on[v]) for v in reads]
        found = list(dict.fromkeys(d for d in (*weights, *inputs) if d is not None))
        if len(found) > 1:
            torn[module] = None
        device = found[0] if found else None
        ran.append(device)
        for value in range(first_made[op], first_made[op + 1]):
            made_on[value] = None if graph.targets[op] in _MOVING else device
    device_of = [
        _nearest_hook(hooks, graph.modules[op]) if device is None else device
        for op, device in enumerate(ran)
    ]
    return HookedRun(np.array(device_of, dtype=np.int64), tuple(torn))


def _hooks(
    graph: OpGraph, entries: Mapping[str, int], homes: Mapping[str, int], main_device: int
) -> dict[str, int]:
    """Return the device of each module that has a hook; the model itself has one always."""
    stateful = {parent for path in homes for parent in parents(path)}
    hooks = {"": main_device}
    for module in dict.fromkeys(parent for path in graph.modules for parent in parents(path)):
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


def _seen_on(
    hooks: Mapping[str, int], reader: str, maker: str | None, made_on: int | None
) -> int | None:
    """Return the device on which an operator of module `reader` finds a value; None is any.

    A value comes down from the innermost module around both, through the hooks between. `maker` is
    None for what the model is called with.
    """
    top = None if maker is None else shared_parent(reader, maker)
    for module in parents(reader):
        if module == top:
            break
        if module in hooks:
            return hooks[module]
    return made_on


def _nearest_hook(hooks: Mapping[str, int], module: str) -> int:
    """Return the device of the innermost hook around: where a new tensor is taken to be made."""
    return next(hooks[parent] for parent in parents(module) if parent in hooks)

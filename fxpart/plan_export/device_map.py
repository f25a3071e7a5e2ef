"""A plan as Hugging Face accelerate's `device_map`: a device for each module.

Accelerate runs a module where its tensors lie, so a map is a plan only as far as whole modules go.
`DeviceMap` therefore says which operators will run elsewhere than planned, and in which modules
accelerate would stop.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.module_paths import is_within, owner, parents
from fxpart.errors import SpecError, nearest_names
from fxpart.plan_export.accelerate_hooks import hooked_run

__all__ = ["DeviceMap", "device_map"]


# One device for each module that holds tensors, the one where its operators are planned. Accelerate
# places whole modules. So all tensors of one module lie on one device, and so do tied
# weights, whichever modules hold them, and everything in a module that is kept whole.

# The plans of one graph share what follows from the graph alone.
_GRAPHS = 4


@lru_cache(maxsize=_GRAPHS)
def _first_users(graph: OpGraph) -> tuple[int, ...]:
    """Return for each weight the first operator that uses it."""
    first: dict[int, int] = {}
    for weight, op in zip(graph.uses.tolist(), graph.users.tolist(), strict=True):
        first.setdefault(weight, op)
    return tuple(first[weight] for weight in range(len(graph.weight_names)))


@lru_cache(maxsize=_GRAPHS)
def _first_operators(graph: OpGraph) -> dict[str, int]:
    """Return the first operator of each module that has operators of its own, in graph order."""
    first: dict[str, int] = {}
    for op, module in enumerate(graph.modules):
        first.setdefault(module, op)
    return first


def _module_homes(
    graph: OpGraph, device_of: IntArray, names: Sequence[str], whole: Sequence[str]
) -> dict[str, int]:
    """Return the device of each module that holds tensors itself, in the order of their names.

    Modules that must share a device take the one where most bytes of their weights are planned; a
    weight counts where it is first used. Modules whose tensors no operator uses go with their own
    operators, else with their neighbours.

    Args:
        graph: the captured model.
        device_of: planned device of each operator. Length n.
        names: all parameters and buffers, as far as they are known; those that operators use are
            added.
        whole: paths of modules that stay on one device with all that is in them.

    Raises:
        SpecError: when a module of `whole` does not exist.

    """
    holders = _holders(graph, names)
    _refuse_unknown(graph, holders, whole)
    leader = {path: path for path in holders}
    _join_ties(graph, leader)
    for module in whole:
        _join(leader, [path for path in holders if is_within(path, module)])
    homes = _heaviest(graph, device_of, leader)
    return _with_unused(graph, device_of, leader, homes)


def _holders(graph: OpGraph, names: Iterable[str]) -> list[str]:
    """Return the modules that hold a tensor, and those that use another module's as their own."""
    holders = dict.fromkeys(owner(name) for name in (*names, *graph.weight_names))
    holders.update(dict.fromkeys(user for user, _ in _ties(graph)))
    return list(holders)


@lru_cache(maxsize=_GRAPHS)
def _ties(graph: OpGraph) -> tuple[tuple[str, str], ...]:
    """Return the pairs of a module and the holder, elsewhere, of a weight that it uses as well."""
    ties: dict[tuple[str, str], None] = {}
    holder = [owner(name) for name in graph.weight_names]
    for weight, op in zip(graph.uses.tolist(), graph.users.tolist(), strict=True):
        user = graph.modules[op]
        # A module may use the tensors of modules in it; others are its own by another name.
        if not is_within(holder[weight], user):
            ties[user, holder[weight]] = None
    return tuple(ties)


def _refuse_unknown(graph: OpGraph, holders: Iterable[str], whole: Sequence[str]) -> None:
    if not whole:
        return
    known = {parent for path in (*holders, *graph.modules) for parent in parents(path)}
    for module in whole:
        if module not in known:
            near = nearest_names(module, (path for path in known if path))
            raise SpecError(
                f"the device map is to keep {module} whole, which the model does not have; {near}"
            )


def _root(leader: dict[str, str], path: str) -> str:
    while leader[path] != path:
        leader[path] = leader[leader[path]]
        path = leader[path]
    return path


def _join(leader: dict[str, str], paths: list[str]) -> None:
    for path in paths[1:]:
        leader[_root(leader, path)] = _root(leader, paths[0])


def _join_ties(graph: OpGraph, leader: dict[str, str]) -> None:
    for user, holder in _ties(graph):
        _join(leader, [holder, user])


def _heaviest(graph: OpGraph, device_of: IntArray, leader: dict[str, str]) -> dict[str, int]:
    """Return the device with most bytes of each group of modules; of equals the first in use."""
    first, sizes, planned = _first_users(graph), graph.weight_bytes.tolist(), device_of.tolist()
    bytes_on: dict[str, dict[int, int]] = {}
    for weight in sorted(range(len(first)), key=first.__getitem__):
        on = bytes_on.setdefault(_root(leader, owner(graph.weight_names[weight])), {})
        device = planned[first[weight]]
        on[device] = on.get(device, 0) + sizes[weight]
    return {group: max(on, key=on.__getitem__) for group, on in bytes_on.items()}


def _with_unused(
    graph: OpGraph, device_of: IntArray, leader: dict[str, str], homes: dict[str, int]
) -> dict[str, int]:
    """Return the device of every module of `leader`; `homes` has those of groups in use."""
    for path, op in _first_operators(graph).items():
        if path in leader:
            homes.setdefault(_root(leader, path), int(device_of[op]))
    near: dict[str, int] = {"": int(device_of[0])}
    for path in leader:
        home = homes.get(_root(leader, path))
        if home is not None:
            near.update((parent, near.get(parent, home)) for parent in parents(path) if parent)
    return {
        path: homes.setdefault(
            _root(leader, path), next(near[p] for p in parents(path) if p in near)
        )
        for path in leader
    }


_CONSTANT = re.compile(r"lifted_tensor_\d+")
"""What torch.export calls a tensor that the model makes out of plain numbers."""


@dataclass(frozen=True, eq=False, slots=True)
class DeviceMap:
    """A device for each module, and how far that is the plan.

    ``dispatch_model(model, device_map=found.entries, main_device=found.main_device)``.
    """

    entries: Mapping[str, int]
    """Module path to logical device, as JSON can say it. Paths are disjoint, except that a module
    with tensors of its own may stand around others; the longest path counts. ``""`` is the whole
    model. When that is divided, a parameter that the model holds itself is named by its own name,
    which accelerate warns about and then does."""
    main_device: int
    """Device that the model's inputs are moved to, and its own tensors."""
    device_of: IntArray
    """Device on which accelerate runs each operator. Length n."""
    moved: tuple[str, ...]
    """Operators that run on another device than planned, in graph order."""
    torn: tuple[str, ...]
    """Modules that accelerate cannot run as divided: an operator of their own would meet tensors
    of several devices. Keep these, or a module around them, whole."""
    weight_bytes: Mapping[int, int]
    """Bytes of the weights on each device, by logical id."""


def device_map(
    graph: OpGraph,
    assignment: Assignment,
    names: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> DeviceMap:
    """Return the device map that is nearest to `assignment`.

    A module's tensors go where they are first used; tied weights to one device. What is all on one
    device is one entry.

    Args:
        graph: the model, captured by operators or by modules.
        assignment: the plan.
        names: ``list(model.state_dict())``. Without it, tensors that no operator uses are not
            known: then they are covered only where an entry lies around them.
        whole: paths of modules to keep on one device, the one where most bytes of their weights
            are planned. Such are the blocks that accelerate knows as `no_split_module_classes`.

    Raises:
        SpecError: when a partition has replicas, or a module of `whole` does not exist.

    """
    _refuse_replicas(assignment)
    planned = assignment.device_of
    homes = _module_homes(graph, planned, names, whole)
    main = _main_device(graph, planned, homes)
    entries = _entries(homes, main, _own_tensors(graph, names))
    run = hooked_run(graph, entries, homes, main)
    elsewhere = np.flatnonzero((run.device_of != planned) & ~graph.is_check)
    return DeviceMap(
        entries=entries,
        main_device=main,
        device_of=run.device_of,
        moved=tuple(graph.names[op] for op in elsewhere.tolist()),
        torn=run.torn,
        weight_bytes=_weight_bytes(graph, homes),
    )


def _refuse_replicas(assignment: Assignment) -> None:
    for partition, devices in enumerate(assignment.devices_of_partition):
        if len(devices) > 1:
            raise SpecError(
                f"partition {partition} is on devices {', '.join(map(str, devices))}, and a device"
                " map has one device for each module; plan without replicas"
                " (devices.saturate_host=false)"
            )


def _main_device(graph: OpGraph, planned: IntArray, homes: Mapping[str, int]) -> int:
    """Return the device of the model's own tensors, else of the first tensors in use."""
    if "" in homes:
        return homes[""]
    if len(graph.uses) == 0:
        return int(planned[0])
    return homes[owner(graph.weight_names[int(graph.uses[0])])]


def _own_tensors(graph: OpGraph, names: Sequence[str]) -> list[str]:
    """Return the tensors that the model itself holds and saves, as far as that is known.

    Buffers that are not saved need no entry: accelerate puts them on the main device.
    """
    own_names = [name for name in names or graph.weight_names if not owner(name)]
    return [name for name in own_names if not _CONSTANT.fullmatch(name)]


def _entries(homes: Mapping[str, int], main: int, own_names: list[str]) -> dict[str, int]:
    """Return few entries that say `homes`, in the order of what they cover."""
    devices: dict[str, set[int]] = {"": {main}}
    place: dict[str, int] = {}
    for index, (path, device) in enumerate(homes.items()):
        for parent in parents(path):
            devices.setdefault(parent, set()).add(device)
            place.setdefault(parent, index)
    if len(devices[""]) == 1:
        return {"": main}
    entries = dict.fromkeys(own_names, main)
    tops = dict.fromkeys(_entry_of(path, homes, devices) for path in homes if path)
    # Readers who go through the entries in order must meet what lies around first.
    for top in sorted(tops, key=lambda path: (place[path], len(path))):
        entries[top] = homes[top] if top in homes else min(devices[top])
    return entries


def _entry_of(path: str, homes: Mapping[str, int], devices: Mapping[str, set[int]]) -> str:
    """Return the outermost module around `path` that is all on one device, else `path`.

    An entry inside another is for a single module: accelerate has given those inside it the hooks
    of the outer one by then, and keeps them.
    """
    around = parents(path)[:-1]
    if any(parent in homes and len(devices[parent]) > 1 for parent in around):
        return path
    return [path, *(parent for parent in around if len(devices[parent]) == 1)][-1]


def _weight_bytes(graph: OpGraph, homes: Mapping[str, int]) -> dict[int, int]:
    bytes_of = dict.fromkeys(sorted(set(homes.values())), 0)
    for name, size in zip(graph.weight_names, graph.weight_bytes.tolist(), strict=True):
        bytes_of[homes[owner(name)]] += size
    return bytes_of

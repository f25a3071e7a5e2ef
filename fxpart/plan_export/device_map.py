"""Export a plan as Hugging Face accelerate's `device_map`: a device for each module.

Accelerate runs a module where its tensors are, so a map can only express placements of whole
modules. `DeviceMap` therefore lists the operators that run on other devices than planned, and the
modules in which accelerate would fail. Modules on ``cpu`` or ``disk`` are copied to the main device
while they run, unless the model is on the CPU altogether.
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

__all__ = ["DeviceMap", "Place", "device_map", "tiered_device_map"]

Place = int | str
"""A number of a GPU, ``cpu`` or ``disk``."""


# Assign each module that holds tensors to the device planned for its operators. Accelerate places
# whole modules, so all tensors of a module are on one device, as are tied weights of different
# modules, and everything inside a module that is kept whole.

# Facts about a graph are cached for all of its plans.
_GRAPHS = 4


@lru_cache(maxsize=_GRAPHS)
def _first_users(graph: OpGraph) -> tuple[int, ...]:
    """Return the first operator that uses each weight."""
    first: dict[int, int] = {}
    for weight, op in zip(graph.uses.tolist(), graph.users.tolist(), strict=True):
        first.setdefault(weight, op)
    return tuple(first[weight] for weight in range(len(graph.weight_names)))


@lru_cache(maxsize=_GRAPHS)
def _first_operators(graph: OpGraph) -> dict[str, int]:
    """Return the first operator of each module with operators of its own, in graph order."""
    first: dict[str, int] = {}
    for op, module in enumerate(graph.modules):
        first.setdefault(module, op)
    return first


def _module_homes(
    graph: OpGraph, device_of: IntArray, names: Sequence[str], whole: Sequence[str]
) -> dict[str, int]:
    """Return the device of each module that directly holds tensors, in the order of their names.

    Modules that must share a device use the one planned for most bytes of their weights, each
    counted where it is first used. Modules with unused tensors go with their own operators, or else
    with their neighbours.

    Args:
        graph: the captured model.
        device_of: planned device of each operator. Length n.
        names: all known parameters and buffers; those used by operators are added.
        whole: paths of modules to keep on one device with everything inside.

    Raises:
        SpecError: if a module of `whole` does not exist.

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
    """Return the modules that hold a tensor, and those that use a tensor of another module."""
    holders = dict.fromkeys(owner(name) for name in (*names, *graph.weight_names))
    holders.update(dict.fromkeys(user for user, _ in _ties(graph)))
    return list(holders)


@lru_cache(maxsize=_GRAPHS)
def _ties(graph: OpGraph) -> tuple[tuple[str, str], ...]:
    """Return the pairs of a module and the outside holder of a weight that it uses."""
    ties: dict[tuple[str, str], None] = {}
    holder = [owner(name) for name in graph.weight_names]
    for weight, op in zip(graph.uses.tolist(), graph.users.tolist(), strict=True):
        user = graph.modules[op]
        # A module may use tensors of its submodules; others are tied to tensors of its own.
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
                f"the device map should keep {module} whole, which the model does not have; {near}"
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
    """Return the device with the most bytes for each group of modules; ties go to first use."""
    first, sizes, planned = _first_users(graph), graph.weight_bytes.tolist(), device_of.tolist()
    bytes_on: dict[str, dict[int, int]] = {}
    for weight in sorted(range(len(first)), key=first.__getitem__):
        device_bytes = bytes_on.setdefault(_root(leader, owner(graph.weight_names[weight])), {})
        device = planned[first[weight]]
        device_bytes[device] = device_bytes.get(device, 0) + sizes[weight]
    return {
        group: max(device_bytes, key=device_bytes.__getitem__)
        for group, device_bytes in bytes_on.items()
    }


def _with_unused(
    graph: OpGraph, device_of: IntArray, leader: dict[str, str], homes: dict[str, int]
) -> dict[str, int]:
    """Return the device of every module in `leader`; `homes` has those of groups in use."""
    for path, op in _first_operators(graph).items():
        if path in leader:
            homes.setdefault(_root(leader, path), int(device_of[op]))
    device_near: dict[str, int] = {"": int(device_of[0])}
    for path in leader:
        home = homes.get(_root(leader, path))
        if home is not None:
            device_near.update(
                (parent, device_near.get(parent, home)) for parent in parents(path) if parent
            )
    return {
        path: homes.setdefault(
            _root(leader, path), next(device_near[p] for p in parents(path) if p in device_near)
        )
        for path in leader
    }


_CONSTANT = re.compile(r"lifted_tensor_\d+")
"""Names that torch.export gives to tensors made from constants."""


@dataclass(frozen=True, eq=False, slots=True)
class DeviceMap:
    """A device for each module, with its deviations from the plan.

    ``dispatch_model(model, device_map=found.entries, main_device=found.main_device)``.
    """

    entries: Mapping[str, Place]
    """Module path to place, JSON-serializable. Paths are disjoint, except that a module
    with tensors of its own may enclose others; the longest path applies. ``""`` is the whole model.
    If the model is split, parameters held by the model itself have entries by their own names,
    which accelerate warns about but accepts. The first device among them is `main_device`."""
    main_device: Place
    """Device of the model's inputs and its own tensors, to which modules in tiers are copied."""
    device_of: IntArray
    """Logical device on which accelerate runs each operator. Length n."""
    moved: tuple[str, ...]
    """Operators that run on another device than planned, in graph order."""
    torn: tuple[str, ...]
    """Modules that accelerate cannot run as split, since one of their own operators would have
    operands on several devices. Keep these, or a module around them, whole."""
    weight_bytes: Mapping[Place, int]
    """Bytes of the weights in each place."""


def device_map(
    graph: OpGraph,
    assignment: Assignment,
    names: Sequence[str] = (),
    whole: Sequence[str] = (),
    hosts: Sequence[int] = (),
) -> DeviceMap:
    """Return the device map closest to `assignment`.

    A module's tensors go where they are first used, and tied weights to one device. Modules
    entirely on one device become a single entry.

    Args:
        graph: the model, captured by operators or by modules.
        assignment: the plan.
        names: ``list(model.state_dict())``. Without it, unused tensors are unknown, and are only
            covered by entries of enclosing modules.
        whole: paths of modules to keep on the device planned for most bytes of their weights, such
            as the blocks in accelerate's `no_split_module_classes`.
        hosts: logical devices that are CPUs, which are ``cpu`` in the map. Others are numbered
            without them.

    Raises:
        SpecError: if the assignment is for another graph, a partition has replicas, or a module of
            `whole` does not exist.

    """
    assignment.check_for(graph.n_ops)
    _refuse_replicas(assignment)
    planned = assignment.device_of
    if hosts:  # all are one device for accelerate
        planned = np.where(np.isin(planned, hosts), hosts[0], planned)
    homes = _module_homes(graph, planned, names, whole)
    return _map_of_homes(graph, planned, homes, dict.fromkeys(hosts, "cpu"), names)


def tiered_device_map(
    graph: OpGraph, device_of: IntArray, tier_of: Mapping[int, str], names: Sequence[str] = ()
) -> DeviceMap:
    """Return the device map closest to an offloading plan.

    All modules in tiers are copied to the main device: the one that is planned to run most of them.
    ``dispatch_model(model, entries, main_device=..., offload_dir=...)`` runs it.

    Args:
        graph: the captured model.
        device_of: planned device of each operator; -1 if it is planned on the host, where
            accelerate does not run it. Length n.
        tier_of: ``cpu`` or ``disk`` for operators with offloaded weights.
        names: ``list(model.state_dict())``, as for `device_map`.

    """
    devices = int(device_of.max(initial=0)) + 1
    tiers = {devices: "cpu", devices + 1: "disk"}
    place_of = np.where(device_of < 0, devices, device_of)
    for op, tier in tier_of.items():
        place_of[op] = devices + (tier == "disk")
    # All operators of a group are placed with its first one.
    place_of = place_of[graph.group]
    homes = _module_homes(graph, place_of, names, ())
    copied = device_of[(place_of >= devices) & (device_of >= 0)]
    main = int(np.bincount(copied).argmax()) if len(copied) else None
    return _map_of_homes(graph, device_of, homes, tiers, names, main=main)


def _map_of_homes(
    graph: OpGraph,
    planned: IntArray,
    homes: Mapping[str, int],
    tiers: Mapping[int, str],
    names: Sequence[str],
    *,
    main: int | None = None,
) -> DeviceMap:
    """Return the map of `homes`, where `tiers` names those that are no GPUs.

    Args:
        graph: the captured model.
        planned: device of each operator; -1 if accelerate does not run it there. Length n.
        homes: place of each module with tensors.
        tiers: ``cpu`` or ``disk`` for places that are tiers or CPUs.
        names: as for `device_map`.
        main: the device to which modules in tiers are copied; None for that of the model's inputs.

    """
    of_inputs = _main_device(graph, planned, homes)
    place_of_path = _entries(homes, of_inputs, _own_tensors(graph, names))
    first = [] if main is None else [main]
    places = (*first, of_inputs, *place_of_path.values(), *planned.tolist())
    running = next((place for place in places if place >= 0 and place not in tiers), of_inputs)
    on_device = dict.fromkeys(tiers, running)
    run = hooked_run(
        graph,
        {path: on_device.get(place, place) for path, place in place_of_path.items()},
        {path: on_device.get(place, place) for path, place in homes.items()},
        running,
    )
    displaced = np.flatnonzero((run.device_of != planned) & (planned >= 0) & ~graph.is_check)
    ordered = list(place_of_path.items())
    if next((place for _, place in ordered if place not in tiers), running) != running:
        # Accelerate takes the first device of the map for the main one.
        ordered.sort(key=lambda item: item[1] != running)
    return DeviceMap(
        entries={path: _place(place, tiers) for path, place in ordered},
        main_device=_place(running, tiers),
        device_of=run.device_of,
        moved=tuple(graph.names[op] for op in displaced.tolist()),
        torn=run.torn,
        weight_bytes={
            _place(place, tiers): size for place, size in _weight_bytes(graph, homes).items()
        },
    )


def _place(number: int, tiers: Mapping[int, str]) -> Place:
    """Return accelerate's name of a place, where only GPUs have numbers."""
    return tiers.get(number, number - sum(tier < number for tier in tiers))


def _refuse_replicas(assignment: Assignment) -> None:
    for partition, devices in enumerate(assignment.devices_of_partition):
        if len(devices) > 1:
            raise SpecError(
                f"partition {partition} is on devices {', '.join(map(str, devices))}, and a device"
                " map has one device for each module; plan without replicas"
                " (devices.saturate_host=false)"
            )


def _main_device(graph: OpGraph, planned: IntArray, homes: Mapping[str, int]) -> int:
    """Return the device of the model's own tensors, or else of the first tensors used."""
    if "" in homes:
        return homes[""]
    if len(graph.uses) == 0:
        return int(planned[0])
    return homes[owner(graph.weight_names[int(graph.uses[0])])]


def _own_tensors(graph: OpGraph, names: Sequence[str]) -> list[str]:
    """Return the known tensors that the model itself holds and saves.

    Non-persistent buffers need no entry, since accelerate puts them on the main device.
    """
    own_names = [name for name in names or graph.weight_names if not owner(name)]
    return [name for name in own_names if not _CONSTANT.fullmatch(name)]


def _entries(homes: Mapping[str, int], main: int, own_names: list[str]) -> dict[str, int]:
    """Return a compact set of entries for `homes`, in the order of what they cover."""
    devices: dict[str, set[int]] = {"": {main}}
    position_of: dict[str, int] = {}
    for index, (path, device) in enumerate(homes.items()):
        for parent in parents(path):
            devices.setdefault(parent, set()).add(device)
            position_of.setdefault(parent, index)
    if len(devices[""]) == 1:
        return {"": main}
    entries = dict.fromkeys(own_names, main)
    tops = dict.fromkeys(_entry_of(path, homes, devices) for path in homes if path)
    # Readers that apply entries in order must see enclosing modules first.
    for top in sorted(tops, key=lambda path: (position_of[path], len(path))):
        entries[top] = homes[top] if top in homes else min(devices[top])
    return entries


def _entry_of(path: str, homes: Mapping[str, int], devices: Mapping[str, set[int]]) -> str:
    """Return the outermost module around `path` that is entirely on one device, or else `path`.

    An entry inside another applies to a single module: by then accelerate has hooked everything
    inside for the outer entry, and keeps those hooks.
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

"""The copies of a plan's offloaded weights and caches."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.module_paths import owner
from fxpart.cost.problem import Problem
from fxpart.cost.streams import Copy, Push, Source, Streams, Uses, copies_of
from fxpart.cost.tables import memory_tables
from fxpart.placement.offload.machine import BoolArray, Machine
from fxpart.placement.offload.units import HOSTED, STREAMED, CacheWrites, cache_writes, weight_uses

__all__ = ["Costed", "costed", "sources_of", "streams_of"]


class Costed(NamedTuple):
    """A plan before its times are simulated."""

    problem: Problem
    copies: list[Copy]
    streams: Streams
    parts: list[str]
    """The modules indexed by `Copy.unit`."""
    pushes: list[Push]


def costed(machine: Machine, ways: IntArray, on_disk: BoolArray, device_of: IntArray) -> Costed:
    """Return the problem (with the host if anything runs there), the copies and their links."""
    hosted = bool((ways == HOSTED).any())
    base = machine.with_host if hosted else machine.problem
    graph, caches = base.graph, machine.tier_caches(ways)
    parts, part_of, sources = _parts(machine, ways, on_disk)
    is_offloaded = part_of[: len(graph.weight_bytes)] >= 0
    alloc_bytes = graph.value_alloc_bytes.copy()
    alloc_bytes[caches] = 0
    bare = replace(
        graph,
        weight_bytes=np.where(is_offloaded, 0, graph.weight_bytes),
        value_alloc_bytes=alloc_bytes,
    )
    writes = cache_writes(graph)
    if machine.begins:
        writes = writes._replace(copied_bytes=np.zeros_like(writes.copied_bytes))
    filled_bytes = graph.value_alloc_bytes - writes.copied_bytes
    users, weights = _weight_uses_where_copied(graph, device_of)
    uses = Uses(
        np.concatenate([users, graph.readers]),
        np.concatenate([weights, len(graph.weight_bytes) + graph.reads]),
        np.concatenate([graph.weight_bytes, writes.copied_bytes]),
        np.concatenate([np.zeros_like(graph.weight_bytes), filled_bytes]),
    )
    copies = copies_of(uses, device_of, part_of, sources)
    streams = streams_of(machine, base.topology.n_devices)
    values_part = part_of[len(graph.weight_bytes) :]
    pushes = _pushed(writes, values_part, device_of, copies, sources)
    problem = replace(base, graph=bare, memory=memory_tables(bare))
    return Costed(problem, copies, streams, parts, pushes)


def _weight_uses_where_copied(graph: OpGraph, device_of: IntArray) -> tuple[IntArray, IntArray]:
    """Return the operators that use weights, and those weights.

    A reader of a view made on another device is sent the view, not the weight.
    """
    users, weights = weight_uses(graph)
    devices = int(device_of.max()) + 1
    direct = graph.uses * devices + device_of[graph.users]
    is_here = np.isin(weights * devices + device_of[users], direct)
    return users[is_here], weights[is_here]


def streams_of(machine: Machine, devices: int) -> Streams:
    """Return the links of the devices to the host and its disk."""
    options, disk = machine.options, machine.tiers.disk
    return Streams(
        np.full(devices, machine.link[0]),
        np.full(devices, machine.link[1] + options.copy_latency_s),
        overlap=options.overlap,
        host_bytes_per_s=options.host_bytes_per_s or np.inf,
        disk_bytes_per_s=float(disk.bytes_per_s or np.inf) if disk else np.inf,
    )


def _pushed(
    writes: CacheWrites,
    part_of: IntArray,
    device_of: IntArray,
    copies: Sequence[Copy],
    sources: Sequence[Source],
) -> list[Push]:
    """Return the pushes of new entries of offloaded caches, one per part.

    A push's buffer on the device is reused by the second copy after it.
    """
    size: dict[tuple[int, int], int] = defaultdict(int)
    last: dict[tuple[int, int], int] = {}
    for value in np.flatnonzero((part_of >= 0) & (writes.written_bytes > 0)).tolist():
        op = int(writes.last_op[value])
        key = int(part_of[value]), int(device_of[op])
        size[key] += int(writes.written_bytes[value])
        last[key] = max(op, last.get(key, op))
    pushes = []
    for key, op in sorted(last.items(), key=lambda item: item[1]):
        later = [c.first_op for c in copies if c.device == key[1] and c.first_op > op]
        waiting_ops = tuple(later[1:2])
        pushes.append(
            Push(key[1], size[key], op, waiting_ops, to_host=True, source=sources[key[0]])
        )
    return pushes


def _parts(
    machine: Machine, ways: IntArray, on_disk: BoolArray
) -> tuple[list[str], IntArray, list[Source]]:
    """Return the modules that are copied as a whole, that of each storage, and their locations.

    With overlap they are whole units; otherwise each module that directly holds weights or a cache,
    copied when it is called. Storages are the weights, then the values, of which caches are copied.
    Shape (W + V,).
    """
    graph = machine.problem.graph
    names = graph.weight_names
    part_of = np.full(len(names) + graph.n_values, -1, dtype=np.int64)
    parts: dict[str, int] = {}
    sources: list[Source] = []
    of_unit = _sources(machine, ways, on_disk)
    readers = dict(zip(graph.reads.tolist(), graph.readers.tolist(), strict=True))
    for index in np.flatnonzero(machine.tier_sizes(ways)).tolist():
        unit = machine.units[index]
        owners = {w: owner(names[w]) for w in unit.weights.tolist() if ways[index] == STREAMED}
        if machine.cache_sizes[index]:
            owners |= {len(names) + v: graph.modules[readers[v]] for v in unit.caches.tolist()}
        for storage, module in owners.items():
            path = unit.path if machine.options.overlap else module
            if path not in parts:
                parts[path] = len(parts)
                sources.append(of_unit[index])
            part_of[storage] = parts[path]
    return list(parts), part_of, sources


def _sources(machine: Machine, ways: IntArray, on_disk: BoolArray) -> list[Source]:
    """Return the location of the streamed tensors of each unit."""
    return sources_of(machine, machine.tier_sizes(ways), on_disk)


def sources_of(machine: Machine, sizes: IntArray, on_disk: BoolArray) -> list[Source]:
    """Return the locations of units of the given sizes, in pinned memory as far as it suffices."""
    options = machine.options
    pinned = machine.tiers.host.memory_bytes if options.overlap else 0
    if options.pinned_bytes is not None:
        pinned = min(pinned, options.pinned_bytes)
    sources = []
    for size, is_stored in zip(sizes.tolist(), on_disk.tolist(), strict=True):
        is_pinned = 0 < size <= pinned
        if is_pinned and not is_stored:
            pinned -= size
        share = options.pinned_share if is_pinned else options.pageable_share
        sources.append(Source(share, is_stored))
    return sources

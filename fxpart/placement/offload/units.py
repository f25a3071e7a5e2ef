"""`Unit`: the part of a model that is offloaded as a whole, and its cache traffic."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray, OpGraph, only_user, storage_roots
from fxpart.core.module_paths import block_of, owner

__all__ = [
    "HOSTED",
    "RESIDENT",
    "STREAMED",
    "CacheWrites",
    "Unit",
    "cache_writes",
    "units_of",
    "weight_uses",
]

RESIDENT, STREAMED, HOSTED = 0, 1, 2
"""State of a unit: weights resident on a device, streamed to it, or used on the host."""

_DEPTHS = 3
"""Most times that a unit is divided into its submodules."""


def _none() -> IntArray:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False, slots=True)
class Unit:
    """A part of the model that is offloaded as a whole: a block, or a module outside of blocks.

    Operators that must stay together are in one unit.
    """

    path: str
    weights: IntArray
    """Weight storages used by no operator outside."""
    ops: IntArray
    """All operators of the module, in whole groups."""
    weight_bytes: int
    largest_bytes: int
    """Largest total of weights directly held by a module inside."""
    caches: IntArray = field(default_factory=_none)
    """Inputs cached from one token to the next, read by no operator outside."""
    cache_bytes: int = 0


def weight_uses(graph: OpGraph) -> tuple[IntArray, IntArray]:
    """Return the operators that compute with weights, directly or through views, and those weights.

    A product and its backward may read a transposed view of a weight made by an earlier operator.
    """
    computes = ~graph.is_update[graph.users]
    users, weights = graph.users[computes], graph.uses[computes]
    one_weight = dict(zip(users.tolist(), weights.tolist(), strict=True))
    several = np.bincount(users, minlength=graph.n_ops) > 1
    viewed = np.full(graph.n_values, -1, dtype=np.int64)
    is_view = (graph.value_producer >= 0) & (graph.value_alloc_bytes == 0) & (graph.value_base < 0)
    for value in np.flatnonzero(is_view & (graph.value_bytes > 0)).tolist():
        maker = int(graph.value_producer[value])
        if not several[maker]:
            viewed[value] = one_weight.get(maker, -1)
    of_read = viewed[storage_roots(graph)[graph.reads]]
    by_view = of_read >= 0
    return (
        np.concatenate([users, graph.readers[by_view]]),
        np.concatenate([weights, of_read[by_view]]),
    )


def units_of(graph: OpGraph, most_bytes: int) -> tuple[Unit, ...]:
    """Return the units of a graph, in graph order.

    Blocks larger than `most_bytes` are divided. Weights shared by several units are in none.
    """
    path_of = [block_of(module) or module for module in graph.modules]
    for _ in range(_DEPTHS):
        units = _units(graph, path_of)
        large = {unit.path for unit in units if unit.weight_bytes > most_bytes}
        if not large:
            break
        path_of = [
            _one_deeper(path, module) if path in large else path
            for path, module in zip(path_of, graph.modules, strict=True)
        ]
    return _units(graph, path_of)


def _one_deeper(path: str, module: str) -> str:
    return ".".join(module.split(".")[: len(path.split(".")) + 1]) if path else module


def _units(graph: OpGraph, path_of: Sequence[str]) -> tuple[Unit, ...]:
    number = {path: index for index, path in enumerate(dict.fromkeys(path_of))}
    unit_of_op = np.array([number[path] for path in path_of], dtype=np.int64)[graph.group]
    users, used = weight_uses(graph)
    unit_of = only_user(len(graph.weight_names), used, unit_of_op[users])
    cache_of = only_user(graph.n_values, graph.reads, unit_of_op[graph.readers])
    cache_of[~graph.value_is_cache] = -1
    units = []
    for path, index in number.items():
        weights = np.flatnonzero(unit_of == index).astype(np.int64)
        if len(weights):
            module_bytes: dict[str, int] = {}
            for weight in weights.tolist():
                module = owner(graph.weight_names[weight])
                module_bytes[module] = module_bytes.get(module, 0) + int(graph.weight_bytes[weight])
            size, ops = sum(module_bytes.values()), np.flatnonzero(unit_of_op == index)
            caches = np.flatnonzero(cache_of == index).astype(np.int64)
            cached_bytes = int(graph.value_alloc_bytes[caches].sum())
            units.append(
                Unit(path, weights, ops, size, max(module_bytes.values()), caches, cached_bytes)
            )
    return tuple(sorted(units, key=lambda unit: int(unit.ops[0])))


class CacheWrites(NamedTuple):
    """Writes of an input to its caches, by value; 0 and -1 for other values. Shape (V,)."""

    written_bytes: IntArray
    """Bytes written, which must be copied back to a tier."""
    copied_bytes: IntArray
    """Bytes read of the previous content."""
    last_op: IntArray
    """The last operator that writes to the cache."""


def cache_writes(graph: OpGraph) -> CacheWrites:
    """Return the writes to each cache by operators that update it in place.

    A cache that is written before it is read, like that of attention, is copied without the
    overwritten part.
    """
    root = storage_roots(graph)
    is_cache = graph.value_is_cache
    written, last_op = np.zeros(graph.n_values, dtype=np.int64), np.full(graph.n_values, -1)
    was_read = np.zeros(graph.n_values, dtype=np.bool_)
    made_in = {int(op): int(v) for v, op in enumerate(graph.value_producer) if is_cache[root[v]]}
    cached = np.unique(graph.readers[is_cache[root[graph.reads]]])
    for op in cached.tolist():
        reads = graph.reads_of(op)
        caches = np.unique(root[reads][is_cache[root[reads]]])
        target = root[made_in[op]] if op in made_in and graph.moved_bytes[op] > 0 else -1
        if target >= 0:
            others = graph.value_bytes[reads[root[reads] != target]]
            written[target] += int(others.max(initial=0))
            last_op[target] = op
        elif graph.moved_bytes[op] > 0:
            was_read[caches[written[caches] == 0]] = True
    written = np.minimum(written, graph.value_alloc_bytes)
    copied = np.where(was_read, graph.value_alloc_bytes, graph.value_alloc_bytes - written)
    return CacheWrites(written, np.where(is_cache, copied, 0), last_op)

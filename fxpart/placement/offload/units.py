"""`Unit`: what of a model is offloaded at once, and what of its caches is copied."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray, OpGraph, storage_roots
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
"""What becomes of a unit: its weights stay on a device, are copied there, or used on the host."""

_DEPTHS = 3
"""Times that a unit is divided into the modules in it, at most."""


def _none() -> IntArray:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False, slots=True)
class Unit:
    """What is offloaded at once: a block of the model, or a module beside the blocks.

    An operator that must stay with another is of that one's unit.
    """

    path: str
    weights: IntArray
    """Storages that no operator outside uses."""
    ops: IntArray
    """All operators of the module, whole groups of them."""
    weight_bytes: int
    largest_bytes: int
    """Weights of the largest module in it that holds some itself."""
    caches: IntArray = field(default_factory=_none)
    """Inputs that are kept from one token to the next, which no operator outside reads."""
    cache_bytes: int = 0


def weight_uses(graph: OpGraph) -> tuple[IntArray, IntArray]:
    """Return the operators that compute with weights, and those weights, by way of views too.

    A product reads the transposed view of a weight, which may be made by an operator before it; so
    does its backward.
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
    """Return what may be offloaded, in graph order.

    Blocks of more than `most_bytes` are divided. Weights that several units share stay resident.
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
    unit_of = _only_user(len(graph.weight_names), used, unit_of_op[users])
    cache_of = _only_user(graph.n_values, graph.reads, unit_of_op[graph.readers])
    cache_of[~graph.value_is_cache] = -1
    units = []
    for path, index in number.items():
        weights = np.flatnonzero(unit_of == index).astype(np.int64)
        if len(weights):
            of_module: dict[str, int] = {}
            for weight in weights.tolist():
                module = owner(graph.weight_names[weight])
                of_module[module] = of_module.get(module, 0) + int(graph.weight_bytes[weight])
            size, ops = sum(of_module.values()), np.flatnonzero(unit_of_op == index)
            caches = np.flatnonzero(cache_of == index).astype(np.int64)
            cached = int(graph.value_alloc_bytes[caches].sum())
            units.append(Unit(path, weights, ops, size, max(of_module.values()), caches, cached))
    return tuple(sorted(units, key=lambda unit: int(unit.ops[0])))


def _only_user(storages: int, uses: IntArray, units: IntArray) -> IntArray:
    """Return the one unit that uses each storage, -1 for those of none or several."""
    least = np.full(storages, np.iinfo(np.int64).max)
    most = np.full(storages, -1, dtype=np.int64)
    np.minimum.at(least, uses, units)
    np.maximum.at(most, uses, units)
    only: IntArray = np.where(least == most, most, -1)
    return only


class CacheWrites(NamedTuple):
    """What an input writes to its caches, by value; 0 and -1 for what is no cache. Shape (V,)."""

    written_bytes: IntArray
    """What lies in a tier must be copied back there."""
    copied_bytes: IntArray
    """What is read of what was there before."""
    last_op: IntArray
    """The last operator that writes to it."""


def cache_writes(graph: OpGraph) -> CacheWrites:
    """Return what is written to each cache by operators that update it in place.

    A cache that is written before anything reads it, as attention's is, is copied without the
    places that are written.
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

"""Every storage on a device, with its kind and lifetime.

The accounting is that of `fxpart.cost.kernels.device_memory`, per storage instead of summed.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fxpart.core.blocks import COPY, GATHER
from fxpart.core.graph import CAST, IntArray, OpGraph
from fxpart.cost.tables import MemoryTables

__all__ = [
    "KINDS",
    "PLURALS",
    "StorageFacts",
    "Storages",
    "short_name",
    "storage_facts",
    "storages_on",
]

BoolArray = npt.NDArray[np.bool_]

_RESIDENT = ("weight", "optimizer state", "kv cache", "input")
"""Kinds of storages that are there before the first operator."""
KINDS = (
    *_RESIDENT,
    "gradient",
    "output",
    "gathered weight",
    "saved activation",
    "received",
    "temporary",
)
"""Kinds of storages; the first that applies counts.

- ``weight``: a parameter or a buffer; ``optimizer state``: what is stored with it by an
  optimizer, or as a bucket in which its gradient is all-reduced.
- ``kv cache``: state kept from one token to the next; it is an input.
- ``input``: everything else passed in by the caller.
- ``gradient``: the gradient of a weight, its cast to float32 for an update, and the terms that
  are summed into it, produced or received.
- ``output``: any other result returned to the caller, which lives to the end.
- ``gathered weight``: the whole of sharded weights, or the buffer that they are gathered into.
- ``saved activation``: produced in the forward, here or elsewhere, and read here in the backward.
- ``received``: anything else produced on another device.
- ``temporary``: everything else.
"""

PLURALS = dict(
    zip(
        KINDS,
        (
            "weights",
            "optimizer state",
            "kv cache",
            "inputs",
            "gradients",
            "outputs",
            "gathered weights",
            "saved activations",
            "received",
            "temporaries",
        ),
        strict=True,
    )
)
"""Plural of each kind."""

_SUMS = ("add", "add_")
"""Operators that sum terms of a gradient."""
(
    _WEIGHT,
    _STATE,
    _CACHE,
    _INPUT,
    _GRADIENT,
    _OUTPUT,
    _GATHERED,
    _SAVED,
    _RECEIVED,
    _TEMPORARY,
) = range(len(KINDS))


@dataclass(frozen=True, eq=False, slots=True)
class StorageFacts:
    """Properties of a graph that decide the kinds of storages, computed once for all devices."""

    memory: MemoryTables
    weight_bytes: IntArray
    """Bytes of each weight, without optimizer state. Length W."""
    state_bytes: IntArray
    """Bytes of optimizer state of each weight. Length W."""
    is_backward: BoolArray
    """Whether each operator is in the backward. Length n."""
    is_update: BoolArray
    """Whether each operator updates a weight. Length n."""
    is_gradient: BoolArray
    """Whether a value is a weight's gradient, or a term or cast of one. Length V."""
    is_gathered: BoolArray
    """Whether a value is a gathered weight or the buffer of one. Length V."""
    is_cache: BoolArray
    """Whether a value is an input cached from one token to the next. Length V."""
    reader: IntArray
    """The operator of each item of ``memory.reads``."""


@dataclass(frozen=True, eq=False, slots=True)
class Storages:
    """The storages on one device for one input. Arrays have one item per storage."""

    kind: IntArray
    """Index into `KINDS`."""
    source: IntArray
    """The weight, for weights and optimizer state; otherwise the value that the storage was
    allocated for, or received as."""
    size_bytes: IntArray
    born: IntArray
    """The operator at which it is allocated; 0 if it is resident."""
    last: IntArray
    """The last operator during which it is live; the last of the graph if it is never freed."""

    def at(self, op: int) -> IntArray:
        """Return the storages that are live while operator `op` runs, in order."""
        return np.flatnonzero((self.born <= op) & (op <= self.last))

    def peak_bytes_in_turn(self, partition_of: IntArray) -> int:
        """Return the peak if a process runs the partitions one after another, by number.

        A device then runs its operators in the same order, but others reach what they send to it
        earlier or later than in graph order. `partition_of` has length n.
        """
        end = len(partition_of)
        when = np.empty(end, dtype=np.int64)
        when[np.argsort(partition_of, kind="stable")] = np.arange(end)
        born = np.where(self.kind < len(_RESIDENT), 0, when[self.born])
        # A reference by Python may end at an operator of another device, which runs before.
        last = np.where(self.last == end - 1, end - 1, np.maximum(when[self.last], born))
        change = np.zeros(end + 1, dtype=np.int64)
        np.add.at(change, born, self.size_bytes)
        np.subtract.at(change, last + 1, self.size_bytes)
        return int(np.cumsum(change).max())

    def bytes_by_kind(self, chosen: IntArray) -> IntArray:
        """Return the bytes of the `chosen` storages by kind. Length of `KINDS`."""
        total = np.zeros(len(KINDS), dtype=np.int64)
        np.add.at(total, self.kind[chosen], self.size_bytes[chosen])
        return total


def storage_facts(graph: OpGraph, memory: MemoryTables) -> StorageFacts:
    """Return the `StorageFacts` of `graph`; `memory` has its tables."""
    is_backward = graph.is_backward
    return StorageFacts(
        memory,
        graph.weight_bytes,
        graph.weight_state_bytes,
        is_backward,
        graph.is_update,
        _gradients_and_parts(graph, is_backward) | _casts(graph),
        _gathered(graph),
        graph.value_is_cache,
        graph.readers,
    )


def _gradients_and_parts(graph: OpGraph, is_backward: BoolArray) -> BoolArray:
    """Return whether each value is a weight's gradient or a term of one."""
    marked = np.zeros(graph.n_values, dtype=np.bool_)
    marked[graph.gradient_values] = True
    # A depth-first walk over few values, so plain Python ints.
    stack: list[int] = graph.gradient_values.tolist()
    while stack:
        value = stack.pop()
        op, base = int(graph.value_producer[value]), int(graph.value_base[value])
        parts = [base] if base >= 0 else []
        if op >= 0 and is_backward[op] and short_name(graph.targets[op]) in _SUMS:
            size = graph.value_bytes[value]
            parts += [v for v in graph.reads_of(op).tolist() if graph.value_bytes[v] == size]
        for part in parts:
            maker = int(graph.value_producer[part])
            if maker >= 0 and is_backward[maker] and not marked[part]:
                marked[part] = True
                stack.append(part)
    return marked


def _casts(graph: OpGraph) -> BoolArray:
    """Return whether each value is a gradient cast for an update."""
    is_cast = np.array([target == CAST for target in graph.targets], dtype=np.bool_)
    return (graph.value_producer >= 0) & is_cast[graph.value_producer]


def _gathered(graph: OpGraph) -> BoolArray:
    """Return whether each value is produced by an all-gather, or by a copy out of its buffer."""
    gathers, copies = (
        np.array([name == target for name in graph.targets], dtype=np.bool_)
        for target in (GATHER, COPY)
    )
    of_gather = (graph.value_producer >= 0) & gathers[graph.value_producer]
    copies_out = np.zeros(graph.n_ops, dtype=np.bool_)
    copies_out[graph.readers[of_gather[graph.reads]]] = True
    makes = gathers | (copies & copies_out)
    return (graph.value_producer >= 0) & makes[graph.value_producer]


def short_name(target: str) -> str:
    """Return ``gelu`` for ``aten.gelu.default``, and ``getitem`` for ``operator.getitem``."""
    parts = target.split(".")
    return parts[-2] if len(parts) > 2 else parts[-1]


def storages_on(
    facts: StorageFacts, device_of: IntArray, device: int, weights: IntArray
) -> Storages:
    """Return the storages on `device` for one input.

    Args:
        facts: the facts of the graph.
        device_of: device of each operator for this input. Shape (n,).
        device: logical id of the device.
        weights: the distinct weights on the device, in order; some may serve other inputs.

    """
    m, n = facts.memory, len(device_of)
    is_local = m.producer >= 0
    is_local[is_local] = device_of[m.producer[is_local]] == device
    is_local_read = device_of[facts.reader] == device
    root, is_root = _roots(m, is_local, is_local_read)
    last, last_read = _last_uses(facts, is_local, is_local_read, root, n)
    values = np.flatnonzero(is_root)
    maker = m.producer[values]
    is_input = maker < 0
    kind = _kinds(facts, is_local, root, values, last_read[values])
    size = np.where(is_local[values] | is_input, m.alloc_bytes[values], m.value_bytes[values])
    states = weights[facts.state_bytes[weights] > 0]
    resident = len(weights) + len(states)
    return Storages(
        np.concatenate([np.repeat([_WEIGHT, _STATE], [len(weights), len(states)]), kind]),
        np.concatenate([weights, states, values]),
        np.concatenate([facts.weight_bytes[weights], facts.state_bytes[states], size]),
        np.concatenate([np.zeros(resident, dtype=np.int64), np.maximum(maker, 0)]),
        np.concatenate(
            [np.full(resident, n - 1, dtype=np.int64), np.where(is_input, n - 1, last[values])]
        ),
    )


def _roots(
    m: MemoryTables, is_local: BoolArray, is_local_read: BoolArray
) -> tuple[IntArray, BoolArray]:
    """Return the value that owns the storage of each value on a device, and a mask of those.

    A view made on the device lives in the storage of its base; a received value has its own, even
    if it is a view where it was made. `is_local` is a mask of the values (V,) produced on the
    device, `is_local_read` of the reads (as `m.reads`) by its operators.
    """
    present = is_local.copy()
    present[m.reads[is_local_read]] = True
    root = np.where(is_local & (m.base >= 0), m.base, np.arange(len(m.base)))
    while True:
        next_root = root[root]
        if np.array_equal(next_root, root):
            break
        root = next_root
    return root, present & (root == np.arange(len(root)))


def _last_uses(
    facts: StorageFacts, is_local: BoolArray, is_local_read: BoolArray, root: IntArray, n: int
) -> tuple[IntArray, IntArray]:
    """Return the last operator that needs each storage, and the last that reads it (or -1).

    Both are indexed by the value in `root` that owns the storage. Shape (V,) each.
    """
    m = facts.memory
    last_read = np.full(len(root), -1, dtype=np.int64)
    np.maximum.at(last_read, root[m.reads[is_local_read]], facts.reader[is_local_read])
    values = np.flatnonzero(is_local)
    # Variables reference the original, not a received copy.
    held_until = np.where(is_local[root[values]], m.held[values], -1)
    until = np.where(m.is_output[values], n - 1, np.maximum(m.producer[values], held_until))
    last = last_read.copy()
    np.maximum.at(last, root[values], until)
    return last, last_read


def _kinds(
    facts: StorageFacts, is_local: BoolArray, root: IntArray, values: IntArray, last_read: IntArray
) -> IntArray:
    """Return the kind of the storage of each of `values`; `last_read` has one item for each."""
    m = facts.memory
    maker = m.producer[values]
    of_gradient, of_output = np.zeros((2, len(root)), dtype=np.bool_)
    of_gradient[root[facts.is_gradient]] = True
    # Values of updates that live to the end of the step, such as `foreach` lists, have no reader.
    of_updates = facts.is_update[np.maximum(m.producer, 0)]
    of_output[root[m.is_output & is_local & ~of_updates]] = True
    saved = ~facts.is_backward[maker] & facts.is_backward[last_read] & (last_read >= 0)
    is_cache, received = facts.is_cache[values], ~is_local[values]
    gathered = facts.is_gathered[values]
    return np.select(
        [is_cache, maker < 0, of_gradient[values], of_output[values], gathered, saved, received],
        [_CACHE, _INPUT, _GRADIENT, _OUTPUT, _GATHERED, _SAVED, _RECEIVED],
        _TEMPORARY,
    ).astype(np.int64)

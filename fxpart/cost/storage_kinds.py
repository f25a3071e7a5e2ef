"""Every storage on a device: its kind, and when it is allocated and freed.

The same accounting as `fxpart.cost.kernels.device_memory`, storage by storage instead of summed up.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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

KINDS = (
    "weight",
    "optimizer state",
    "kv cache",
    "input",
    "gradient",
    "output",
    "saved activation",
    "received",
    "temporary",
)
"""What a storage can be there for; the first that is true of it counts.

- ``weight``: a parameter or a buffer; ``optimizer state``: what is kept for it besides, by an
  optimizer, or as a bucket that its gradient is summed in.
- ``kv cache``: what is kept of a text from one token to the next; it comes as an input.
- ``input``: what else the caller passes in.
- ``gradient``: the gradient of a weight, its cast to float32 for an update, and the parts that are
  added up to it, made or received.
- ``output``: any other that the caller gets, so that it stays.
- ``saved activation``: made in the forward, here or elsewhere, and read here in the backward.
- ``received``: any other that was made on another device.
- ``temporary``: all the rest.
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
            "saved activations",
            "received",
            "temporaries",
        ),
        strict=True,
    )
)
"""What several storages of each kind are called."""

_SUMS = ("add", "add_")
"""What adds up parts of a gradient."""
_WEIGHT, _STATE, _CACHE, _INPUT, _GRADIENT, _OUTPUT, _SAVED, _RECEIVED, _TEMPORARY = range(
    len(KINDS)
)


@dataclass(frozen=True, eq=False, slots=True)
class StorageFacts:
    """What of a graph decides the kinds of its storages, worked out once for all devices."""

    memory: MemoryTables
    weight_bytes: IntArray
    """Bytes of each weight, without what an optimizer keeps. Length W."""
    state_bytes: IntArray
    """Bytes that an optimizer keeps for each weight. Length W."""
    is_backward: BoolArray
    """Of each operator. Length n."""
    is_update: BoolArray
    """Likewise whether it updates a weight."""
    is_gradient: BoolArray
    """Whether a value is a gradient of a weight, a part or a cast of one. Length V."""
    is_cache: BoolArray
    """Whether a value is an input that is kept from one token to the next. Length V."""
    reader: IntArray
    """The operator of each item of ``memory.reads``."""


@dataclass(frozen=True, eq=False, slots=True)
class Storages:
    """The storages on one device for one input. Arrays have an item for each."""

    kind: IntArray
    """Place in `KINDS`."""
    source: IntArray
    """The weight, of a weight and an optimizer's state; of any other the value that it was made
    for, or under which it was received."""
    size_bytes: IntArray
    born: IntArray
    """The operator of the graph with which it comes; 0 for what is always there."""
    last: IntArray
    """The last operator of the graph for which it is there; the last of all where it stays."""

    def at(self, op: int) -> IntArray:
        """Return which of them are there while operator `op` runs, in order."""
        return np.flatnonzero((self.born <= op) & (op <= self.last))

    def bytes_by_kind(self, chosen: IntArray) -> IntArray:
        """Return the bytes of the `chosen` storages, summed for each kind. Length of `KINDS`."""
        total = np.zeros(len(KINDS), dtype=np.int64)
        np.add.at(total, self.kind[chosen], self.size_bytes[chosen])
        return total


def storage_facts(graph: OpGraph, memory: MemoryTables) -> StorageFacts:
    """Return what decides the kinds of storages of `graph`; `memory` is its tables."""
    is_backward = graph.is_backward
    return StorageFacts(
        memory,
        graph.weight_bytes,
        graph.weight_state_bytes,
        is_backward,
        graph.is_update,
        _gradients_and_parts(graph, is_backward) | _casts(graph),
        graph.value_is_cache,
        graph.readers,
    )


def _gradients_and_parts(graph: OpGraph, is_backward: BoolArray) -> BoolArray:
    """Return whether a value is a gradient of a weight, or is added to others to be one."""
    marked = np.zeros(graph.n_values, dtype=np.bool_)
    marked[graph.gradient_values] = True
    # Numbers of plain lists: a walk over a few values, each once.
    waiting: list[int] = graph.gradient_values.tolist()
    while waiting:
        value = waiting.pop()
        op, base = int(graph.value_producer[value]), int(graph.value_base[value])
        parts = [base] if base >= 0 else []
        if op >= 0 and is_backward[op] and short_name(graph.targets[op]) in _SUMS:
            size = graph.value_bytes[value]
            parts += [v for v in graph.reads_of(op).tolist() if graph.value_bytes[v] == size]
        for part in parts:
            maker = int(graph.value_producer[part])
            if maker >= 0 and is_backward[maker] and not marked[part]:
                marked[part] = True
                waiting.append(part)
    return marked


def _casts(graph: OpGraph) -> BoolArray:
    """Return whether a value is a gradient that was cast for an update."""
    is_cast = np.array([target == CAST for target in graph.targets], dtype=np.bool_)
    return (graph.value_producer >= 0) & is_cast[graph.value_producer]


def short_name(target: str) -> str:
    """Return ``gelu`` of ``aten.gelu.default``, and ``getitem`` of ``operator.getitem``."""
    parts = target.split(".")
    return parts[-2] if len(parts) > 2 else parts[-1]


def storages_on(
    facts: StorageFacts, device_of: IntArray, device: int, weights: IntArray
) -> Storages:
    """Return what lies on `device` for one input.

    Args:
        facts: of the graph.
        device_of: device of each operator for this input. Shape (n,).
        device: which one.
        weights: the weights that it holds, each once, in order; it may hold some for other inputs.

    """
    m, n = facts.memory, len(device_of)
    made = m.producer >= 0
    made[made] = device_of[m.producer[made]] == device
    here = device_of[facts.reader] == device
    root, is_root = _roots(m, made, here)
    last, last_read = _last_uses(facts, made, here, root, n)
    values = np.flatnonzero(is_root)
    maker = m.producer[values]
    is_input = maker < 0
    kind = _kinds(facts, made, root, values, last_read[values])
    size = np.where(made[values] | is_input, m.alloc_bytes[values], m.value_bytes[values])
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


def _roots(m: MemoryTables, made: BoolArray, here: BoolArray) -> tuple[IntArray, BoolArray]:
    """Return the value whose storage each value is in on a device, and which values are those.

    What was made there as a view is in the storage of its base; what was received is in its own,
    whatever it is a view of where it was made. `made` says which values (V,) the device makes,
    `here` which reads (as `m.reads`) are by its operators.
    """
    present = made.copy()
    present[m.reads[here]] = True
    root = np.where(made & (m.base >= 0), m.base, np.arange(len(m.base)))
    while True:
        further = root[root]
        if np.array_equal(further, root):
            break
        root = further
    return root, present & (root == np.arange(len(root)))


def _last_uses(
    facts: StorageFacts, made: BoolArray, here: BoolArray, root: IntArray, n: int
) -> tuple[IntArray, IntArray]:
    """Return the last operator that needs each storage there, and the last that reads it (or -1).

    By the value that `root` names it by. Shape (V,) each.
    """
    m = facts.memory
    last_read = np.full(len(root), -1, dtype=np.int64)
    np.maximum.at(last_read, root[m.reads[here]], facts.reader[here])
    values = np.flatnonzero(made)
    # Variables hold what was made, not the copy that was received.
    held = np.where(made[root[values]], m.held[values], -1)
    until = np.where(m.is_output[values], n - 1, np.maximum(m.producer[values], held))
    last = last_read.copy()
    np.maximum.at(last, root[values], until)
    return last, last_read


def _kinds(
    facts: StorageFacts, made: BoolArray, root: IntArray, values: IntArray, last_read: IntArray
) -> IntArray:
    """Return the place in `KINDS` of each storage that `values` name; `last_read` is of them."""
    m = facts.memory
    maker = m.producer[values]
    of_gradient, of_output = np.zeros((2, len(root)), dtype=np.bool_)
    of_gradient[root[facts.is_gradient]] = True
    # What updates keep to the end of the step, such as lists of `foreach`, has no reader.
    of_updates = facts.is_update[np.maximum(m.producer, 0)]
    of_output[root[m.is_output & made & ~of_updates]] = True
    saved = ~facts.is_backward[maker] & facts.is_backward[last_read] & (last_read >= 0)
    is_cache, received = facts.is_cache[values], ~made[values]
    return np.select(
        [is_cache, maker < 0, of_gradient[values], of_output[values], saved, received],
        [_CACHE, _INPUT, _GRADIENT, _OUTPUT, _SAVED, _RECEIVED],
        _TEMPORARY,
    ).astype(np.int64)

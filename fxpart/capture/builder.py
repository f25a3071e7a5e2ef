"""`GraphBuilder`: collects captured operators into an `OpGraph`, with aliases and groups.

Aliases are recognized by storage, never by name: nodes whose values share an untyped storage are
one allocation, regardless of the operators between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fxpart.capture.call_costs import dense_bytes
from fxpart.capture.calls import storage_key
from fxpart.core.granularity import first_of_each
from fxpart.core.graph import MOST_COUNTED, OpGraph, csr
from fxpart.errors import CaptureError

__all__ = ["GraphBuilder", "Mutation"]

_SCALAR_BYTES = 8
"""A number returned by an operator (`item`, a size) is sent as one 64-bit word."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """Operator `op` writes into storage `storage`."""

    op: int
    storage: int


@dataclass(slots=True)
class GraphBuilder:
    """Collects operators in order until `finish`."""

    names: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    flops: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    uses: list[list[int]] = field(default_factory=list)
    value_names: list[str] = field(default_factory=list)
    producers: list[int] = field(default_factory=list)
    value_bytes: list[int] = field(default_factory=list)
    alloc_bytes: list[int] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)
    outputs: set[int] = field(default_factory=set)
    weight_names: list[str] = field(default_factory=list)
    weight_bytes: list[int] = field(default_factory=list)
    weight_is_buffer: list[bool] = field(default_factory=list)
    weight_of_storage: dict[int, int] = field(default_factory=dict)
    storages: set[int] = field(default_factory=set)
    storage_of_value: dict[int, int] = field(default_factory=dict)
    real_storage: dict[int, int] = field(default_factory=dict)
    mutations: list[Mutation] = field(default_factory=list)
    together: list[tuple[int, int]] = field(default_factory=list)
    attention: list[tuple[int, int, int]] = field(default_factory=list)

    def add_weight(
        self, name: str, tensor: torch.Tensor, seen_as: torch.Tensor, *, is_buffer: bool = False
    ) -> int:
        """Return the index of the weight of `tensor`; each storage is one weight.

        `seen_as` is the corresponding tensor in the captured graph.
        """
        key = storage_key(tensor)
        known = self.weight_of_storage.get(key)
        if known is None:
            known = len(self.weight_names)
            self.weight_names.append(name)
            self.weight_bytes.append(int(tensor.untyped_storage().nbytes()))
            self.weight_is_buffer.append(is_buffer)
        self.weight_of_storage[key] = known
        self.weight_of_storage[storage_key(seen_as)] = known
        return known

    def add_value(self, name: str, producer: int, value: object) -> int:
        """Add an input of the graph (producer -1) or a result of an operator; return its index."""
        index, base, alloc, sent = len(self.producers), -1, 0, _SCALAR_BYTES
        if isinstance(value, torch.Tensor):
            sent, key = dense_bytes(value), storage_key(value)
            base = self._base(producer, key)
            if key not in self.storages and key not in self.weight_of_storage:
                alloc = int(value.untyped_storage().nbytes())
            self.storages.add(key)
            self.storage_of_value[index] = key
        self.value_names.append(name)
        self.producers.append(producer)
        self.value_bytes.append(sent)
        self.alloc_bytes.append(alloc)
        self.bases.append(base)
        return index

    def alias(self, values: Sequence[int | None], seen_as: torch.Tensor) -> None:
        """Register the storage of `seen_as` as that of `values`."""
        key = storage_key(seen_as)
        self.storages.add(key)
        for value in values:
            if value is not None:
                self.real_storage[key] = self._real(self.storage_of_value[value])
                self.storage_of_value[value] = key

    def _real(self, storage: int) -> int:
        """Return the storage that `storage` was registered for, or itself."""
        return self.real_storage.get(storage, storage)

    def _base(self, producer: int, key: int) -> int:
        """Return the operand or earlier result that shares the storage `key`, else -1."""
        if producer < 0:
            return -1
        last_other = len(self.producers) - 1
        while last_other >= 0 and self.producers[last_other] == producer:
            last_other -= 1
        candidates = [*self.reads[producer], *range(last_other + 1, len(self.producers))]
        return next((v for v in candidates if self.storage_of_value.get(v) == key), -1)

    def mutate(self, op: int, tensor: torch.Tensor) -> None:
        """Record that `op` writes into the storage of `tensor`."""
        self.mutations.append(Mutation(op, self._real(storage_key(tensor))))

    def groups(self) -> list[int]:
        """Return, for each operator, the first one it must share a device with."""
        values_of: dict[int, list[int]] = {}
        for value, storage in self.storage_of_value.items():
            values_of.setdefault(self._real(storage), []).append(value)
        readers_of: list[list[int]] = [[] for _ in self.producers]
        for op, read in enumerate(self.reads if self.mutations else ()):
            for value in read:
                readers_of[value].append(op)
        touched = [
            (write.op, op)
            for write in self.mutations
            for op in self._touching(write, values_of.get(write.storage, []), readers_of)
        ]
        return first_of_each(len(self.names), [*self.together, *touched])

    def _touching(
        self, mutation: Mutation, values: list[int], readers_of: list[list[int]]
    ) -> list[int]:
        """Return the operators that would see another state of the storage on another device.

        A result written in place may be made from a received copy, which its readers then get. Only
        if an older value of the storage is read after the write must the producers of the storage's
        values and such readers stay with the writing operator. So must a reader that only graph
        order puts before the write: it could be sent the value when it has been written.

        Args:
            mutation: the write.
            values: the values of the storage.
            readers_of: the operators that read each value.

        """
        older = [value for value in values if self.producers[value] < mutation.op]
        readers = {op for value in older for op in readers_of[value]}
        late = sorted(op for op in readers if op > mutation.op)
        # The caller reads the outputs after everything else.
        is_stale = bool(late) or not self.outputs.isdisjoint(older)
        # Views between a stale value and the written one only share a storage if all are on one
        # device.
        makers = {self.producers[value] for value in older if is_stale} - {-1}
        early = {op for op in readers if op < mutation.op} - makers
        weight = self.weight_of_storage.get(mutation.storage)
        users = [] if weight is None else [op for op, w in enumerate(self.uses) if weight in w]
        return [
            *sorted(makers),
            *self._not_awaited(early, mutation.op),
            *late,
            *users,
        ]

    def _not_awaited(self, earlier: set[int], op: int) -> list[int]:
        """Return those of the operators `earlier` whose results `op` needs in no way."""
        first = min(earlier, default=op)
        awaited, pending = set[int](), [op]
        while pending:
            makers = {self.producers[value] for value in self.reads[pending.pop()]}
            new = {maker for maker in makers if maker >= first} - awaited
            awaited |= new
            pending.extend(new)
        return sorted(earlier - awaited)

    def finish(self) -> OpGraph:
        """Return the collected graph."""
        if not self.names:
            raise CaptureError("the captured graph has no operators: there is nothing to place")
        for kind, numbers in (
            ("FLOPs", self.flops),
            ("bytes to move", self.moved),
            ("bytes of values", self.value_bytes + self.alloc_bytes),
            ("bytes of weights", self.weight_bytes),
        ):
            if max(numbers, default=0) > MOST_COUNTED:
                raise CaptureError(
                    f"the model has {max(numbers):.3g} {kind} in one place, at most"
                    f" {MOST_COUNTED:.3g} are counted; make it, its batch or its sequences smaller"
                )
        read_start, reads = csr(self.reads)
        # A weight without readers is placed nowhere.
        used_weights = sorted({w for uses in self.uses for w in uses})
        unread = sorted(set(range(len(self.weight_names))) - set(used_weights))
        number = {w: index for index, w in enumerate(used_weights)}
        use_start, uses = csr([[number[w] for w in uses] for uses in self.uses])
        is_output = np.zeros(len(self.producers), dtype=np.bool_)
        is_output[sorted(self.outputs)] = True
        return OpGraph(
            names=tuple(self.names),
            modules=tuple(self.modules),
            targets=tuple(self.targets),
            dtypes=tuple(self.dtypes),
            flops=np.array(self.flops, dtype=np.int64),
            moved_bytes=np.array(self.moved, dtype=np.int64),
            group=np.array(self.groups(), dtype=np.int64),
            value_names=tuple(self.value_names),
            value_producer=np.array(self.producers, dtype=np.int64),
            value_bytes=np.array(self.value_bytes, dtype=np.int64),
            value_alloc_bytes=np.array(self.alloc_bytes, dtype=np.int64),
            value_base=np.array(self.bases, dtype=np.int64),
            value_is_output=is_output,
            read_start=read_start,
            reads=reads,
            weight_names=tuple(self.weight_names[w] for w in used_weights),
            weight_bytes=np.array([self.weight_bytes[w] for w in used_weights], dtype=np.int64),
            weight_state_bytes=np.zeros(len(used_weights), dtype=np.int64),
            use_start=use_start,
            uses=uses,
            forward_of=np.arange(len(self.names)),
            gradient_values=np.empty(0, dtype=np.int64),
            gradient_weights=np.empty(0, dtype=np.int64),
            attention=np.array(self.attention, dtype=np.int64).reshape(-1, 3),
            weight_is_buffer=np.array([self.weight_is_buffer[w] for w in used_weights], np.bool_),
            unread_weight_names=tuple(self.weight_names[w] for w in unread),
            unread_weight_bytes=np.array([self.weight_bytes[w] for w in unread], dtype=np.int64),
        )

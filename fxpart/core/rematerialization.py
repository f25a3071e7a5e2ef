"""Recompute values in a compiled backward instead of saving them.

A compiler saves the values with the fewest bytes from which its backward can compute the others by
fused kernels: a minimum cut of the forward, between what it must compute and what the backward
reads (the partitioner of torch's AOTAutograd, ``min_cut_rematerialization_partition``). What is
worth recomputing is restricted by its rules, which keep kernels short and reductions saved.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import IntArray, OpGraph, csr, storage_roots
from fxpart.core.operator_kinds import NORMS, POINTWISE, REDUCTIONS, operator_name

__all__ = ["rematerialized"]

_RANDOM = frozenset(("dropout", "native_dropout"))
_SAVED = frozenset(("embedding", "gather", "index", "index_select", "nll_loss_forward"))
"""Fused with other operators, but not recomputed."""
_SHRINKS = 4
"""A result is saved if what it is computed from is larger by more than this factor."""
_PER_STEP = 1.1
"""Factor by which saving a value costs more for each operator between it and the backward."""
_FARTHEST = 100
"""Most operators that count for that, and in one chain of recomputed ones."""
_ENDLESS = 2**30
"""Capacity of an edge that no cut contains."""
_MOST_UNITS = 2**28
"""Sum of all finite capacities, which are integers of 32 bits."""


def rematerialized(graph: OpGraph, parts: Sequence[object]) -> OpGraph:
    """Return `graph` with backwards that read what is saved, for each part that is compiled.

    Operators of a backward read the saved values instead of those that they recompute, which then
    live no longer than their readers in the forward. The FLOPs of pointwise operators are not
    counted, so the recomputation costs what it reads.

    Args:
        graph: a captured training step; others are returned as they are.
        parts: the compiled part of each operator, None for one that is not compiled. Length n.

    """
    if not graph.is_backward.any():
        return graph
    rows = [graph.reads_of(op).tolist() for op in range(graph.n_ops)]
    moved, bases = graph.moved_bytes.copy(), graph.value_base.copy()
    numbers = {part: number for number, part in enumerate(dict.fromkeys(parts))}
    part_of = np.array([-1 if part is None else numbers[part] for part in parts])
    shared = _Shared(graph)
    for number in np.unique(part_of[part_of >= 0]).tolist():
        _Part(shared, part_of == number).rewrite(rows, moved, bases)
    read_start, reads = csr(rows)
    return replace(graph, moved_bytes=moved, value_base=bases, read_start=read_start, reads=reads)


class _Shared:
    """What all parts of a graph need: its storages, and which operators may be recomputed."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.root = storage_roots(graph)
        self.works = (graph.flops > 0) | (graph.moved_bytes > 0)
        names = [operator_name(target) for target in graph.targets]
        fuses = [name in POINTWISE or name in REDUCTIONS or name in NORMS for name in names]
        self.fuses = np.array(fuses) & (graph.flops == 0)
        kept = np.array([name in _RANDOM or name in _SAVED for name in names])
        self.is_recomputable = self.fuses & ~kept
        # Storages that an operator writes into after another has made them.
        produced = graph.value_producer >= 0
        writes = produced & (graph.value_base >= 0)
        writes[produced] &= self.works[graph.value_producer[produced]]
        self.rewritten = set(self.root[writes].tolist())

    def stored(self, values: Sequence[int]) -> list[int]:
        """Return the storages of `values`, each once."""
        return list(dict.fromkeys(self.root[list(values)].tolist()))

    def size(self, storage: int) -> int:
        graph = self.graph
        return int(max(graph.value_alloc_bytes[storage], graph.value_bytes[storage]))


@dataclass(slots=True)
class _Stored:
    """A storage that the forward of a part makes or reads."""

    maker: int
    """The operator that makes it in this part; -1 for one from elsewhere."""
    readers: list[int] = field(default_factory=list)
    """Operators of the forward that read it."""
    is_needed: bool = False
    """Whether the backward of the part reads it."""
    is_needed_whole: bool = False
    """Whether one of these readers is a kernel of its own, so that it must be in memory."""


class _Part:
    """The minimum cut of one compiled part."""

    def __init__(self, shared: _Shared, inside: npt.NDArray[np.bool_]) -> None:
        self.shared, graph = shared, shared.graph
        working = inside & shared.works
        self.forward = np.flatnonzero(working & ~graph.is_backward & ~graph.is_update).tolist()
        self.backward = np.flatnonzero(working & graph.is_backward).tolist()
        self.views = np.flatnonzero(inside & ~shared.works & graph.is_backward).tolist()
        """Operators of the backward that compute nothing."""
        self.made_by: dict[int, list[int]] = {op: [] for op in self.forward}
        self.stored: dict[int, _Stored] = {}
        for value in np.flatnonzero(graph.value_producer >= 0).tolist():
            maker = int(graph.value_producer[value])
            if maker in self.made_by and shared.root[value] == value:
                self.stored[value] = _Stored(maker)
                self.made_by[maker].append(value)
        for op in self.forward:
            for storage in shared.stored(graph.reads_of(op).tolist()):
                self.stored.setdefault(storage, _Stored(-1)).readers.append(op)
        for op in self.backward:
            for storage in shared.stored(graph.reads_of(op).tolist()):
                if storage in self.stored:
                    self.stored[storage].is_needed = True
                    self.stored[storage].is_needed_whole |= not bool(shared.fuses[op])

    def rewrite(self, rows: list[list[int]], moved: IntArray, bases: IntArray) -> None:
        """Replace what operators of the backward read in `rows`, and the bytes that they move.

        Its views of what is not saved have no storage, which `bases` then say.
        """
        if not any(stored.is_needed for stored in self.stored.values()):
            return
        saved = self._saved()
        graph, root = self.shared.graph, self.shared.root
        unsaved = self.stored.keys() - saved
        for op in self.views:
            rows[op] = [value for value in rows[op] if int(root[value]) not in unsaved]
        for value in np.flatnonzero(np.isin(graph.value_producer, self.views)).tolist():
            if int(root[value]) in unsaved:
                bases[value] = -1
        sources: dict[int, list[int]] = {}
        for op in self.backward:
            read: dict[int, None] = {}
            for value in rows[op]:
                storage = int(root[value])
                if storage not in unsaved:
                    read[value] = None
                    continue
                moved[op] -= graph.value_bytes[value]
                if storage not in sources:
                    sources[storage] = self._sources(storage, saved)
                for source in sources[storage]:
                    if source not in read:
                        read[source] = None
                        moved[op] += graph.value_bytes[source]
            rows[op] = list(read)
            moved[op] = max(int(moved[op]), 0)

    def _sources(self, storage: int, saved: set[int]) -> list[int]:
        """Return the saved storages from which an unsaved one is recomputed."""
        found: dict[int, None] = {}
        visited, queue = {storage}, [storage]
        while queue:
            for read in self._read_by_maker(queue.pop()):
                if read in saved or self.stored[read].maker < 0:
                    found[read] = None
                elif read not in visited:
                    visited.add(read)
                    queue.append(read)
        return sorted(found)

    def _read_by_maker(self, storage: int) -> list[int]:
        reads = self.shared.graph.reads_of(self.stored[storage].maker).tolist()
        return self.shared.stored(reads)

    def _saved(self) -> set[int]:
        """Return the storages to save: the minimum cut nearest to the backward."""
        # Takes 0.15 s, and only compiled training steps need it.
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        number = {storage: index for index, storage in enumerate(self.stored)}
        count = len(number)
        source, sink = 2 * count, 2 * count + 1
        banned, cost = self._banned(), self._costs()
        unit = max(1, -(-sum(cost.values()) // _MOST_UNITS))
        edges: list[tuple[int, int, int]] = []
        for storage, index in number.items():
            stored = self.stored[storage]
            edges.append((index, count + index, -(-cost[storage] // unit)))
            if stored.maker < 0 or storage in banned:
                edges.append((source, index, _ENDLESS))
            if stored.is_needed:
                edges.append((count + index, sink, _ENDLESS))
            for reader in stored.readers:
                edges += [(count + index, number[made], _ENDLESS) for made in self.made_by[reader]]
        tails, heads, capacities = np.array(edges, dtype=np.int32).T
        shape = (2 * count + 2, 2 * count + 2)
        network = csr_array((capacities, (tails, heads)), shape=shape)
        flow = maximum_flow(network, source, sink).flow
        residual = csr_array(network - flow)
        residual.eliminate_zeros()
        before, _ = breadth_first_order(csr_array(residual.T), sink)
        reaches_sink = np.zeros(shape[0], dtype=np.bool_)
        reaches_sink[before] = True
        return {s for s, i in number.items() if reaches_sink[count + i] and not reaches_sink[i]}

    def _costs(self) -> dict[int, int]:
        """Return the cost of saving each storage: more if nothing else stores it."""
        distance = self._distances()
        costs = {}
        for storage, stored in self.stored.items():
            stretch = _PER_STEP ** min(max(distance[storage], 1), _FARTHEST)
            size = int(self.shared.size(storage) * stretch)
            costs[storage] = size if self._is_stored_anyway(storage, stored) else 2 * size
        return costs

    def _is_stored_anyway(self, storage: int, stored: _Stored) -> bool:
        if stored.maker < 0 or stored.is_needed_whole or self.shared.graph.value_is_output[storage]:
            return True
        return not all(self._fuse(stored.maker, reader) for reader in stored.readers)

    def _fuse(self, op: int, reader: int) -> bool:
        return bool(self.shared.fuses[op] and self.shared.fuses[reader])

    def _distances(self) -> dict[int, int]:
        """Return the number of operators from each storage to the backward."""
        far = len(self.stored) + _FARTHEST
        distance = {s: 1 if stored.is_needed else far for s, stored in self.stored.items()}
        for op in reversed(self.forward):
            after = min((distance[made] for made in self.made_by[op]), default=far)
            for storage in self.shared.stored(self.shared.graph.reads_of(op).tolist()):
                distance[storage] = min(distance[storage], after + 1)
        return distance

    def _banned(self) -> set[int]:
        """Return the storages of this part that are not recomputed."""
        banned = set()
        for storage, stored in self.stored.items():
            op = stored.maker
            if op < 0:
                continue
            read_bytes = sum(map(self.shared.size, self._read_by_maker(storage)))
            if (
                not self.shared.is_recomputable[op]
                or storage in self.shared.rewritten
                or stored.is_needed_whole
                or _SHRINKS * self.shared.size(storage) < read_bytes
            ):
                banned.add(storage)
        banned |= set(self._used_far_apart())
        return banned | set(self._ends_of_long_chains(banned))

    def _used_far_apart(self) -> Iterator[int]:
        """Yield results of readers that come after a kernel of its own, fed by an earlier one.

        Recomputing these would keep what they read alive until then.
        """
        for stored in self.stored.values():
            if stored.maker < 0 or len(stored.readers) < 2:
                continue
            first = self._first_unfused(stored.readers)
            for reader in stored.readers:
                if reader > first and self._fuse(stored.maker, reader):
                    yield from self.made_by[reader]

    def _first_unfused(self, readers: Sequence[int]) -> int:
        """Return the first kernel of its own among what `readers` lead to, up to the last one."""
        last, visited = max(readers), set[int]()
        queue = sorted(readers)
        while queue:
            op = heappop(queue)
            if op > last:
                break
            if not self.shared.fuses[op]:
                return op
            for made in self.made_by[op]:
                for reader in self.stored[made].readers:
                    if reader not in visited:
                        visited.add(reader)
                        heappush(queue, reader)
        return last

    def _ends_of_long_chains(self, banned: set[int]) -> Iterator[int]:
        """Yield the results at which chains of recomputed operators are cut."""
        order = {op: index for index, op in enumerate(self.forward)}
        visited = set[int]()
        for start in self.forward:
            queue = [start]
            while queue:
                op = heappop(queue)
                if op in visited:
                    continue
                visited.add(op)
                if order[op] > order[start] + _FARTHEST and not queue:
                    yield from self.made_by[op]
                    break
                for made in self.made_by[op]:
                    if made in banned and op != start:
                        continue
                    for reader in self.stored[made].readers:
                        if self._fuse(op, reader):
                            heappush(queue, reader)

"""Fuse operators into kernels as a compiler would: chains of pointwise operators and reductions.

The rules follow torch's inductor (Ansel et al.: PyTorch 2, ASPLOS 2024,
doi:10.1145/3620665.3640366): pointwise operators fuse with their readers, a reduction fuses with
pointwise producers and consumers, and kernels of equal shape that read the same tensor fuse
horizontally. Matrix products, convolutions, attention, sorts, scans and collectives remain kernels
of their own. A kernel runs at the position of its last operator. Operators are not fused if
something else reads an intermediate earlier, although a compiler might reorder that. A backward
recomputes what takes more bytes to save (`fxpart.core.rematerialization`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from fxpart.core.blocks import GATHER
from fxpart.core.granularity import join_groups
from fxpart.core.graph import OpGraph, csr, storage_roots, without_python
from fxpart.core.operator_kinds import (
    CASTS,
    GATHERS,
    NORMS,
    POINTWISE,
    REDUCTIONS,
    SCATTERS,
    WINDOWS,
    is_shrunk_loss,
    operator_name,
)
from fxpart.core.rematerialization import rematerialized

__all__ = ["LOSS", "blocks_of", "fused", "kernel_count"]


_ELEMENT_BYTES = {
    **{"float64": 8.0, "complex64": 8.0, "int64": 8.0, "complex128": 16.0, "bool": 1.0},
    **{"float32": 4.0, "int32": 4.0, "int8": 1.0, "uint8": 1.0},
}


@dataclass(slots=True, eq=False)
class _Kernel:
    """Operators fused into one kernel; `members` are in ascending order."""

    members: list[int]
    domain: float
    """Number of elements in its iteration space."""
    rows: float | None
    """Number of results of its reductions; None if there are none or it is unknown."""
    reduces: bool
    scatters: bool
    part: tuple[object, ...]
    """Fusion boundary: a block of the model, and its forward or backward."""
    storages: set[int] = field(default_factory=set)
    """Storages that it writes, each identified by its first value."""

    @property
    def last(self) -> int:
        """The operator at whose position it runs."""
        return self.members[-1]


LOSS = "loss"
"""The part of the operators of a loss, in place of a block."""


def blocks_of(graph: OpGraph, *, with_loss: bool = False) -> tuple[str, ...]:
    """Return the block of each operator: its path up to the first number, such as ``layers.0``.

    Blocks are compiled separately if a model is cut between them, as in torch's regional
    compilation. Operators `with_loss` that the model itself runs after its last module, and their
    backward, are of the part `LOSS`.
    """
    blocks = [_block(path) for path in graph.modules]
    if with_loss:
        # Weights of the backward's first block may be gathered before.
        computes = np.array([path != "" for path in graph.modules])
        computes &= np.array([target != GATHER for target in graph.targets])
        forward, backward = (
            np.flatnonzero(computes & (graph.is_backward == which)) for which in (False, True)
        )
        for op in range(forward.max(initial=-1) + 1, backward.min(initial=graph.n_ops)):
            blocks[op] = blocks[op] if graph.modules[op] else LOSS
    return tuple(blocks)


def _block(path: str) -> str:
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ""


def kernel_count(graph: OpGraph) -> int:
    """Return the number of operators of `graph` that compute or move anything."""
    return int(np.count_nonzero((graph.flops > 0) | (graph.moved_bytes > 0)))


def fused(graph: OpGraph, inside: Sequence[object] = ()) -> OpGraph:
    """Return `graph` with operators fused into kernels, whose intermediates are never stored.

    The last operator of a kernel carries all of its reads and moved bytes: external inputs and
    outputs, counted once each. The other operators take no time. The operators of a kernel share a
    device.

    Args:
        graph: the captured graph.
        inside: fusion boundary of each operator, such as its block from `blocks_of`; None for an
            operator that is not compiled. Only if all are does Python hold nothing.

    """
    parts = list(inside) or [""] * graph.n_ops
    compiled = np.array([part is not None for part in parts])
    graph = _with_small_losses(without_python(graph) if compiled.all() else graph, compiled)
    graph = rematerialized(graph, parts)
    # Each operator that is not compiled is a part of its own.
    search = _Search(graph, [("alone", op) if p is None else p for op, p in enumerate(parts)])
    for op in range(graph.n_ops):
        search.visit(op)
    search.join_neighbours()
    kernels = [kernel for kernel in search.kernels() if len(kernel.members) > 1]
    return _rewritten(graph, search, kernels) if kernels else graph


def _with_small_losses(graph: OpGraph, compiled: npt.NDArray[np.bool_]) -> OpGraph:
    """Return `graph` with no more stored of a compiled loss than its result."""
    targets = enumerate(graph.targets)
    losses = [op for op, target in targets if compiled[op] and is_shrunk_loss(target)]
    is_loss = np.isin(graph.value_producer, losses)
    small = np.minimum(graph.value_alloc_bytes, graph.value_bytes)
    return replace(graph, value_alloc_bytes=np.where(is_loss, small, graph.value_alloc_bytes))


def _elements(dtype: str, size: float) -> float:
    return size / _ELEMENT_BYTES.get(dtype, 1.0 if "float8" in dtype else 2.0)


class _Search:
    """State of the fusion pass, which visits the operators in order."""

    def __init__(self, graph: OpGraph, inside: Sequence[object]) -> None:
        self.graph, self.inside = graph, inside
        self.works = (graph.flops > 0) | (graph.moved_bytes > 0)
        self.made_start = np.searchsorted(graph.value_producer, np.arange(graph.n_ops + 1))
        self.root = storage_roots(graph)
        self.readers: dict[int, list[int]] = {}
        for op, value in zip(graph.readers.tolist(), graph.reads.tolist(), strict=True):
            if self.works[op]:
                self.readers.setdefault(int(self.root[value]), []).append(op)
        outputs = self.root[np.flatnonzero(graph.value_is_output)]
        self.kept = {*outputs.tolist(), *self.root[graph.gradient_values].tolist()}
        self.backward = graph.is_backward
        self.kernel_of: dict[int, _Kernel] = {}
        self.writer: dict[int, int] = {}
        self.elements: dict[int, float] = {}

    def kernels(self) -> list[_Kernel]:
        """Return all kernels in order of execution."""
        unique = {id(kernel): kernel for kernel in self.kernel_of.values()}
        return sorted(unique.values(), key=lambda kernel: kernel.last)

    def read_by(self, op: int) -> list[int]:
        """Return the storages read by an operator."""
        return list(dict.fromkeys(self.root[self.graph.reads_of(op)].tolist()))

    def read_whole(self, op: int) -> list[int]:
        """Return the values read in full by an operator: not the source of a gather or scatter."""
        name = operator_name(self.graph.targets[op])
        values: list[int] = self.graph.reads_of(op).tolist()
        in_part = name in SCATTERS or (name in GATHERS and not len(self.graph.uses_of(op)))
        return values[1:] if in_part else values

    def visit(self, op: int) -> None:
        """Fuse an operator with the kernels that produce its inputs."""
        if not self.works[op]:
            return
        produced = range(self.made_start[op], self.made_start[op + 1])
        kernel = self._alone(op)
        if kernel is not None:
            kernel.storages = {int(self.root[value]) for value in produced}
            self.kernel_of[op] = kernel
            is_window = operator_name(self.graph.targets[op]) in WINDOWS
            for storage in () if is_window else self.read_by(op):
                producer = self.kernel_of.get(self.writer.get(storage, -1))
                if producer is not None and producer is not kernel:
                    kernel = self._joined(producer, kernel)
        for value in produced:
            self.writer[int(self.root[value])] = op

    def _alone(self, op: int) -> _Kernel | None:
        """Return a kernel of just this operator, or None if it cannot be fused."""
        graph, name = self.graph, operator_name(self.graph.targets[op])
        scatters = name in SCATTERS
        of_two = graph.targets[op] in ("aten.max.other", "aten.min.other")
        reduces = (name in REDUCTIONS or name in NORMS) and not of_two
        elementwise = of_two or name in POINTWISE or name in WINDOWS
        if graph.flops[op] or not (elementwise or scatters or reduces):
            return None
        produced = list(range(self.made_start[op], self.made_start[op + 1]))
        if not produced:
            return None
        read = [self._count(value, graph.dtypes[op]) for value in graph.reads_of(op).tolist()]
        results = [_elements(graph.dtypes[op], float(graph.value_bytes[v])) for v in produced]
        if name in CASTS and read:  # the dtype changes, not the number of elements
            results = read[-1:]
            self.elements[produced[0]] = results[0]
        if scatters and read:  # the update, its last input, sets the size
            results = read[-1:]
        domain, rows = max(results), None
        if reduces and name in REDUCTIONS:
            rows = min(results)
            domain = max(domain, *read, 1.0)
        part = (self.inside[op], bool(self.backward[op]))
        return _Kernel([op], domain, rows, reduces, scatters, part)

    def _count(self, value: int, dtype: str) -> float:
        """Return the number of elements of a value read by an operator in `dtype`."""
        maker = int(self.graph.value_producer[value])
        dtype = self.graph.dtypes[maker] if maker >= 0 else dtype
        return self.elements.get(value, _elements(dtype, float(self.graph.value_bytes[value])))

    def _joined(self, producer: _Kernel, kernel: _Kernel) -> _Kernel:
        """Return `kernel` fused with `producer`, or unchanged if they cannot be fused."""
        if producer.part != kernel.part or producer.scatters:
            return kernel
        members = {*producer.members, *kernel.members}
        if self._read_before(producer, members, kernel.last):
            return kernel
        if not self._alike(producer, kernel, members):
            return kernel
        return self._one(producer, kernel)

    def _read_before(self, kernel: _Kernel, members: set[int], op: int) -> bool:
        """Return whether an operator outside `members` reads a result of `kernel` before `op`."""
        return any(
            kernel.members[0] < reader < op and reader not in members
            for storage in kernel.storages
            for reader in self.readers.get(storage, ())
        )

    def _alike(self, producer: _Kernel, kernel: _Kernel, members: set[int]) -> bool:
        """Return whether the two loops can be merged; a private intermediate is computed inline."""
        if producer.reduces and kernel.reduces:
            return producer.domain == kernel.domain and (
                producer.rows is None or kernel.rows is None or producer.rows == kernel.rows
            )
        if producer.reduces:
            return kernel.domain in (producer.domain, producer.rows)
        if producer.domain in (kernel.domain, kernel.rows):
            return True
        return all(self.is_inside(storage, members) for storage in producer.storages)

    def is_inside(self, storage: int, members: Iterable[int]) -> bool:
        """Return whether a storage is written and read by `members` only."""
        if storage in self.kept or self.graph.value_producer[storage] not in members:
            return False
        return all(reader in members for reader in self.readers.get(storage, ()))

    def _one(self, first: _Kernel, second: _Kernel) -> _Kernel:
        reducing = [kernel for kernel in (first, second) if kernel.reduces]
        domain = max(kernel.domain for kernel in reducing or (first, second))
        rows = next((kernel.rows for kernel in reducing if kernel.rows is not None), None)
        joined = _Kernel(
            sorted((*first.members, *second.members)),
            domain,
            rows,
            reduces=bool(reducing),
            scatters=first.scatters or second.scatters,
            part=first.part,
            storages=first.storages | second.storages,
        )
        for member in joined.members:
            self.kernel_of[member] = joined
        return joined

    def join_neighbours(self) -> None:
        """Fuse kernels of equal shape that read the same tensor, with no unfusable one between."""
        latest: dict[int, int] = {}
        in_kernel = np.zeros(self.graph.n_ops, dtype=np.bool_)
        in_kernel[list(self.kernel_of)] = True
        unfused_before = np.cumsum(self.works & ~in_kernel)
        for kernel in self.kernels():
            read = dict.fromkeys(storage for op in kernel.members for storage in self.read_by(op))
            for storage in read:
                current = self.kernel_of[kernel.last]
                previous = self.kernel_of.get(latest.get(storage, -1), current)
                same_shape = (previous.part, previous.domain, previous.rows, previous.reduces) == (
                    *(current.part, current.domain, current.rows, current.reduces),
                )
                if (
                    previous is current
                    or not same_shape
                    or unfused_before[previous.last] != unfused_before[current.last]
                ):
                    continue
                if not self._read_before(
                    previous, {*previous.members, *current.members}, current.last
                ):
                    self._one(previous, current)
            latest.update(dict.fromkeys(read, kernel.last))


def _rewritten(graph: OpGraph, search: _Search, kernels: list[_Kernel]) -> OpGraph:
    moved, alloc = graph.moved_bytes.copy(), graph.value_alloc_bytes.copy()
    labels = np.arange(graph.n_ops)
    rows = [graph.reads_of(op).tolist() for op in range(graph.n_ops)]
    inside: dict[int, int] = {}
    for kernel in kernels:
        members = set(kernel.members)
        hidden = {s for s in kernel.storages if search.is_inside(s, members)}
        first = kernel.members[0]
        inside.update(dict.fromkeys(hidden, first))
        alloc[list(hidden)] = 0
        labels[kernel.members] = first
        moved[kernel.last] = _kernel_bytes(graph, search, kernel, hidden)
        moved[kernel.members[:-1]] = 0
        read = (value for op in kernel.members for value in graph.reads_of(op).tolist())
        outside = (
            v
            for v in read
            if graph.value_producer[v] not in members and search.root[v] not in hidden
        )
        rows[kernel.last] = list(dict.fromkeys((*rows[kernel.last], *outside)))
    # Views of unstored intermediates belong to the kernel.
    for value in np.flatnonzero(graph.value_producer >= 0).tolist():
        first = inside.get(int(search.root[value]), -1)
        if first >= 0:
            labels[graph.value_producer[value]] = first
    read_start, reads = csr(rows)
    return replace(
        graph,
        moved_bytes=moved,
        value_alloc_bytes=alloc,
        group=join_groups(graph.group, labels),
        read_start=read_start,
        reads=reads,
    )


def _kernel_bytes(graph: OpGraph, search: _Search, kernel: _Kernel, hidden: set[int]) -> int:
    """Return the bytes moved by a kernel: those of its operators without its intermediates.

    Reads of one storage by several operators count once and at most the whole storage, and likewise
    writes, including in-place ones. Values made inside the kernel are not read back.
    """
    total = int(graph.moved_bytes[kernel.members].sum())
    sizes, members = graph.value_bytes, set(kernel.members)
    read: dict[int, dict[int, int]] = {}
    written: dict[int, dict[int, int]] = {}
    for op in kernel.members:
        scatters = operator_name(graph.targets[op]) in SCATTERS
        produced = range(search.made_start[op], search.made_start[op + 1])
        # A scatter writes only some elements of its input.
        stored = [value for value in produced if not scatters or search.root[value] == value]
        for values, unique_bytes in ((search.read_whole(op), read), (stored, written)):
            for value in values:
                storage = int(search.root[value])
                touched = int(min(sizes[value], sizes[storage]))
                total -= touched
                unique_bytes.setdefault(storage, {})[value] = touched
    external_reads = {
        s: values for s, values in read.items() if graph.value_producer[s] not in members
    }
    for by_storage in (external_reads, written):
        for storage, touched_bytes in by_storage.items():
            if storage not in hidden:
                total += min(sum(touched_bytes.values()), int(sizes[storage]))
    return max(total, 0)

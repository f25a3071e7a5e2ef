"""Graphs of any size that resemble captured models, built from a seed with numpy alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import OpGraph, csr
from fxpart.errors import SpecError

__all__ = ["WEIGHT_BYTES", "chain_graph", "diamonds_graph", "synthetic_graph"]

WEIGHT_BYTES = 52 * 10**9
"""Weights of a graph: they need four devices of 16 GB."""

_TOKENS, _WIDTH = 2048, 2048
_VALUE_BYTES = 2 * _TOKENS * _WIDTH
"""A tensor of the trunk, in bfloat16."""
_LONGEST_BLOCK = 3 + 3 * 7
"""A norm, a residual, a skip, and three branches of at most six operators with a sum each."""
_MAX_SKIP = 64
"""Largest number of blocks that a long skip spans."""


@dataclass(eq=False)
class _GraphBuilder:
    """Collects operators in order; a value is identified by its number."""

    names: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    uses: list[list[int]] = field(default_factory=list)
    producers: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    """Size of each weight relative to the others."""

    def input(self, size_bytes: int) -> int:
        """Add a graph input, before any operator."""
        return self._value(-1, size_bytes, -1)

    def call(
        self,
        target: str,
        module: str,
        reads: Sequence[int],
        *,
        makes: Sequence[int] = (_VALUE_BYTES,),
        share: float = 0.0,
        view_of: int = -1,
        group: int = -1,
    ) -> int:
        """Add an operator with results of the sizes `makes`; return the first.

        With a `share` it has its own weight; with `view_of` its results are views; with `group` it
        must be on the same device as that operator.
        """
        op = len(self.names)
        self.names.append(f"{target}_{op}")
        self.modules.append(module)
        self.targets.append(f"aten.{target}.default")
        self.group.append(op if group < 0 else self.group[group])
        self.reads.append(list(dict.fromkeys(reads)))
        self.uses.append([len(self.shares)] if share > 0 else [])
        if share > 0:
            self.shares.append(share)
        first = len(self.producers)
        for size in makes:
            self._value(op, size, view_of)
        return first

    def _value(self, producer: int, size_bytes: int, base: int) -> int:
        self.producers.append(producer)
        self.sizes.append(size_bytes)
        self.bases.append(base)
        return len(self.producers) - 1

    def graph(self, output: int, total_weight_bytes: int) -> OpGraph:
        """Return the graph with result `output` and `total_weight_bytes` of weights."""
        read_start, reads = csr(self.reads)
        use_start, uses = csr(self.uses)
        producer = np.array(self.producers, dtype=np.int64)
        sizes, bases = np.array(self.sizes, dtype=np.int64), np.array(self.bases, dtype=np.int64)
        shares = np.array(self.shares)
        weights = (shares / max(shares.sum(), 1e-300) * total_weight_bytes).astype(np.int64)
        n = len(self.names)
        alloc = np.where(bases < 0, sizes, 0)
        return OpGraph(
            names=tuple(self.names),
            modules=tuple(self.modules),
            targets=tuple(self.targets),
            dtypes=("bfloat16",) * n,
            # A product of every token with every element of the weight.
            flops=2 * _TOKENS * _row_sums(use_start, weights[uses] // 2),
            moved_bytes=_moved_bytes(read_start, sizes[reads], producer, alloc)
            + _row_sums(use_start, weights[uses]),
            group=np.array(self.group, dtype=np.int64),
            value_names=tuple(f"v{value}" for value in range(len(producer))),
            value_producer=producer,
            value_bytes=sizes,
            value_alloc_bytes=alloc,
            value_base=bases,
            value_is_output=np.arange(len(producer)) == output,
            read_start=read_start,
            reads=reads,
            weight_names=tuple(f"w{weight}" for weight in range(len(weights))),
            weight_bytes=weights,
            weight_state_bytes=np.zeros(len(weights), dtype=np.int64),
            use_start=use_start,
            uses=uses,
            forward_of=np.arange(n),
            gradient_values=np.empty(0, dtype=np.int64),
            gradient_weights=np.empty(0, dtype=np.int64),
        )


_Ints = npt.NDArray[np.int64]


def _row_sums(start: _Ints, items: _Ints) -> _Ints:
    """Return the sum of each row of a CSR table."""
    before = np.concatenate([[0], np.cumsum(items)])
    return np.asarray(np.diff(before[start]), dtype=np.int64)


def _moved_bytes(read_start: _Ints, read_bytes: _Ints, producer: _Ints, alloc: _Ints) -> _Ints:
    """Return the bytes that each operator reads and writes, 0 for views, which allocate nothing."""
    written = np.zeros(len(read_start) - 1, dtype=np.int64)
    is_produced = producer >= 0
    np.add.at(written, producer[is_produced], alloc[is_produced])
    return np.where(written > 0, _row_sums(read_start, read_bytes) + written, 0)


def synthetic_graph(n: int = 100_000, seed: int = 0) -> OpGraph:
    """Return a layered graph of `n` operators that resembles a captured model.

    A sequence of blocks on one trunk: a norm, one to three branches of projections and views, their
    sum, and a residual; every eighth block on average also reads the trunk up to 64 blocks earlier.
    Some branches read a shared mask, others unpack a tuple. Modules are nested one to three levels.
    Weights total `WEIGHT_BYTES`: four devices of 16 GB are needed, and sufficient from about a
    hundred operators on.

    Raises:
        SpecError: for fewer than three operators.

    """
    if n < 3:
        raise SpecError(f"a synthetic graph has a mask, an embedding and more: n={n} is below 3")
    rng = np.random.default_rng(seed)
    d = _GraphBuilder()
    ids = d.input(8 * _TOKENS)
    mask = d.call("le", "mask", [ids], makes=[_TOKENS * _TOKENS])
    trunk = [d.call("embedding", "embed", [ids], share=4.0)]
    while n - len(d.names) >= _LONGEST_BLOCK:
        trunk.append(_block(d, rng, trunk, mask))
    last = trunk[-1]
    while len(d.names) < n:
        last = d.call("relu", "head", [last])
    return d.graph(last, WEIGHT_BYTES)


def _block(d: _GraphBuilder, rng: np.random.Generator, trunk: list[int], mask: int) -> int:
    """Add one block that reads the end of `trunk`; return its result."""
    path = f"blocks.{len(trunk) - 1}"
    normed = d.call("layer_norm", f"{path}.norm", [trunk[-1]])
    total = -1
    for branch in range(int(rng.integers(1, 4))):
        branch_result = _branch(d, rng, f"{path}.branch{branch}", normed, mask)
        total = branch_result if total < 0 else d.call("add", path, [total, branch_result])
    result = d.call("add", path, [trunk[-1], total])
    if rng.random() < 0.125:
        skipped = trunk[-int(rng.integers(1, min(len(trunk), _MAX_SKIP) + 1))]
        result = d.call("add", f"{path}.skip", [result, skipped])
    return result


def _branch(d: _GraphBuilder, rng: np.random.Generator, path: str, normed: int, mask: int) -> int:
    """Add a projection up, something in between, and a projection down; return its result."""
    up = d.call("linear", path, [normed], share=float(rng.uniform(0.5, 1.5)))
    match int(rng.integers(0, 3)):
        case 0:  # like attention: views and the mask
            heads = d.call("view", path, [up], view_of=up)
            transposed = d.call("transpose", path, [heads], view_of=heads)
            inner = d.call("softmax", path, [transposed, mask])
        case 1:  # like a gate: both halves of a tuple
            op, half = len(d.names), _VALUE_BYTES // 2
            first = d.call("split", path, [up], makes=[half, half], view_of=up)
            left = d.call("getitem", path, [first], makes=[half], view_of=first, group=op)
            right = d.call("getitem", path, [first + 1], makes=[half], view_of=first + 1, group=op)
            inner = d.call("mul", path, [left, right], makes=[half])
        case _:
            inner = d.call("gelu", path, [up])
    return d.call("linear", path, [inner], share=float(rng.uniform(0.5, 1.5)))


def chain_graph(n: int) -> OpGraph:
    """Return a chain of `n` operators, each with a weight: the deepest graph of its size."""
    d = _GraphBuilder()
    value = d.input(_VALUE_BYTES)
    for op in range(n):
        value = d.call("linear", f"layers.{op}", [value], share=1.0)
    return d.graph(value, WEIGHT_BYTES)


def diamonds_graph(count: int) -> OpGraph:
    """Return a chain of `count` diamonds of four operators each, with 2**`count` paths."""
    d = _GraphBuilder()
    value = d.input(_VALUE_BYTES)
    for diamond in range(count):
        path = f"diamonds.{diamond}"
        top = d.call("relu", path, [value])
        sides = [d.call("linear", f"{path}.{side}", [top], share=1.0) for side in ("left", "right")]
        value = d.call("add", path, sides)
    return d.graph(value, WEIGHT_BYTES)

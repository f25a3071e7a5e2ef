"""Graphs for tests: drawn by hand with `Sketch`, or at random from a seed."""

from dataclasses import dataclass, field

import numpy as np

from fxpart.core.graph import OpGraph, csr
from fxpart.core.topology import DeviceSpec, Link, Topology, uniform_topology
from fxpart.cost.problem import Problem, make_problem
from fxpart.cost.roofline import LatencyModel
from fxpart.placement import MODES
from fxpart.placement.mtkahypar import is_installed

BASELINES = ("equal_layers",)
"""Modes that ignore sizes, and refuse if their plan does not fit."""
GIVEN = ("aot_based", "custom", "accelerate")
"""Modes that need a placement, a function or a module."""


def installed_modes() -> list[str]:
    """Return the modes whose packages are installed."""
    return [name for name in MODES if name != "mtkahypar" or is_installed()]


@dataclass
class Sketch:
    """Collects operators; a value is identified by its number."""

    ops: list[tuple[list[int], list[int], int, int, str, int]] = field(default_factory=list)
    forward_of: dict[int, int] = field(default_factory=dict)
    producer: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    alloc: list[int] = field(default_factory=list)
    base: list[int] = field(default_factory=list)
    outputs: set[int] = field(default_factory=set)
    weights: list[int] = field(default_factory=list)

    def input(self, size: int) -> int:
        """Add a graph input; all must come before the operators."""
        return self._value(-1, size, size, -1)

    def weight(self, size: int) -> int:
        """Add a weight."""
        self.weights.append(size)
        return len(self.weights) - 1

    def op(  # noqa: PLR0917 - a drawing is read by position
        self,
        reads: list[int],
        makes: int = 0,
        uses: list[int] | None = None,
        flops: int = 0,
        view_of: int = -1,
        module: str = "",
        group: int = -1,
        backward_of: int = -1,
    ) -> int:
        """Add an operator with one result of the given size; return the result.

        An operator that is `backward_of` another stays with it.
        """
        index = len(self.ops)
        if backward_of >= 0:
            group = self.ops[backward_of][5]
            self.forward_of[index] = backward_of
        self.ops.append((reads, uses or [], flops, 0, module, group if group >= 0 else index))
        return self._value(index, makes, 0 if view_of >= 0 else makes, view_of)

    def _value(self, producer: int, size: int, alloc: int, base: int) -> int:
        self.producer.append(producer)
        self.size.append(size)
        self.alloc.append(alloc)
        self.base.append(base)
        return len(self.producer) - 1

    def graph(self, *outputs: int) -> OpGraph:
        """Return the graph; `outputs` are the values returned to the caller."""
        read_start, reads = csr([list(dict.fromkeys(op[0])) for op in self.ops])
        use_start, uses = csr([list(dict.fromkeys(op[1])) for op in self.ops])
        is_output = np.zeros(len(self.producer), dtype=np.bool_)
        is_output[list(outputs)] = True
        n = len(self.ops)
        return OpGraph(
            names=tuple(f"op{i}" for i in range(n)),
            modules=tuple(op[4] for op in self.ops),
            targets=("op",) * n,
            dtypes=("float32",) * n,
            flops=np.array([op[2] for op in self.ops], dtype=np.int64),
            moved_bytes=np.array([op[3] for op in self.ops], dtype=np.int64),
            group=np.array([op[5] for op in self.ops], dtype=np.int64),
            value_names=tuple(f"v{i}" for i in range(len(self.producer))),
            value_producer=np.array(self.producer, dtype=np.int64),
            value_bytes=np.array(self.size, dtype=np.int64),
            value_alloc_bytes=np.array(self.alloc, dtype=np.int64),
            value_base=np.array(self.base, dtype=np.int64),
            value_is_output=is_output,
            read_start=read_start,
            reads=reads,
            weight_names=tuple(f"w{i}" for i in range(len(self.weights))),
            weight_bytes=np.array(self.weights, dtype=np.int64),
            weight_state_bytes=np.zeros(len(self.weights), dtype=np.int64),
            use_start=use_start,
            uses=uses,
            forward_of=np.array([self.forward_of.get(i, i) for i in range(n)], dtype=np.int64),
            gradient_values=np.empty(0, dtype=np.int64),
            gradient_weights=np.empty(0, dtype=np.int64),
        )


def devices(
    *memory_bytes: int,
    rate: float = 1.0,
    link: Link | None = None,
    speeds: list[float] | None = None,
    nodes: list[int] | None = None,
    far: Link | None = None,
) -> Topology:
    """Return devices of those sizes that compute `rate` FLOP/s each, or `speeds`.

    They are joined by `link`; devices of different `nodes` by `far`.
    """
    specs = tuple(
        DeviceSpec(
            f"d{i}",
            size,
            {"float32": speeds[i] if speeds else rate},
            1.0,
            nodes[i] if nodes else 0,
        )
        for i, size in enumerate(memory_bytes)
    )
    return uniform_topology(specs, link or Link(1.0), far)


def problem(graph: OpGraph, topology: Topology) -> Problem:
    """Return the problem with an ideal roofline: an operator takes flops / rate seconds."""
    return make_problem(graph, topology, LatencyModel())


def chain(length: int, weight: int = 10, size: int = 1, flops: int = 1) -> OpGraph:
    """Return a chain of operators, each with its own weight."""
    sketch = Sketch()
    value = sketch.input(0)
    for i in range(length):
        value = sketch.op([value], size, [sketch.weight(weight)], flops, module=f"layer{i}")
    return sketch.graph(value)


def random_graph(seed: int, n: int) -> OpGraph:
    """Return a graph with all features that make a placement hard.

    Branches, views, tied weights, unread values, values without bytes, and groups: some of
    neighbours, some of distant operators, with others and other groups between them.
    """
    rng = np.random.default_rng(seed)
    sketch = Sketch()
    values = [sketch.input(int(rng.integers(1, 9))) for _ in range(int(rng.integers(1, 3)))]
    weights = [sketch.weight(int(rng.integers(1, 20))) for _ in range(2 + n // 2)]
    for op in range(n):
        count = int(rng.integers(0, min(4, len(values)) + 1))
        recent = values[-6:] if rng.random() < 0.8 else values
        reads = [int(v) for v in rng.choice(recent, size=min(count, len(recent)), replace=False)]
        uses = [int(w) for w in rng.choice(weights, size=int(rng.integers(0, 3)), replace=False)]
        view = reads[0] if reads and rng.random() < 0.25 else -1
        group = -1
        if op and rng.random() < 0.2:
            # Of the operator before, or of any.
            other = op - 1 if rng.random() < 0.5 else int(rng.integers(op))
            group = sketch.ops[other][5]
        values.append(
            sketch.op(
                reads,
                int(rng.integers(0, 9)),
                uses,
                int(rng.integers(0, 6)),
                view,
                f"block{op // 5}.part{op // 2}",
                group,
            )
        )
    return sketch.graph(values[-1], int(rng.choice(values)))

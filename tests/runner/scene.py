"""A small placement with all numbers known by hand, and a larger one."""

from typing import NamedTuple

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.topology import Topology
from fxpart.cost.evaluate import evaluate
from fxpart.cost.evaluation import Evaluation
from tests.sketch import Sketch, devices, problem


class Scene(NamedTuple):
    graph: OpGraph
    topology: Topology
    assignment: Assignment
    evaluation: Evaluation


def scene(
    graph: OpGraph, topology: Topology, part: list[int], homes: list[tuple[int, ...]]
) -> Scene:
    assignment = Assignment(np.array(part, dtype=np.int64), tuple(homes))
    return Scene(graph, topology, assignment, evaluate(problem(graph, topology), assignment))


def fork() -> Scene:
    """Return a fork over two of three devices; 1 FLOP and 1 byte take 1 s.

    op0 makes 4 bytes in 3 s on device 0; op1 and op2 read them on device 1, op1 in partition 1 and
    op2 in partition 2; op3 joins them there. A transfer of 4 s, then 2 + 5 + 1 s: 15 s in all.
    """
    sketch = Sketch()
    start = sketch.input(2)
    w = [sketch.weight(size) for size in (10, 20, 30)]
    a = sketch.op([start], 4, [w[0]], 3, module="stem")
    b = sketch.op([a], 1, [w[1]], 2, module="body.left")
    c = sketch.op([a], 1, [w[2]], 5, module="body.right")
    d = sketch.op([b, c], 1, [w[2]], 1, module="body")
    topology = devices(100, 200, 300)
    return scene(sketch.graph(d), topology, [0, 1, 2, 2], [(0,), (1,), (1,)])


def long_chain(length: int, parts: int, count: int) -> Scene:
    """Return a chain with a skip every seventh operator, cut into `parts` over `count` devices."""
    sketch = Sketch()
    values = [sketch.input(8)]
    for i in range(length):
        skip = [values[max(0, i - 30)]] if i % 7 == 0 and i else []
        reads = list(dict.fromkeys([values[-1], *skip]))
        values.append(sketch.op(reads, 8 + i % 3, [sketch.weight(16)], 1 + i % 5, module=f"m{i}"))
    part = [i * parts // length for i in range(length)]
    homes: list[tuple[int, ...]] = [(p % count,) for p in range(parts)]
    topology = devices(*[10**6] * count, rate=1e6)
    return scene(sketch.graph(values[-1]), topology, part, homes)

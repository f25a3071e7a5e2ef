"""Static graphs: written by hand, of known shapes, or random."""

import random
from collections.abc import Sequence

import numpy as np

from fxpart.core.graph import csr
from fxpart.torch_compat.accounting.cost import used_bytes
from fxpart.torch_compat.accounting.problem import StaticGraph, StaticProblem


def static_graph(
    reads: Sequence[Sequence[int]],
    *,
    total: Sequence[int],
    output: Sequence[int],
    seconds: Sequence[float],
    sources: Sequence[Sequence[int]] | None = None,
    source_bytes: Sequence[int] = (),
) -> StaticGraph:
    """Return the graph whose operator i reads operators ``reads[i]`` and ``sources[i]``."""
    read_start, flat = csr([list(row) for row in reads])
    source_start, used = csr([list(row) for row in sources or [[] for _ in reads]])
    return StaticGraph(
        names=tuple(f"op_{i}" for i in range(len(reads))),
        total_bytes=np.array(total, dtype=np.int64),
        output_bytes=np.array(output, dtype=np.int64),
        latency_s=np.array(seconds, dtype=np.float64),
        read_start=read_start,
        reads=flat,
        source_bytes=np.array(source_bytes, dtype=np.int64),
        source_start=source_start,
        sources=used,
    )


def random_graph(rng: random.Random, n: int, degree: float = 1.5) -> StaticGraph:
    """Return a graph of n operators, each reading a few before it, and some sources."""
    count = rng.randint(1, 3)
    reads, sources = [], []
    for i in range(n):
        near = rng.random() < 0.7
        lowest = max(0, i - 4) if near else 0
        n_reads = min(i - lowest, int(rng.expovariate(1 / degree)) + (i > 0 and rng.random() < 0.9))
        reads.append(rng.sample(range(lowest, i), n_reads))
        often = 0.8 if not reads[-1] else 0.15
        sources.append([s for s in range(count) if rng.random() < often / count + 0.05])
    output = [rng.choice([4, 8, 16, 32, 64]) for _ in range(n)]
    return static_graph(
        reads,
        total=[size + rng.choice([0, 0, 20, 100, 300]) for size in output],
        output=output,
        seconds=[rng.randint(1, 20) / 4 for _ in range(n)],
        sources=sources,
        source_bytes=[rng.choice([4, 16, 64]) for _ in range(count)],
    )


def random_problem(seed: int, most_ops: int = 14, most_devices: int = 4) -> StaticProblem:
    """Return a problem whose devices hold 0.3 to 0.9 of the graph each."""
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(3, most_ops), rng.choice([0.5, 1.0, 1.5]))
    devices = rng.randint(2, most_devices)
    whole = int(used_bytes(graph, np.zeros(graph.n_ops, dtype=np.int64), 1)[0])
    part = rng.uniform(0.3, 0.9)
    equal = rng.random() < 0.5
    shares = [part if equal else rng.uniform(0.3, 0.9) for _ in range(devices)]
    memory = np.array([max(1, int(whole * share)) for share in shares], dtype=np.int64)
    return StaticProblem(graph, memory, rng.choice([1.0, 5.0, 25.0, 100.0]))


def chain(n: int, seed: int = 0) -> StaticGraph:
    """Return a chain of n operators with random weights and outputs."""
    rng = random.Random(seed)
    output = [rng.randint(10, 60) for _ in range(n)]
    return static_graph(
        [[i - 1] if i else [] for i in range(n)],
        total=[size + rng.randint(0, 200) for size in output],
        output=output,
        seconds=[rng.randint(1, 9) / 2 for _ in range(n)],
        sources=[[] if i else [0] for i in range(n)],
        source_bytes=[32],
    )


def diamonds(n: int, seed: int = 0) -> StaticGraph:
    """Return a chain of n diamonds: each splits into two operators that the next one reads."""
    rng = random.Random(seed)
    reads: list[list[int]] = [[]]
    for _ in range(n):
        top = len(reads) - 1
        reads += [[top], [top], [top + 1, top + 2]]
    count = len(reads)
    output = [rng.randint(10, 60) for _ in range(count)]
    return static_graph(
        reads,
        total=[size + rng.randint(0, 100) for size in output],
        output=output,
        seconds=[rng.randint(1, 9) / 2 for _ in range(count)],
    )

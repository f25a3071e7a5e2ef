"""Small graphs for the tests of torch's accounting, written by hand or random."""

import random

import numpy as np

from fxpart.core.graph import csr
from fxpart.torch_compat.accounting.problem import StaticGraph, StaticProblem

Row = tuple[int, int, list[int], list[int]]
"""Weights, output, operators read and sources read, for one operator."""


def small_graph(rows: list[Row], sources: list[int]) -> StaticGraph:
    """Return the graph of these operators, named ``op0``, ``op1``, ...; each takes a second."""
    read_start, reads = csr([row[2] for row in rows])
    source_start, used = csr([row[3] for row in rows])
    return StaticGraph(
        names=tuple(f"op{i}" for i in range(len(rows))),
        total_bytes=np.array([row[0] + row[1] for row in rows], dtype=np.int64),
        output_bytes=np.array([row[1] for row in rows], dtype=np.int64),
        latency_s=np.ones(len(rows)),
        read_start=read_start,
        reads=reads,
        source_bytes=np.array(sources, dtype=np.int64),
        source_start=source_start,
        sources=used,
    )


def small_problem(rows: list[Row], sources: list[int], memory: list[int]) -> StaticProblem:
    """Return the problem of placing these operators on devices with this memory."""
    return StaticProblem(small_graph(rows, sources), np.array(memory, dtype=np.int64), 1.0)


def random_rows(seed: int, count: int) -> tuple[list[Row], list[int]]:
    """Return operators that read up to three earlier ones and two of four sources."""
    rng = random.Random(seed)
    rows: list[Row] = []
    for op in range(count):
        reads = rng.sample(range(op), min(op, rng.randint(0, 3)))
        used = rng.sample(range(4), rng.randint(0 if reads else 1, 2))
        rows.append((rng.choice([0, 0, 7, 60]), rng.randint(1, 20), reads, used))
    return rows, [rng.randint(1, 15) for _ in range(4)]

"""Stretches of repeated blocks: values known for one hold for all, against a walk over each."""

from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.core.graph import OpGraph
from fxpart.core.optimizer import Optimizer, with_optimizer
from fxpart.placement.stages.line import stage_line
from fxpart.placement.stages.stretch_bytes import stretch_bytes
from tests.sketch import Sketch, devices, problem

SEEDS = st.integers(0, 10_000)


class Step(NamedTuple):
    """An operator of every block."""

    back: tuple[int, ...]
    """Distance in operators to the producer of its input."""
    size: int
    weight: int
    is_view: bool
    reads_mask: bool
    is_saved: bool


def _steps(seed: int) -> list[Step]:
    rng = np.random.default_rng(seed)
    return [
        Step(
            tuple({1, int(rng.integers(1, 5))}),
            int(rng.integers(0, 9)),
            int(rng.integers(0, 9)) * int(rng.integers(0, 2)),
            bool(rng.random() < 0.2),
            bool(rng.random() < 0.2),
            bool(rng.random() < 0.6),
        )
        for _ in range(int(rng.integers(1, 5)))
    ]


def _model(steps: list[Step], blocks: int, odd: int = -1, *, trains: bool = True) -> OpGraph:
    """Return blocks of `steps` between an embedding and a head; block `odd` has one more byte."""
    sketch = Sketch()
    first = sketch.input(3)
    values, used = [sketch.op([first], 4, [sketch.weight(30)])], [0]
    mask = sketch.op([first], 2)
    values, used = [*values, mask], [*used, -1]
    saved = [True, False]
    for block in range(blocks):
        for step in steps:
            reads = [values[-min(ago, len(values))] for ago in step.back]
            uses = [sketch.weight(step.weight)] if step.weight else []
            view = reads[0] if step.is_view else -1
            size, read = step.size + (block == odd), [*reads, *([mask] if step.reads_mask else [])]
            values.append(sketch.op(read, size, uses, 1, view, f"layers.{block}.m"))
            used.append(uses[0] if uses else -1)
            saved.append(step.is_saved)
    values.append(sketch.op([values[-1]], 7, [0]))
    if not trains:
        return sketch.graph(values[-1])
    outputs, gradient, trained = [values[-1]], values[-1], list[int]()
    for op in reversed(range(len(used))):
        reads = [gradient, *([values[op]] if saved[op] else [])]
        gradient = sketch.op(reads, 3, [used[op]] if used[op] >= 0 else [], 1, backward_of=op)
        if used[op] > 0:
            outputs.append(sketch.op([gradient], 5, [], 1, backward_of=op))
            trained.append(used[op])
    return replace(
        sketch.graph(*outputs),
        gradient_values=np.array(outputs[1:], dtype=np.int64),
        gradient_weights=np.array(trained, dtype=np.int64),
    )


def _repeated(graph: OpGraph) -> int:
    """Return how many units repeat, after checking all stretches against a walk."""
    stretches = stage_line(problem(graph, devices(9999, 9999))).stretches
    of, count = stretches, len(stretches.units.first_op)
    for low, high in combinations(range(count + 1), 2):
        walked = stretch_bytes(of.memory, of.units, of.scratch, low, high)
        assert tuple(of.bytes_of(low, high)) == tuple(map(int, walked))
    return of.known.end - of.known.first


@settings(max_examples=15)
@given(SEEDS, st.integers(0, 5), st.booleans())
def test_all_stretches_agree_with_a_walk(seed: int, odd: int, trains: bool) -> None:
    steps = _steps(seed)
    alike, other = (_model(steps, 6, block, trains=trains) for block in (-1, odd))
    assert _repeated(other) <= _repeated(alike)
    if trains and len(other.gradient_values):
        _repeated(with_optimizer(other, Optimizer("adam", implementation="foreach")))


def test_blocks_without_weights_repeat_too() -> None:
    sketch = Sketch()
    value = sketch.input(3)
    for block in range(5):
        for size in (4, 2):
            value = sketch.op([value], size, [], 1, module=f"layers.{block}.m")
    # The first block reads the input, and the last makes the result.
    assert _repeated(sketch.graph(value)) == 3 * 2


def test_blocks_between_embedding_and_head_repeat_by_hand() -> None:
    # Three units per block. The first reads the embedding's result, the last the head's gradient.
    steps = [Step((1,), size, 2, False, size == 3, True) for size in (1, 2, 3)]
    assert _repeated(_model(steps, 8)) == 6 * 3
    assert _repeated(_model(steps, 8, 4)) == 3 * 3
    assert _repeated(_model(steps, 2)) == 0

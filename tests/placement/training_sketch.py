"""Random training steps: a random forward, then a gradient operator for each, backwards."""

from dataclasses import replace

import numpy as np

from fxpart.core.graph import OpGraph
from tests.sketch import Sketch


def random_training_graph(seed: int, n: int) -> OpGraph:
    """Return up to `n` forward operators and as many backward ones, which read saved values.

    With views in both, saved values, weights used twice, each use with a gradient, and groups.
    """
    rng = np.random.default_rng(seed)
    sketch = Sketch()
    values = [sketch.input(int(rng.integers(1, 9)))]
    weights = [sketch.weight(int(rng.integers(1, 20))) for _ in range(1 + n // 2)]
    used: list[list[int]] = []
    results: list[int] = []
    for _ in range(n):
        count = int(rng.integers(1, 3))
        reads = [int(v) for v in rng.choice(values[-4:], size=min(count, len(values[-4:])))]
        uses = [int(w) for w in rng.choice(weights, size=int(rng.integers(0, 2)))]
        view = reads[0] if rng.random() < 0.2 else -1
        group = sketch.ops[-1][5] if sketch.ops and rng.random() < 0.1 else -1
        size, flops = int(rng.integers(0, 9)), int(rng.integers(0, 6))
        values.append(sketch.op(reads, size, uses, flops, view, f"m{len(results) // 3}", group))
        results.append(values[-1])
        used.append(uses)
    gradient, outputs, trained = -1, [values[-1]], list[int]()
    for op in reversed(range(n)):
        reads = [results[op]] if rng.random() < 0.7 else []
        reads += [gradient] if gradient >= 0 else []
        view = reads[-1] if reads and rng.random() < 0.2 else -1
        flops = int(rng.integers(0, 9))
        gradient = sketch.op(reads, int(rng.integers(0, 9)), used[op], flops, view, backward_of=op)
        if used[op]:
            # The gradient of a weight is kept.
            outputs.append(sketch.op([gradient], 5, [], 1, backward_of=op))
            trained.append(used[op][0])
    return replace(
        sketch.graph(*outputs),
        gradient_values=np.array(outputs[1:], dtype=np.int64),
        gradient_weights=np.array(trained, dtype=np.int64),
    )

"""Lower bounds of a pipeline step from its work alone, for any cuts into stages."""

from functools import cache

import numpy as np

__all__ = ["least_interleaved_share", "least_step_s"]


def least_step_s(work_s: float, stages: int, microbatches: int) -> float:
    """Return a lower bound of a step with at most `stages` stages, one per device.

    Let p stages take w[1], ..., w[p] per microbatch, forward and backward. Stage s waits for the
    earlier ones at both ends of a step of m microbatches, so the step takes at least ``w[1] + ... +
    w[s-1] + m w[s]`` for each s. With w[1] + ... + w[p] = W, the `work_s`, this is at least ``W /
    (1 - (1 - 1/m) ** p)`` for any cuts.
    """
    return work_s / (1.0 - (1.0 - 1.0 / microbatches) ** stages)


@cache
def least_interleaved_share(devices: int, chunks: int, microbatches: int) -> float:
    """Return a lower bound of a step with `chunks` stages on each device, for a work of 1 s.

    Let stages 0, 1, ... take w[0], w[1], ... per microbatch, forward and backward, stage s on
    device s modulo p. From stage s on, its device runs m microbatches after the first has passed
    the stages before s, and these run the last backward afterwards. So a step takes at least
    ``w[0] + ... + w[s-1] + m (w[s] + w[s+p] + w[s+2p] + ...)`` for each s, which is row s of A w.
    For any y >= 0 it takes at least ``min(A' y) / sum(y)`` then, since ``y' A w >= min(A' y)``; the
    y with A' y = 1 is that of all rows alike. With one chunk it is `least_step_s`.
    """
    if devices == 1:
        return float(microbatches)
    stages = devices * chunks
    first, later = np.mgrid[:stages, :stages]
    follows = (later >= first) & ((later - first) % devices == 0)
    weights = (later < first) + microbatches * follows
    shares = np.maximum(np.linalg.solve(weights.T, np.ones(stages)), 0.0)
    return float((weights.T @ shares).min() / shares.sum())

"""Lower bounds of a pipeline step from its work alone, for any cuts into stages."""

from functools import cache

import numpy as np

__all__ = ["least_interleaved_share", "least_step_s"]

_TOLERANCE = 1e-6
"""Relative tolerance of a linear program's optimum."""


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
    ``w[0] + ... + w[s-1] + m (w[s] + w[s+p] + w[s+2p] + ...)`` for each s. The bound is the least
    of the largest of these over all cuts, which a linear program gives up to its tolerance. With
    one chunk it is `least_step_s`.
    """
    from scipy.optimize import linprog

    stages = devices * chunks
    first, later = np.mgrid[:stages, :stages]
    follows = (later >= first) & ((later - first) % devices == 0)
    weights = (later < first) + microbatches * follows
    largest = linprog(
        [1.0, *[0.0] * stages],
        A_ub=np.hstack([-np.ones((stages, 1)), weights]),
        b_ub=np.zeros(stages),
        A_eq=[[0.0, *[1.0] * stages]],
        b_eq=[1.0],
    )
    return float(largest.fun) * (1.0 - _TOLERANCE) if largest.success else 0.0

"""Time of a collective by bytes, ranks and link: `collective_time_s`.

On a ring each rank sends (N - 1) / N of the bytes, and twice that in an all-reduce (Patarasuk,
Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations. J. Parallel Distrib.
Comput. 69(2), 2009, doi:10.1016/j.jpdc.2008.09.002). A `CollectiveCurve` describes a library's
performance on a link by four numbers, which `python -m benchmarks.truth.fit_kernels` fits to
measured times.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fxpart.core.graph import FloatArray
from fxpart.core.topology import Link
from fxpart.errors import SpecError, nearest_names

__all__ = [
    "COLLECTIVES",
    "CollectiveCurve",
    "CollectiveCurves",
    "check_collective",
    "collective_time_s",
    "wire_bytes",
]

COLLECTIVES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""Each kind, and how many times it sends (N - 1) / N of its bytes over a link."""
_MOST_S = 1e9


@dataclass(frozen=True, slots=True)
class CollectiveCurve:
    """Performance of a library of collectives on one kind of link.

    ``launch + hop (N - 1) + wire / (share rate) + sqrt(ramp wire / (share rate))`` seconds, where
    `wire` is the bytes sent by a rank and `rate` is that of the link. The root models the loss on
    messages too short to saturate the link: it is the cost of a chunked pipeline with the optimal
    number of chunks.
    """

    launch_s: float
    hop_s: float
    """Per rank beyond the first."""
    ramp_s: float
    share: float
    """Share of the link's rate that long messages reach, in (0, 1]."""

    def __post_init__(self) -> None:
        """Check that costs are finite times and the share is in (0, 1]."""
        for name in ("launch_s", "hop_s", "ramp_s"):
            if not 0 <= getattr(self, name) < _MOST_S:
                raise SpecError(
                    f"collectives: {name} must be at least 0, got {getattr(self, name)}"
                )
        if not 0 < self.share <= 1:
            raise SpecError(f"collectives: share must be in (0, 1], got {self.share}")

    def seconds(self, wire: FloatArray, ranks: FloatArray, bytes_per_s: float) -> FloatArray:
        """Return the time of each message of `wire` bytes; all arrays have the same shape."""
        busy_s = wire / (self.share * bytes_per_s)
        seconds: FloatArray = (
            self.launch_s + self.hop_s * (ranks - 1) + busy_s + np.sqrt(self.ramp_s * busy_s)
        )
        return seconds


CollectiveCurves: TypeAlias = Mapping[str, CollectiveCurve]
"""Curves by kind; a missing kind is timed as a ring at the link's rate."""


def check_collective(kind: str) -> None:
    """Raise `SpecError` if the kind of collective is unknown."""
    if kind not in COLLECTIVES:
        raise SpecError(f"there is no collective {kind}; {nearest_names(kind, COLLECTIVES)}")


def wire_bytes(kind: str, size_bytes: float, ranks: int) -> float:
    """Return the bytes sent by each rank; `size_bytes` is as in `collective_time_s`."""
    check_collective(kind)
    return COLLECTIVES[kind] * (ranks - 1) / ranks * size_bytes


def collective_time_s(
    kind: str,
    size_bytes: float,
    ranks: int,
    link: Link,
    curves: CollectiveCurves | None = None,
) -> float:
    """Return the time in s of a collective over `ranks` devices.

    Args:
        kind: one of `COLLECTIVES`.
        size_bytes: size of the whole tensor at one rank, as in nccl-tests: the reduced tensor, the
            gathered result, the tensor before scattering, or all parts that a rank sends, including
            its own.
        ranks: number of participating devices; 1 takes no time.
        link: the slowest link between consecutive ranks.
        curves: measured curves by kind; without one for this kind, a ring at the link's rate with
            its latency at each step.

    Raises:
        SpecError: if the kind is unknown, or `ranks` is below 1.

    """
    check_collective(kind)
    if ranks < 1:
        raise SpecError(f"a collective over {ranks} ranks; give 1 or more")
    if ranks == 1:
        return 0.0
    curve = curves.get(kind) if curves else None
    if curve is None:
        steps = COLLECTIVES[kind] * (ranks - 1)
        return steps * (size_bytes / ranks / link.bytes_per_s + link.latency_s)
    wire = np.array([wire_bytes(kind, size_bytes, ranks)])
    return float(curve.seconds(wire, np.array([float(ranks)]), link.bytes_per_s)[0])

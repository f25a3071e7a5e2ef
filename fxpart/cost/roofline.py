"""Operator times by the roofline model.

Williams, Waterman, Patterson: Roofline: an insightful visual performance model for multicore
architectures. CACM 52(4), 2009, doi:10.1145/1498765.1498785.
"""

import re
from dataclasses import dataclass

import numpy as np

from fxpart.core.graph import FloatArray, OpGraph
from fxpart.core.topology import Topology
from fxpart.errors import SpecError

__all__ = ["LatencyModel", "op_time_s", "rate_names"]


_CONVOLUTION = re.compile(
    r"(^|\.)_?(cudnn_)?(convolution(_backward)?|conv(_transpose)?[123]d)(\.|$)"
    r"|^Conv(Transpose)?[123]d$"
)
"""Targets of convolutions: operators, and classes of modules."""
_LEAST_SHARE, _MOST_OVERHEAD_S = 1e-6, 3600.0


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Coefficients of the roofline: the share of a device's peaks that operators reach."""

    compute_efficiency: float = 1.0
    """Share of peak FLOP/s that matrix products reach, in (0, 1]."""
    bandwidth_efficiency: float = 1.0
    """Share of peak memory bandwidth that operators reach, in (0, 1]."""
    op_overhead_s: float = 0.0
    """Fixed cost of each operator that computes or moves anything."""

    def __post_init__(self) -> None:
        """Check that shares are in (0, 1] and the overhead is in range."""
        for name in ("compute_efficiency", "bandwidth_efficiency"):
            share = getattr(self, name)
            if not _LEAST_SHARE <= share <= 1:
                raise SpecError(f"latency.{name} must be in ({_LEAST_SHARE:.0e}, 1], got {share}")
        if not 0 <= self.op_overhead_s <= _MOST_OVERHEAD_S:
            raise SpecError(
                f"latency.op_overhead_s must be between 0 and {_MOST_OVERHEAD_S:.0f} s,"
                f" got {self.op_overhead_s}"
            )

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D)."""
        return op_time_s(graph, topology, self)


def op_time_s(graph: OpGraph, topology: Topology, model: LatencyModel) -> FloatArray:
    """Return the time of each operator on each device in seconds, shape (n, D).

    It is ``overhead + max(flops / rate of its dtype, bytes / bandwidth)``, with the rate limited to
    what the device sustains. An operator that neither computes nor moves anything (a view) takes no
    time.
    """
    names = rate_names(graph)
    dtypes = sorted(set(names))
    which = np.array([dtypes.index(name) for name in names])
    works = (graph.flops > 0) | (graph.moved_bytes > 0)
    times = np.zeros((graph.n_ops, topology.n_devices))
    for column, device in enumerate(topology.devices):
        share = model.compute_efficiency
        rates = np.array([device.reached_rate_for(dtype, share) for dtype in dtypes])
        bandwidth = device.memory_bandwidth_bytes_per_s * model.bandwidth_efficiency
        roofline_s = np.maximum(graph.flops / rates[which], graph.moved_bytes / bandwidth)
        times[:, column] = np.where(works, roofline_s + model.op_overhead_s, 0.0)
    return times


def rate_names(graph: OpGraph) -> list[str]:
    """Return the name of the peak, of `DeviceSpec.flops_per_s`, that limits each operator.

    It is the dtype, except for convolutions in float32: cuDNN computes them in TF32 unless
    ``torch.backends.cudnn.allow_tf32`` is turned off (PyTorch, "CUDA semantics"). A device that
    states no rate of ``tfloat32`` computes them in float32.
    """
    return [
        "tfloat32" if dtype == "float32" and _CONVOLUTION.search(target) else dtype
        for dtype, target in zip(graph.dtypes, graph.targets, strict=True)
    ]

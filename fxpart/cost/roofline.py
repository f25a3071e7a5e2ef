"""Operator times by the roofline model.

Williams, Waterman, Patterson: Roofline: an insightful visual performance model for multicore
architectures. CACM 52(4), 2009, doi:10.1145/1498765.1498785.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fxpart.core.efficiency import LEAST_SHARE, MEMORY, OTHER
from fxpart.core.graph import MOST_KEPT_GRAPHS, FloatArray, IntArray, OpGraph
from fxpart.core.topology import DeviceSpec, Topology
from fxpart.errors import SpecError

__all__ = [
    "BANDWIDTH_SHARE",
    "CAUSAL_WORK",
    "COMPUTE_SHARE",
    "LatencyModel",
    "OperatorClass",
    "OperatorRates",
    "op_time_s",
    "rate_names",
]

COMPUTE_SHARE, BANDWIDTH_SHARE = 0.7, 0.8
"""Shares of the peaks on devices that state none of their own, typical of large products."""
_CONVOLUTION = re.compile(
    r"(^|\.)_?(cudnn_)?(convolution(_backward)?|conv(_transpose)?[123]d)(\.|$)"
    r"|^Conv(Transpose)?[123]d$"
)
"""Targets of convolutions: operators, and classes of modules."""
CAUSAL_WORK = 0.5
"""Share of the counted FLOPs of attention that its kernels compute under a causal mask."""
_MOST_OVERHEAD_S = 3600.0


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Coefficients of the roofline: the share of a device's peaks that operators reach."""

    compute_efficiency: float | None = 1.0
    """Share of peak FLOP/s that operators of every kind reach, in (0, 1]. None: the share that a
    device states for the kind and dtype (`DeviceSpec.efficiency`), or else `COMPUTE_SHARE`."""
    bandwidth_efficiency: float | None = 1.0
    """Share of peak memory bandwidth that operators of every kind reach, in (0, 1]. None: the share
    that a device states for the kind, or else `BANDWIDTH_SHARE`."""
    op_overhead_s: float = 0.0
    """Fixed cost of each operator that computes or moves anything."""

    def __post_init__(self) -> None:
        """Check that shares are in (0, 1] and the overhead is in range."""
        for name in ("compute_efficiency", "bandwidth_efficiency"):
            share = getattr(self, name)
            if share is not None and not LEAST_SHARE <= share <= 1:
                raise SpecError(f"latency.{name} must be in ({LEAST_SHARE:.0e}, 1], got {share}")
        if not 0 <= self.op_overhead_s <= _MOST_OVERHEAD_S:
            raise SpecError(
                f"latency.op_overhead_s must be between 0 and {_MOST_OVERHEAD_S:.0f} s,"
                f" got {self.op_overhead_s}"
            )

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D)."""
        return op_time_s(graph, topology, self)

    def of_any_device(self) -> "LatencyModel":
        """Return the model with the same shares on all devices, whatever they state."""
        compute, bandwidth = self.compute_efficiency, self.bandwidth_efficiency
        return replace(
            self,
            compute_efficiency=COMPUTE_SHARE if compute is None else compute,
            bandwidth_efficiency=BANDWIDTH_SHARE if bandwidth is None else bandwidth,
        )

    def flops_per_s(self, device: DeviceSpec, operators: "OperatorClass") -> float:
        """Return the FLOP/s that operators of a class reach, relative to their counted FLOPs."""
        share, counted = self.compute_efficiency, 1.0
        if share is None:
            share = device.stated_share(operators.kind, operators.rate_name)
            if share is None:
                share = COMPUTE_SHARE
            elif operators.is_causal:
                counted = CAUSAL_WORK
        return device.reached_rate_for(operators.rate_name, share) / counted

    def bytes_per_s(self, device: DeviceSpec, operators: "OperatorClass") -> float:
        """Return the memory bandwidth that operators of a class reach."""
        share = self.bandwidth_efficiency
        if share is None:
            stated = device.stated_share(operators.kind, MEMORY)
            share = BANDWIDTH_SHARE if stated is None else stated
        return device.memory_bandwidth_bytes_per_s * share


class OperatorClass(NamedTuple):
    """A class of operators that reach the same share of a device's peak."""

    kind: str
    """A field of `fxpart.core.efficiency.Efficiency`."""
    rate_name: str
    """See `rate_names`."""
    is_causal: bool
    """Whether it is attention with a causal mask."""


class OperatorRates:
    """The rates of the operators of a graph on any device, by a roofline."""

    def __init__(self, graph: OpGraph, model: LatencyModel) -> None:
        """Classify the operators of `graph`."""
        self._graph, self._model = graph, model
        self._classes, self._class_of = _classes_of(graph)

    def on(self, device: DeviceSpec) -> tuple[FloatArray, FloatArray]:
        """Return the FLOP/s and the bytes/s of each operator, each of shape (n,)."""
        flops_per_s = np.array([self._model.flops_per_s(device, each) for each in self._classes])
        bytes_per_s = np.array(
            [self._model.bytes_per_s(device, operators) for operators in self._classes]
        )
        return flops_per_s[self._class_of], bytes_per_s[self._class_of]

    def op_time_s(self, device: DeviceSpec) -> FloatArray:
        """Return the time of each operator on a device in seconds, shape (n,)."""
        flops_per_s, bytes_per_s = self.on(device)
        flops, moved_bytes = self._graph.flops, self._graph.moved_bytes
        works = (flops > 0) | (moved_bytes > 0)
        roofline_s = np.maximum(flops / flops_per_s, moved_bytes / bytes_per_s)
        times_s: FloatArray = np.where(works, roofline_s + self._model.op_overhead_s, 0.0)
        return times_s


def op_time_s(graph: OpGraph, topology: Topology, model: LatencyModel) -> FloatArray:
    """Return the time of each operator on each device in seconds, shape (n, D).

    It is ``overhead + max(flops / rate, bytes / bandwidth)``, with the rate of its kind and dtype,
    limited to what the device sustains. An operator that neither computes nor moves anything (a
    view) takes no time.
    """
    rates = OperatorRates(graph, model)
    columns = [rates.op_time_s(device) for device in topology.devices]
    return np.stack(columns, axis=1)


def rate_names(graph: OpGraph) -> tuple[list[str], IntArray]:
    """Return the names of the peaks that limit operators, and the index of each operator's name.

    Names are keys of `DeviceSpec.flops_per_s` and may repeat; the indices have length n. A name is
    the dtype, except for convolutions in float32: cuDNN computes them in TF32 unless
    ``torch.backends.cudnn.allow_tf32`` is turned off (PyTorch, "CUDA semantics"). A device that
    states no rate of ``tfloat32`` computes them in float32.
    """
    classes, class_of = _classes_of(graph)
    return [operators.rate_name for operators in classes], class_of


@lru_cache(maxsize=MOST_KEPT_GRAPHS)
def _classes_of(graph: OpGraph) -> tuple[list[OperatorClass], IntArray]:
    """Return the classes of a graph's operators, and that of each operator. Length n."""
    called = list(zip(graph.targets, graph.dtypes, strict=True))
    number_of = {call: number for number, call in enumerate(dict.fromkeys(called))}
    number = np.fromiter(map(number_of.__getitem__, called), np.int64, graph.n_ops)
    is_causal = np.zeros(graph.n_ops, dtype=np.bool_)
    attention = graph.attention.reshape(-1, 3)
    is_causal[attention[attention[:, 2] > 0, 0]] = True
    codes, class_of = np.unique(4 * number + 2 * (graph.flops > 0) + is_causal, return_inverse=True)
    calls, classes = list(number_of), []
    for code in codes.tolist():
        (target, dtype), has_flops, causal = calls[code // 4], code & 2, code & 1
        kind = _kind(target)
        in_tf32 = dtype == "float32" and kind == "convolution"
        rate_name = "tfloat32" if in_tf32 else dtype
        classes.append(OperatorClass(kind if has_flops else OTHER, rate_name, bool(causal)))
    class_of = class_of.reshape(-1)
    class_of.setflags(write=False)  # it is kept
    return classes, class_of


def _kind(target: str) -> str:
    if _CONVOLUTION.search(target):
        return "convolution"
    return "attention" if "attention" in target else "gemm"

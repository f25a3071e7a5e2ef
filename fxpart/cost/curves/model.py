"""`KernelModel`: operator times by curves over shapes, with a roofline as the fallback."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, OpGraph
from fxpart.core.topology import DeviceSpec, Topology
from fxpart.cost.curves.attention import Attentions
from fxpart.cost.curves.bandwidth import BandwidthShares, bandwidth_shares
from fxpart.cost.curves.family import CurveFamily
from fxpart.cost.curves.gemm import Products, Rates
from fxpart.cost.curves.shapes import Shapes, shapes_of
from fxpart.cost.curves.tables import MeasuredTables, Residuals
from fxpart.cost.roofline import LatencyModel, OperatorRates, rate_names
from fxpart.errors import SpecError, nearest_names

__all__ = ["KernelModel"]

_32_BITS = ("float32", "float64", "complex64", "complex128")
"""Dtypes of 32 and 64 bits, other than TF32."""
BACKWARD_WORK = 2.5 / 0.86
"""Time of an attention backward relative to its forward: five products instead of two, at 63 % of
the peak where the forward reaches 73 % (Dao: FlashAttention-2, 2023, arXiv:2307.08691)."""


@dataclass(frozen=True, slots=True)
class KernelModel:
    """Curves by family of devices, and a roofline for everything else (`roofline_on`).

    Pointwise operators, reductions and copies use the roofline on every device, with the family's
    fixed time per kernel and its shares of memory bandwidth if it has any.
    """

    families: Mapping[str, CurveFamily]
    roofline: LatencyModel
    tables: MeasuredTables | None = None
    """Measured 16-bit kernels, whose interpolated residuals correct the curves."""
    layout: str = ""
    """Layout of quantized weights, whose products use the roofline since no curve describes their
    kernels."""
    cache_share: float = 1.0
    """`fxpart.core.few_bits.cache_share` of keys and values cached in fewer bits; attention reads
    them by the bytes that they take."""
    runs_torch: bool = False
    """Whether prompts use torch's own attention (`CurveFamily.torch_attention`) rather than the
    fastest measured kernel."""
    is_compiled: bool = False
    """Whether ``torch.compile`` generates the kernels: rows of unaligned products are padded, and
    normalizations move data at the rate of pointwise operators, and convolutions keep channels
    last throughout the graph (inductor's `layout_optimization`)."""
    carries: bool = True
    """Whether a device without curves of its own (`DeviceSpec.own_curves`) uses the curves that it
    names, scaled by its own peaks; otherwise it uses the roofline."""

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D).

        Raises:
            SpecError: if the family of a device, or the family whose attention torch runs there,
                has no curves; with tables, if a family has no table or no `measured_on`.

        """
        times = self.roofline.op_time_s(graph, topology)
        shapes: Shapes | None = None
        column_of_kind: dict[tuple[object, ...], int] = {}
        for column, device in enumerate(topology.devices):
            if not self.has_curves(device):
                continue
            kind: tuple[object, ...] = (
                device.curves,
                device.name if self.tables else "",
                device.multiprocessors,
                device.memory_bandwidth_bytes_per_s,
                tuple(sorted(device.flops_per_s.items())),
                tuple(sorted(device.sustained_flops_per_s.items())),
            )
            if kind in column_of_kind:
                times[:, column] = times[:, column_of_kind[kind]]
                continue
            if shapes is None:
                shapes = shapes_of(graph, self.layout, self.cache_share)
                if self.is_compiled:
                    shapes = shapes.channels_last()
            on_device, roofline = self._on_device(device), self.roofline_on(device)
            family = on_device.family
            if family.op_overhead_s is not None:
                roofline = replace(roofline, op_overhead_s=family.op_overhead_s)
            if roofline != self.roofline:
                times[:, column] = OperatorRates(graph, roofline).op_time_s(device)
            if family.bandwidth_shares:
                overhead_s = roofline.op_overhead_s
                self._write_moves(
                    times[:, column], graph, device, family.bandwidth_shares, overhead_s
                )
            _write_times(times[:, column], graph, shapes, on_device)
            column_of_kind[kind] = column
        return times

    def _on_device(self, device: DeviceSpec) -> "_OnDevice":
        """Return the curves and corrections of the kernels that run on a device."""
        family, compute_share = self._family(device.curves, device.name), 1.0
        residuals = self._residuals(device.name, device.curves, family)
        if self.runs_torch and family.torch_attention:
            attention_family, compute_share = family.torch_attention
            attention = self._family(attention_family, device.name).attention
            family = replace(family, attention=attention)
        if self.is_compiled:
            family = replace(family, unaligned_shares=None)
        return _OnDevice(device, family, residuals, compute_share)

    def _residuals(
        self, accelerator: str, name: str, family: CurveFamily
    ) -> Mapping[str, Residuals]:
        """Return the corrections by `tables` of the kernels that run on a device of a family."""
        if self.tables is None:
            return {}
        residuals = self.tables.read(accelerator, name, family)
        if self.runs_torch and family.torch_attention:
            residuals.pop("attention", None)
        return residuals

    def table_coverage(self, graph: OpGraph, accelerator: str, name: str) -> tuple[int, int]:
        """Return how many products and attention calls `tables` cover, and how many there are.

        Others, far from every measured size or not of 16 bits, take the time of the curve.

        Args:
            graph: the graph to run.
            accelerator: the device that runs it.
            name: the family whose curves it uses.

        Raises:
            SpecError: as `op_time_s`.

        """
        shapes = shapes_of(graph, self.layout, self.cache_share)
        products, attentions = shapes.products, shapes.attentions
        is_token = (attentions.queries == 1) & (shapes.is_backward == 0)
        calls: dict[str, tuple[Products | Attentions, FloatArray, npt.NDArray[np.bool_]]] = {
            "gemm": (products, products.operand_bytes, ~shapes.is_convolution),
            "attention": (attentions, attentions.element_bytes, ~is_token),
            "decode": (attentions, shapes.uniform_bytes, is_token),
        }
        residuals = self._residuals(accelerator, name, self._family(name, accelerator))
        covered, total = 0, 0
        for kind, (of_kind, element_bytes, rows) in calls.items():
            total += int(rows.sum())
            if kind in residuals:
                near = residuals[kind].is_near(of_kind) & (element_bytes == 2)
                covered += int((near & rows).sum())
        return covered, total

    def _write_moves(
        self,
        times: FloatArray,
        graph: OpGraph,
        device: DeviceSpec,
        shares: BandwidthShares,
        overhead_s: float,
    ) -> None:
        """Write the times of operators that move data alone into `times` (length n)."""
        of_bandwidth = bandwidth_shares(
            graph, shares, device.multiprocessors, fused=self.is_compiled
        )
        moving_s = graph.moved_bytes / (device.memory_bandwidth_bytes_per_s * of_bandwidth)
        is_moving = (graph.flops == 0) & (graph.moved_bytes > 0)
        times[is_moving] = moving_s[is_moving] + overhead_s

    def roofline_on(self, device: DeviceSpec) -> LatencyModel:
        """Return the roofline of operators without a curve on a device.

        Beside curves it does not use the shares that a device states, which average over the
        operators that have curves.
        """
        return self.roofline.of_any_device() if self.has_curves(device) else self.roofline

    def has_curves(self, device: DeviceSpec) -> bool:
        """Return whether a device uses curves rather than the roofline alone."""
        return bool(device.curves) and (self.carries or device.own_curves)

    def _family(self, name: str, device: str) -> CurveFamily:
        if name not in self.families:
            raise SpecError(
                f"device {device} runs kernels of {name}, which has no curves;"
                f" {nearest_names(name, self.families)}"
            )
        return self.families[name]


class _OnDevice(NamedTuple):
    """A device with the curves and corrections of its kernels."""

    device: DeviceSpec
    family: CurveFamily
    residuals: Mapping[str, Residuals]
    attention_share: float
    """Share of the device's peak available to its attention kernels."""


def _write_times(times: FloatArray, graph: OpGraph, shapes: Shapes, on_device: _OnDevice) -> None:
    """Write the times of products and attention on a device into `times` (length n)."""
    device, family, residuals, _ = on_device
    names, name_of = rate_names(graph)
    # A device without TF32 computes in float32.
    name_has_32_bits = [
        name in _32_BITS or (name == "tfloat32" and name not in device.flops_per_s)
        for name in names
    ]
    op_has_32_bits = np.array(name_has_32_bits, dtype=np.bool_)[name_of]
    shares = {True: family.float32_share, False: family.sustained_share}
    peak = _rates(device, names, name_has_32_bits, shares, family.gemm.compute_share)[name_of]
    of_device = Rates(0.0, device.memory_bandwidth_bytes_per_s, device.multiprocessors)
    ops, products = shapes.product_ops, shapes.products
    seconds = family.gemm.seconds(products, of_device._replace(flops_per_s=peak[ops]))
    seconds *= _factor(residuals.get("gemm"), products, products.operand_bytes)
    for elements, of_peak in zip((1, 2), family.unaligned_shares or (), strict=False):
        is_slow = (shapes.product_alignment == elements) & (products.operand_bytes == 2)
        seconds = np.maximum(
            seconds, np.where(is_slow, graph.flops[ops] / (peak[ops] * of_peak), 0)
        )
    if curve := family.gemm_float32:
        rows = op_has_32_bits[ops] & (np.minimum(products.m, products.n) > 1)
        whole = {True: 1.0, False: 1.0}
        rates = _rates(device, names, name_has_32_bits, whole, curve.compute_share)
        seconds[rows] = curve.seconds(
            products.only(rows),
            of_device._replace(flops_per_s=rates[name_of[ops]][rows]),
            ~shapes.has_bias[rows],
        )
    if convolution := family.convolution:
        rows = shapes.is_convolution
        rates = _rates(device, names, name_has_32_bits, shares, convolution.compute_share)
        seconds[rows] = convolution.forward_seconds(
            shapes.convolutions,
            of_device._replace(flops_per_s=rates[name_of[ops]][rows]),
            device.rate_for("float32"),
        )
        seconds[shapes.is_gradient] *= convolution.gradient_work
    times[ops] = seconds * shapes.product_calls
    _write_attention(times, shapes, on_device, of_device, peak)


def _rates(
    device: DeviceSpec,
    names: Sequence[str],
    name_has_32_bits: Sequence[bool],
    shares: Mapping[bool, float],
    kernel_share: float,
) -> FloatArray:
    """Return the rate of each of `names`: the peak, times the share of its number of bits.

    Kernels reach `kernel_share` of it.
    """
    pairs = zip(names, name_has_32_bits, strict=True)
    return np.array(
        [device.reached_rate_for(name, shares[has_32], kernel_share) for name, has_32 in pairs]
    )


def _write_attention(
    times: FloatArray, shapes: Shapes, on_device: _OnDevice, of_device: Rates, peak: FloatArray
) -> None:
    """Write the times of attention; `peak` is the rate of each operator."""
    _, family, residuals, attention_share = on_device
    ops, calls = shapes.attention_ops, shapes.attentions
    of_calls = of_device._replace(flops_per_s=peak[ops])
    of_prompts = of_calls._replace(flops_per_s=peak[ops] * attention_share)
    prompt_s = family.attention.seconds(calls, of_prompts)
    prompt_s *= _factor(residuals.get("attention"), calls, calls.element_bytes)
    # The curve with a cache of its own also writes it, here another operator does.
    token_s = family.decode.seconds(calls._replace(cache_bytes=shapes.kept_bytes), of_calls)
    token_s -= np.where(shapes.kept_bytes > 0, family.decode.cache_launch_s, 0.0)
    token_s *= _factor(residuals.get("decode"), calls, shapes.uniform_bytes)
    seconds = np.where((calls.queries == 1) & (shapes.is_backward == 0), token_s, prompt_s)
    times[ops] = seconds * np.where(shapes.is_backward, BACKWARD_WORK, 1.0)


def _factor(
    residuals: Residuals | None, calls: Products | Attentions, element_bytes: FloatArray
) -> FloatArray | float:
    """Return the correction of the times of `calls` by the tables, which cover 16 bits only."""
    if residuals is None:
        return 1.0
    return np.where(element_bytes == 2, residuals.factor(calls), 1.0)

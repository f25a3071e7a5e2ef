"""`KernelModel`: times of operators by curves over their shapes, by a roofline where none is."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray, OpGraph
from fxpart.core.topology import DeviceSpec, Topology
from fxpart.cost.curves.attention import Attentions
from fxpart.cost.curves.family import CurveFamily
from fxpart.cost.curves.gemm import Products, Rates
from fxpart.cost.curves.shapes import Shapes, shapes_of
from fxpart.cost.curves.tables import Residuals, read_tables
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import SpecError, nearest_names

__all__ = ["KernelModel"]

BACKWARD_WORK = 2.5 / 0.86
"""Time of a backward of attention by that of the forward: five products in place of two, at 63 %
of the peak where the forward reaches 73 % (Dao: FlashAttention-2, 2023, arXiv:2307.08691)."""


@dataclass(frozen=True, slots=True)
class KernelModel:
    """Curves by family of devices, and the roofline for all that they do not know.

    Pointwise operators, reductions and copies are the roofline's on every device: they move bytes,
    after the fixed time of a kernel of the family, if that states one.
    """

    families: Mapping[str, CurveFamily]
    roofline: LatencyModel
    tables: Path | None = None
    """A folder of measured kernels (`fxpart.cost.curves.tables`): devices take the 16-bit kernels
    of their family from it, interpolated, as far from the curves as on the measured device."""
    layout: str = ""
    """Of weights in few bits, whose products are the roofline's: no kernels of them are known."""
    runs_torch: bool = False
    """Whether attention of prompts is torch's own (`CurveFamily.torch_attention`), rather than the
    fastest kernel that was measured."""
    carries: bool = True
    """Whether a device without curves of its own (`DeviceSpec.own_curves`) takes those that it
    names, by its own peaks; else it takes the roofline."""

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D).

        Raises:
            SpecError: for a device whose family, or that whose attention torch runs there, has no
                curves; with tables, for one whose family has none, or does not say what they were
                measured on.

        """
        times = self.roofline.op_time_s(graph, topology)
        shapes: Shapes | None = None
        seen: dict[tuple[object, ...], int] = {}
        for column, device in enumerate(topology.devices):
            if not self.has_curves(device):
                continue
            family, compute_share = self._family(device.curves, device.name), 1.0
            kind: tuple[object, ...] = (
                device.curves,
                device.multiprocessors,
                device.memory_bandwidth_bytes_per_s,
                tuple(sorted(device.flops_per_s.items())),
                tuple(sorted(device.sustained_flops_per_s.items())),
            )
            if kind in seen:
                times[:, column] = times[:, seen[kind]]
                continue
            shapes = shapes or shapes_of(graph, self.layout)
            residuals = read_tables(self.tables, device.curves, family) if self.tables else {}
            if self.runs_torch and family.torch_attention:
                other, compute_share = family.torch_attention
                family = replace(family, attention=self._family(other, device.name).attention)
                residuals = {kind: of for kind, of in residuals.items() if kind != "attention"}
            if family.op_overhead_s is not None:
                roofline = replace(self.roofline, op_overhead_s=family.op_overhead_s)
                times[:, column] = roofline.op_time_s(graph, topology)[:, column]
            on = _OnDevice(device, family, residuals, compute_share)
            _place(times[:, column], graph, shapes, on)
            seen[kind] = column
        return times

    def has_curves(self, device: DeviceSpec) -> bool:
        """Return whether a device takes curves, and not the roofline for everything."""
        return bool(device.curves) and (self.carries or device.own_curves)

    def _family(self, name: str, device: str) -> CurveFamily:
        if name not in self.families:
            raise SpecError(
                f"device {device} runs kernels of {name}, which has no curves;"
                f" {nearest_names(name, self.families)}"
            )
        return self.families[name]


class _OnDevice(NamedTuple):
    """A device and what its kernels make of it."""

    device: DeviceSpec
    family: CurveFamily
    residuals: Mapping[str, Residuals]
    attention_share: float
    """Of the device's peak that the instructions of its attention reach."""


def _place(times: FloatArray, graph: OpGraph, shapes: Shapes, on: _OnDevice) -> None:
    """Write the times of products and attentions on a device into `times`, of length n."""
    device, family, residuals, attention_share = on
    share, of_it = family.sustained_share, family.gemm.compute_share
    rates = {
        dtype: device.reached_rate_for(dtype, share, of_it) for dtype in sorted(set(graph.dtypes))
    }
    peak = np.array([rates[dtype] for dtype in graph.dtypes])
    bandwidth, processors = device.memory_bandwidth_bytes_per_s, device.multiprocessors
    ops, products = shapes.product_ops, shapes.products
    seconds = family.gemm.seconds(products, Rates(peak[ops], bandwidth, processors))
    seconds *= _factor(residuals.get("gemm"), products, products.operand_bytes)
    times[ops] = seconds * shapes.product_calls
    ops, calls = shapes.attention_ops, shapes.attentions
    of_calls = Rates(peak[ops], bandwidth, processors)
    of_prompts = of_calls._replace(flops_per_s=peak[ops] * attention_share)
    whole = family.attention.seconds(calls, of_prompts)
    whole *= _factor(residuals.get("attention"), calls, calls.element_bytes)
    token = family.decode.seconds(calls, of_calls)
    token *= _factor(residuals.get("decode"), calls, calls.element_bytes)
    seconds = np.where((calls.queries == 1) & (shapes.is_backward == 0), token, whole)
    times[ops] = seconds * np.where(shapes.is_backward, BACKWARD_WORK, 1.0)


def _factor(
    residuals: Residuals | None, calls: Products | Attentions, element_bytes: FloatArray
) -> FloatArray | float:
    """Return what tables make of the times of `calls`: only those in 16 bits are in them."""
    if residuals is None:
        return 1.0
    return np.where(element_bytes == 2, residuals.factor(calls), 1.0)

"""`batch_sweep.svg`: memory of each device, and latency, over the batch size."""

from typing import NamedTuple

import numpy as np

from fxpart.graph import FloatArray, IntArray
from fxpart.symbolic.sweep import BATCH
from fxpart.topology import Topology
from runner.axis import ticks
from runner.batch_report import BatchReport
from runner.svg import GREY, WARNING, Drawing, colour_of
from runner.units import Unit, size_unit, time_unit

__all__ = ["batch_sweep_svg"]

LEFT, RIGHT, TOP, WIDTH, HEIGHT, GAP = 84.0, 150.0, 70.0, 620.0, 220.0, 70.0
"""Margins, and the size of each of the two panels, in pixels."""


class _Panel(NamedTuple):
    """Where a panel begins, in pixels from the top, and what its upper end stands for."""

    y: float
    top: float

    def level(self, value: float) -> float:
        """Return the height of `value` in pixels from the top of the picture."""
        return self.y + HEIGHT * (1 - value / (1.05 * self.top))


def batch_sweep_svg(report: BatchReport, topology: Topology) -> str:
    """Return two panels: peak memory of each device against what it has, and latency."""
    table = report.table
    batch = table.sizes[:, table.symbols.index(BATCH)] * report.replicas
    title = "Memory and latency over the batch size"
    drawing = Drawing(title)
    drawing.text(LEFT, 28, title, size=17, bold=True)
    memory = topology.memory_bytes
    used = [d for d in range(table.peak_bytes.shape[1]) if table.peak_bytes[:, d].max() > 0]
    # What is far above any memory would flatten the rest; so would a memory that is far away.
    most = int(table.peak_bytes.max())
    near = [size for size in memory[used].tolist() if size <= 2 * most]
    top = float(min(max([most, *near]), 2 * memory.max()))
    unit, panel = size_unit(top), _Panel(TOP, top)
    drawing.text(LEFT, TOP - 10, f"peak of tensors in {unit.name}", bold=True)
    _frame(drawing, panel, unit)
    for device in used:
        peaks = table.peak_bytes[:, device].astype(np.float64)
        _line(drawing, batch, peaks, panel, device)
        y = panel.level(min(float(peaks[-1]), top))
        drawing.text(LEFT + WIDTH + 8, y + 4, f"device {device}", size=11, fill=colour_of(device))
    for size in sorted(set(memory[used].tolist())):
        if size <= top:
            y = panel.level(float(size))
            drawing.path(f"M{LEFT:.0f} {y:.1f}h{WIDTH:.0f}", stroke=WARNING, width=2, dashes="6 3")
            drawing.text(LEFT + 6, y - 5, f"memory {unit.show(size)}", size=11, fill=WARNING)
    _mark_largest(drawing, report, batch)
    _latency_panel(drawing, report, batch)
    return drawing.svg(LEFT + WIDTH + RIGHT, TOP + 2 * HEIGHT + GAP + 50)


def _latency_panel(drawing: Drawing, report: BatchReport, batch: IntArray) -> None:
    base, latency = TOP + HEIGHT + GAP, report.table.latency_s
    panel = _Panel(base, float(latency.max()) or 1.0)
    unit = time_unit(panel.top)
    drawing.text(LEFT, base - 10, f"latency in {unit.name}", bold=True)
    _frame(drawing, panel, unit)
    _line(drawing, batch, latency, panel, 0)
    most = int(batch.max())
    for tick in ticks(most, 8):
        x = LEFT + WIDTH * tick / most
        drawing.text(x, base + HEIGHT + 18, f"{tick:g}", size=11, anchor="middle", fill=GREY)
    drawing.text(LEFT + WIDTH, base + HEIGHT + 38, "batch size", anchor="end")


def _mark_largest(drawing: Drawing, report: BatchReport, batch: IntArray) -> None:
    """Draw where the largest batch that fits is, if it is in the picture."""
    largest = report.max_global_batch_size
    if not 0 < largest <= int(batch.max()):
        return
    x = LEFT + WIDTH * largest / int(batch.max())
    drawing.path(f"M{x:.1f} {TOP:.1f}v{HEIGHT:.1f}", stroke=GREY, dashes="2 3")
    said = f"at least {largest} fit" if report.no_larger else f"largest that fits: {largest}"
    drawing.text(x - 6, TOP + 14, said, size=11, anchor="end", halo=True)


def _frame(drawing: Drawing, panel: _Panel, unit: Unit) -> None:
    drawing.rect(LEFT, panel.y, WIDTH, HEIGHT, fill="#f7f7f7")
    for tick in ticks(panel.top / unit.size, 4):
        level = panel.level(tick * unit.size)
        drawing.path(f"M{LEFT:.0f} {level:.1f}h{WIDTH:.0f}", stroke="#dddddd")
        drawing.text(LEFT - 8, level + 4, f"{tick:g}", size=11, anchor="end", fill=GREY)


def _line(
    drawing: Drawing, batch: IntArray, values: FloatArray, panel: _Panel, colour: int
) -> None:
    """Draw `values` over `batch`, as far as they are in the panel."""
    most = int(batch.max())
    inside = values <= panel.top
    points = [
        f"{LEFT + WIDTH * b / most:.1f} {panel.level(float(v)):.1f}"
        for b, v in zip(batch[inside].tolist(), values[inside].tolist(), strict=True)
    ]
    if points:
        drawing.path("M" + "L".join(points), stroke=colour_of(colour), width=2)

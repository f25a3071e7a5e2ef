"""`formulas.txt`, `formulas.tex`, `batch_sweep.csv` and `batch_sweep.svg` of a `BatchReport`."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.core.topology import Topology
from fxpart.cost.symbolic.formula import MaxFormula
from fxpart.cost.symbolic.sweep import BATCH
from runner.experiment.batch_report import BatchReport
from runner.output.result_files import write_table
from runner.output.svg import GREY, WARNING, Drawing, colour_of, ticks
from runner.output.text_files import write_text
from runner.output.units import Unit, size_unit, time_unit

__all__ = ["batch_sweep_svg", "sweep_columns", "write_batch_files"]


# `batch_sweep.svg`: memory of each device, and latency, over the batch size.

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


def write_batch_files(folder: Path, report: BatchReport, topology: Topology) -> None:
    """Write the four files into `folder`. Raises `CacheError` when it cannot be written."""
    write_text(folder / "formulas.txt", _formulas_text(report))
    write_text(folder / "formulas.tex", _formulas_latex(report))
    write_table(folder / "batch_sweep.csv", sweep_columns(report))
    write_text(folder / "batch_sweep.svg", batch_sweep_svg(report, topology))


def sweep_columns(report: BatchReport) -> dict[str, list[object]]:
    """Return the sweep as columns; batches are those of all replicas together."""
    table = report.table
    columns: dict[str, list[object]] = {
        name: (table.sizes[:, place] * (report.replicas if name == BATCH else 1)).tolist()
        for place, name in enumerate(table.symbols)
    }
    columns["latency_ms"] = (table.latency_s * 1e3).tolist()
    columns["examples_per_s"] = (table.throughput_per_s * report.replicas).tolist()
    for device in range(table.peak_bytes.shape[1]):
        columns[f"peak_bytes_device_{device}"] = table.peak_bytes[:, device].tolist()
    columns["feasible"] = table.feasible.tolist()
    return columns


def _named_formulas(report: BatchReport) -> list[tuple[str, str, str]]:
    """Return what each formula is of, as text, and in both notations."""
    unrounded = ", before the allocator rounds" if report.rounding_bytes > 1 else ""
    found = [
        (
            f"peak bytes of tensors on device {device}{unrounded}{_range(peak)}",
            peak.text(),
            peak.latex(),
        )
        for device, peak in enumerate(report.peaks)
    ]
    found.append(("FLOPs of the whole model", report.flops.text(), report.flops.latex()))
    alone = ", without sums over replicas" if report.replicas > 1 else ""
    for latency in report.latencies:
        sizes = latency.checked_at
        low, high = sizes.min(axis=0).tolist(), sizes.max(axis=0).tolist()
        where = ", ".join(
            f"{name}={a}" if a == b else f"{name} from {a} to {b}"
            for name, a, b in zip(latency.formula.symbols, low, high, strict=True)
        )
        name = f"latency in seconds{alone}{unrounded}, equal to the simulation for {where}"
        found.append((name, latency.formula.text(), latency.formula.latex()))
    return found


def _range(formula: MaxFormula) -> str:
    """Return for what sizes a formula holds, where not for all."""
    ends = [(name, *formula.range_of(name)) for name in formula.symbols]
    said = [
        f"{name} from {low}" + (f" to {high}" if high is not None else "")
        for name, low, high in ends
        if low > 1 or high is not None
    ]
    return f", for {' and '.join(said)}" if said else ""


def _formulas_text(report: BatchReport) -> str:
    shared = (
        f"# {BATCH} is that of one replica, of {report.replicas}.\n" if report.replicas > 1 else ""
    )
    body = "\n".join(f"# {name}\n{text}\n" for name, text, _ in _named_formulas(report))
    return shared + body


def _formulas_latex(report: BatchReport) -> str:
    parts = [
        f"\\section*{{{name.capitalize()}}}\n{latex}\n"
        for name, _, latex in _named_formulas(report)
    ]
    return (
        "\\documentclass{article}\n\\usepackage{amsmath}\n\\allowdisplaybreaks\n\\begin{document}\n"
        + "\n".join(parts)
        + "\\end{document}\n"
    )

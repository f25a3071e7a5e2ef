"""`formulas.txt`, `formulas.tex`, `batch_sweep.csv` and `batch_sweep.svg` of a `BatchReport`."""

from pathlib import Path

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.core.topology import Topology
from fxpart.cost.symbolic.formula import MaxFormula
from fxpart.cost.symbolic.sweep import BATCH
from fxpart.support.text_files import write_text
from runner.experiment.batch_report import BatchReport
from runner.output.plot import TEXT, Panel, Scale, axis_across, axis_up
from runner.output.result_files import write_table
from runner.output.svg import LIGHT, Drawing, colour_of, text_width
from runner.output.units import size_unit, time_unit

__all__ = ["sweep_columns", "write_batch_files"]

LEFT, RIGHT, TOP, WIDTH, HEIGHT, GAP = 84.0, 150.0, 70.0, 620.0, 180.0, 44.0
"""Margins, and the size of each panel, in pixels."""
LABEL = 13.0
"""Least distance between two labels, in pixels."""


def _batch_sweep_svg(report: BatchReport, topology: Topology, subject: str = "") -> str:
    """Return a figure over the batch size: peak memory by device, latency and throughput.

    Batches larger than the largest that fits are shaded in all three panels.
    """
    table, batch = report.table, report.batches
    title = "Memory, latency and throughput over the batch size"
    drawing = Drawing(title, subject=subject)
    drawing.text(LEFT, 28, title, size=17, bold=True)
    panel = _memory_panel(drawing, report, topology)
    times = time_unit(float(table.latency_s.max()))
    latency, rate = table.latency_s / times.size, report.examples_per_s
    finite = rate[np.isfinite(rate)]
    curves = (
        (f"latency in {times.name}", latency, float(latency.max()) or 1.0),
        ("throughput in examples/s", rate, float(finite.max(initial=0.0)) or 1.0),
    )
    for name, values, maximum in curves:
        panel = _panel(drawing, panel.base + GAP, name, int(batch.max()), maximum)
        _draw_line(drawing, panel, batch, values, colour_of(0))
        _mark_largest(drawing, panel, report)
    axis_across(drawing, panel, 8)
    drawing.text(panel.right, panel.base + 38, "batch size", anchor="end")
    return drawing.svg(LEFT + WIDTH + RIGHT, panel.base + 50)


def _memory_panel(drawing: Drawing, report: BatchReport, topology: Topology) -> Panel:
    """Draw the memory peak of each device, and the memory sizes of the devices."""
    table, memory, batch = report.table, topology.memory_bytes, report.batches
    used = [d for d in range(table.peak_bytes.shape[1]) if table.peak_bytes[:, d].max() > 0]
    # Peaks far above every memory size, or sizes far above every peak, would flatten the curves.
    largest_peak = int(table.peak_bytes.max())
    shown_sizes = [size for size in memory[used].tolist() if size <= 2 * largest_peak]
    top = float(min(max([largest_peak, *shown_sizes]), 2 * memory.max()))
    unit = size_unit(top)
    name = f"peak of tensors in {unit.name}"
    panel = _panel(drawing, TOP, name, int(batch.max()), top / unit.size)
    labels: list[float] = []
    for device in used:
        peaks = table.peak_bytes[:, device] / unit.size
        _draw_line(drawing, panel, batch, peaks, colour_of(device))
        y = panel.y_of(min(float(peaks[-1]), top / unit.size))
        while any(abs(y - other) < LABEL for other in labels):  # lines may end at the same height
            y += 1.0
        labels.append(y)
        fill = colour_of(device)
        drawing.text(panel.right + 8, y + 4, f"device {device}", size=TEXT, fill=fill)
    for size in sorted(set(memory[used].tolist())):
        if size <= top:
            y = panel.y_of(size / unit.size)
            line = f"M{panel.x:.0f} {y:.1f}h{panel.width:.0f}"
            drawing.path(line, stroke=LIGHT.warn, width=2, dashes="6 3")
            label = f"memory {unit.show(size)}"
            drawing.text(panel.x + 6, y - 5, label, size=TEXT, fill=LIGHT.warn)
    _mark_largest(drawing, panel, report, named=True)
    return panel


def _panel(drawing: Drawing, y: float, name: str, most_batch: float, top: float) -> Panel:
    """Draw an empty panel up to `top`, with its name above it."""
    across, up = Scale(0.0, float(most_batch)), Scale(0.0, 1.05 * top)
    panel = Panel(LEFT, y, WIDTH, HEIGHT, across, up)
    drawing.text(panel.x, y - 10, name, bold=True)
    drawing.rect(panel.x, y, panel.width, panel.height, fill=LIGHT.back)
    axis_up(drawing, panel, 4)
    return panel


def _draw_line(
    drawing: Drawing, panel: Panel, batch: IntArray, values: FloatArray, colour: str
) -> None:
    """Draw `values` over `batch`, clipped to the panel."""
    inside = values <= panel.up.high
    pairs = zip(batch[inside].tolist(), values[inside].tolist(), strict=True)
    drawing.line([panel.place(size, value) for size, value in pairs], stroke=colour)


def _mark_largest(
    drawing: Drawing, panel: Panel, report: BatchReport, *, named: bool = False
) -> None:
    """Mark the largest batch that fits, if it is within the panel, and shade the ones above."""
    largest = report.max_global_batch_size
    if largest > panel.across.high and named and not report.no_larger:
        label = f"largest that fits: {largest}, further to the right"
        drawing.text(panel.right, panel.y - 10, label, size=TEXT, anchor="end", fill=LIGHT.warn)
    if not 0 < largest <= panel.across.high:
        return
    x = panel.x_of(largest)
    drawing.path(f"M{x:.1f} {panel.y:.1f}v{panel.height:.1f}", stroke=LIGHT.warn, width=2)
    if not report.no_larger:
        right = panel.right - x
        drawing.rect(x, panel.y, right, panel.height, fill=LIGHT.warn, opacity=0.12)
    if not named:
        return
    label = f"at least {largest} fit" if report.no_larger else f"largest that fits: {largest}"
    wide = text_width(label, TEXT) + 12
    side, anchor = (-6, "end") if x - wide > panel.x else (6, "start")
    drawing.text(x + side, panel.y + 14, label, size=TEXT, anchor=anchor, halo=True)


def write_batch_files(
    folder: Path, report: BatchReport, topology: Topology, subject: str = ""
) -> None:
    """Write the four files into `folder`; `subject` is the first line of the figure.

    Raises `CacheError` if it cannot be written.
    """
    write_text(folder / "formulas.txt", _formulas_text(report))
    write_text(folder / "formulas.tex", _formulas_latex(report))
    write_table(folder / "batch_sweep.csv", sweep_columns(report))
    write_text(folder / "batch_sweep.svg", _batch_sweep_svg(report, topology, subject))


def sweep_columns(report: BatchReport) -> dict[str, list[object]]:
    """Return the batch sweep as columns, with the batch sizes of all replicas together."""
    table = report.table
    columns: dict[str, list[object]] = {
        name: (table.sizes[:, position] * (report.replicas if name == BATCH else 1)).tolist()
        for position, name in enumerate(table.symbols)
    }
    columns["latency_ms"] = (table.latency_s * 1e3).tolist()
    columns["examples_per_s"] = report.examples_per_s.tolist()
    for device in range(table.peak_bytes.shape[1]):
        columns[f"peak_bytes_device_{device}"] = table.peak_bytes[:, device].tolist()
    columns["feasible"] = table.feasible.tolist()
    return columns


def _named_formulas(report: BatchReport) -> list[tuple[str, str, str]]:
    """Return each formula with its title, as text and in LaTeX."""
    unrounded = ", before the allocator rounds" if report.rounding_bytes > 1 else ""
    formulas = [
        (f"peak bytes of tensors on device {device}{unrounded}{_range(peak)}", peak)
        for device, peak in enumerate(report.peaks)
    ]
    formulas.append(("FLOPs of the whole model", report.flops))
    scope = ", without sums over replicas" if report.replicas > 1 else ""
    for latency in report.latencies:
        sizes = latency.checked_at
        low, high = sizes.min(axis=0).tolist(), sizes.max(axis=0).tolist()
        where = ", ".join(
            f"{name}={a}" if a == b else f"{name} from {a} to {b}"
            for name, a, b in zip(latency.formula.symbols, low, high, strict=True)
        )
        name = f"latency in seconds{scope}{unrounded}, equal to the simulation for {where}"
        formulas.append((name, latency.formula))
    return [(name, formula.text(), formula.latex()) for name, formula in formulas]


def _range(formula: MaxFormula) -> str:
    """Return the sizes for which a formula holds, as text; empty for all."""
    ends = [(name, *formula.range_of(name)) for name in formula.symbols]
    ranges = [
        f"{name} from {low}" + (f" to {high}" if high is not None else "")
        for name, low, high in ends
        if low > 1 or high is not None
    ]
    return f", for {' and '.join(ranges)}" if ranges else ""


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

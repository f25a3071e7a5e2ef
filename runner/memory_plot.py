"""`memory.svg`: what each device holds over the time of one run, against what it has."""

import numpy as np

from fxpart.cost.evaluation import DeviceUse, Evaluation
from fxpart.graph import FloatArray
from runner.svg import GREY, INK, WARNING, Drawing, colour_of, text_width
from runner.units import Unit, size_unit, time_unit

__all__ = ["memory_svg"]

LEFT, RIGHT, TOP, BOTTOM, WIDTH = 84.0, 20.0, 84.0, 52.0, 820.0
"""Margins of the panels and their width, in pixels."""
WEIGHTS, TENSORS = 0.4, 1.0
"""Opacity of the two areas."""
ZOOM_BELOW = 0.2
"""When no device fills this much of its memory, the axes end at the fullest one instead."""


def memory_svg(evaluation: Evaluation) -> str:
    """Return a panel for each device that computes: weights below, live tensors on top, capacity.

    The run is that of the first input. Bytes are known while the device's own operators run: from
    the end of its last one on, or where its turn comes with a later input, only its weights are
    drawn.
    """
    used = [use for use in evaluation.devices if use.operators]
    zoomed = max(use.peak_bytes / use.memory_bytes for use in used) < ZOOM_BELOW
    tops = [use.peak_bytes if zoomed else max(use.peak_bytes, use.memory_bytes) for use in used]
    most = max(1, *tops)
    unit, height = size_unit(most), 110.0 if len(used) <= 12 else 56.0
    title = f"Memory held over one run, in {unit.name}"
    drawing = Drawing(title)
    drawing.text(LEFT, 28, title, size=17, bold=True)
    _draw_legend(drawing, zoomed)
    y = TOP
    for use in used:
        top = most if zoomed else max(use.peak_bytes, use.memory_bytes)
        _draw_panel(drawing, evaluation, use, (y, height, 1.1 * top), unit)
        y += height + 30
    _draw_time_axis(drawing, evaluation.latency_s, y - 30)
    return drawing.svg(LEFT + WIDTH + RIGHT, y - 30 + BOTTOM)


def _draw_legend(drawing: Drawing, zoomed: bool) -> None:
    for x, label, opacity in ((LEFT, "weights", WEIGHTS), (LEFT + 100, "live tensors", TENSORS)):
        drawing.rect(x, 41, 14, 12, fill=colour_of(0), opacity=opacity)
        drawing.text(x + 20, 52, label)
    drawing.path(f"M{LEFT + 230:.0f} 47h22", stroke=WARNING, width=2, dashes="6 3")
    says = "capacity (axes are cut: it is far above)" if zoomed else "capacity"
    drawing.text(LEFT + 258, 52, says)


def _draw_panel(
    drawing: Drawing,
    evaluation: Evaluation,
    use: DeviceUse,
    frame: tuple[float, float, float],
    unit: Unit,
) -> None:
    """Draw one device in `frame`: its top, its height in pixels, and the bytes at its top."""
    y, height, top_bytes = frame
    pixels_per_byte = height / top_bytes
    base = y + height
    drawing.rect(LEFT, y, WIDTH, height, fill="#f7f7f7")
    for tick in _ticks(top_bytes / unit.size, 3 if height > 80 else 2):
        level = base - tick * unit.size * pixels_per_byte
        drawing.path(f"M{LEFT:.0f} {level:.1f}h{WIDTH:.0f}", stroke="#dddddd")
        drawing.text(LEFT - 8, level + 4, f"{tick:g}", size=11, anchor="end", fill=GREY)
    colour, weights = colour_of(use.logical_id), use.weight_bytes * pixels_per_byte
    tip = f"weights {unit.show(use.weight_bytes)} {unit.name}"
    drawing.rect(LEFT, base - weights, WIDTH, weights, fill=colour, opacity=WEIGHTS, tip=tip)
    profile, span_s = evaluation.memory[use.logical_id], evaluation.latency_s or 1.0
    if len(profile.op):
        end_s = float(evaluation.op_finish_s[profile.op[-1]])
        above = (profile.held_bytes - use.weight_bytes).astype(np.float64) * pixels_per_byte
        outline = _outline(profile.start_s / span_s, above, end_s / span_s, base - weights)
        drawing.path(outline, fill=colour, opacity=TENSORS)
    level = max(base - use.memory_bytes * pixels_per_byte, y)
    line = f"M{LEFT:.0f} {level:.1f}h{WIDTH:.0f}"
    drawing.path(line, stroke=WARNING, width=2, dashes="6 3")
    over = use.peak_bytes > use.memory_bytes
    says = f"peak {unit.show(use.peak_bytes)} of {unit.show(use.memory_bytes)} {unit.name}"
    says += ", does not fit" if over else "" if len(profile.op) else ", waits for its turn"
    drawing.text(LEFT, y - 6, f"device {use.logical_id}: {use.name}", bold=True)
    drawing.text(LEFT + WIDTH, y - 6, says, anchor="end", fill=WARNING if over else INK)


def _outline(start: FloatArray, above: FloatArray, end: float, base: float) -> str:
    """Return a stepped area as a path: from each `start` (a share of the width) `above` pixels.

    Of the steps within a tenth of a pixel only the highest is drawn, so that a path has an end.
    """
    column = np.rint(start * WIDTH * 10).astype(np.int64)
    first = np.flatnonzero(np.diff(column, prepend=-1))
    x = (LEFT + column[first] / 10).tolist()
    y = (base - np.maximum.reduceat(above, first)).tolist()
    steps = "".join(f"H{a:.1f}V{b:.1f}" for a, b in zip(x, y, strict=True))
    return f"M{x[0]:.1f} {base:.1f}{steps}H{LEFT + WIDTH * end:.1f}V{base:.1f}z"


def _draw_time_axis(drawing: Drawing, latency_s: float, y: float) -> None:
    unit = time_unit(latency_s)
    for tick in _ticks(latency_s / unit.size, 6):
        x = LEFT + WIDTH * tick * unit.size / (latency_s or 1.0)
        drawing.path(f"M{x:.1f} {y:.1f}v5", stroke=GREY)
        drawing.text(x, y + 18, f"{tick:g}", size=11, anchor="middle", fill=GREY)
    label = f"time in {unit.name}"
    drawing.text(LEFT + WIDTH - text_width(label, 12) / 2, y + 38, label, anchor="middle")


def _ticks(top: float, about: int) -> list[float]:
    """Return round numbers from 0 to `top`, around `about` of them above 0."""
    if top <= 0:
        return [0.0]
    rough = top / about
    decade = 10.0 ** np.floor(np.log10(rough))
    step = min((1, 2, 2.5, 5, 10), key=lambda factor: abs(factor * decade - rough)) * decade
    return [float(f"{i * step:.6g}") for i in range(int(top / step) + 1)]

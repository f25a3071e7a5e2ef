"""`memory.svg`: what each device holds over the time of one run, kind by kind, and what it has."""

from typing import NamedTuple

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.cost.evaluation import DeviceUse, Evaluation
from fxpart.cost.peak_tensors import doing, memory_by_kind
from fxpart.cost.storage_kinds import KINDS
from runner.output.svg import GREY, INK, PALETTE, WARNING, Drawing, text_width, ticks
from runner.output.units import Unit, size_unit, time_unit

__all__ = ["memory_svg"]

LEFT, RIGHT, TOP, BOTTOM, WIDTH = 84.0, 20.0, 84.0, 52.0, 820.0
"""Margins of the panels and their width, in pixels."""
ZOOM_BELOW = 0.2
"""When no device fills this much of its memory, the axes end at the fullest one instead."""
STEPS_PER_PIXEL = 2
LAYERS = (
    ("weights", ("weight",), PALETTE[0]),
    ("optimizer state", ("optimizer state",), PALETTE[4]),
    ("gradients", ("gradient",), PALETTE[1]),
    ("saved activations", ("saved activation",), PALETTE[2]),
    ("other tensors", ("input", "received", "output", "temporary"), PALETTE[3]),
)
"""What is drawn on top of each other, from below: its name, its kinds, its colour."""


class _Panel(NamedTuple):
    """Where one device is drawn, and what it is."""

    use: DeviceUse
    tops: IntArray
    """Bytes up to the top of each of `LAYERS` while each of its operators runs."""
    peak_at: str
    """What runs at its peak, where that is in the drawing."""
    y: float
    height: float
    top_bytes: float

    @property
    def base(self) -> float:
        return self.y + self.height

    def level(self, size: float) -> float:
        """Return where so many bytes are on the page."""
        return self.base - size * self.height / self.top_bytes


def memory_svg(graph: OpGraph, assignment: Assignment, evaluation: Evaluation) -> str:
    """Return a panel for each device that computes: what it holds by kind, the peak, capacity.

    The run is that of the first input. Bytes are known while the device's own operators run: from
    the end of its last one on, or where its turn comes with a later input, only its weights and
    their optimizer state are drawn.
    """
    used = [use for use in evaluation.devices if use.operators]
    zoomed = max(use.peak_bytes / use.total_bytes for use in used) < ZOOM_BELOW
    tops = [use.peak_bytes if zoomed else max(use.peak_bytes, use.total_bytes) for use in used]
    most = max(1, *tops)
    unit, height = size_unit(most), 110.0 if len(used) <= 12 else 56.0
    title = f"Memory held over one run, in {unit.name}"
    drawing = Drawing(title)
    drawing.text(LEFT, 28, title, size=17, bold=True)
    kinds = memory_by_kind(graph, assignment, len(evaluation.devices))
    layers = {use.logical_id: _layers(kinds[use.logical_id], use) for use in used}
    _draw_legend(drawing, [bool(layer.any()) for layer in _amounts(layers)], zoomed)
    y = TOP
    for use in used:
        top = most if zoomed else max(use.peak_bytes, use.total_bytes)
        tops_of, at = layers[use.logical_id], _peak_at(graph, evaluation, use)
        _draw_panel(drawing, evaluation, _Panel(use, tops_of, at, y, height, 1.1 * top), unit)
        y += height + 30
    _draw_time_axis(drawing, evaluation.latency_s, y - 30)
    return drawing.svg(LEFT + WIDTH + RIGHT, y - 30 + BOTTOM)


def _layers(kinds: IntArray, use: DeviceUse) -> IntArray:
    """Return the top of each of `LAYERS` in bytes, one more column at the end for what stays."""
    rows = [kinds[[KINDS.index(kind) for kind in members]].sum(axis=0) for _, members, _ in LAYERS]
    stays = [use.weight_bytes, use.state_bytes, 0, 0, 0]
    return np.cumsum(np.column_stack([np.array(rows), stays]), axis=0)


def _amounts(layers: dict[int, IntArray]) -> IntArray:
    """Return the bytes of each of `LAYERS` (row), of all devices in a row."""
    tops = np.concatenate(list(layers.values()), axis=1)
    return np.diff(tops, axis=0, prepend=0)


def _draw_legend(drawing: Drawing, present: list[bool], zoomed: bool) -> None:
    x = LEFT
    for (label, _, colour), there in zip(LAYERS, present, strict=True):
        if not there:
            continue
        drawing.rect(x, 41, 14, 12, fill=colour)
        drawing.text(x + 20, 52, label)
        x += 36 + text_width(label, 12)
    drawing.path(f"M{x:.0f} 47h22", stroke=WARNING, width=2, dashes="6 3")
    says = "capacity (axes are cut: it is far above)" if zoomed else "capacity"
    drawing.text(x + 28, 52, says)


def _draw_panel(drawing: Drawing, evaluation: Evaluation, panel: _Panel, unit: Unit) -> None:
    """Draw one device: grid, areas from the highest to the lowest, capacity, peak, words."""
    use, y, height = panel.use, panel.y, panel.height
    drawing.rect(LEFT, y, WIDTH, height, fill="#f7f7f7")
    for tick in ticks(panel.top_bytes / unit.size, 3 if height > 80 else 2):
        level = panel.level(tick * unit.size)
        drawing.path(f"M{LEFT:.0f} {level:.1f}h{WIDTH:.0f}", stroke="#dddddd")
        drawing.text(LEFT - 8, level + 4, f"{tick:g}", size=11, anchor="end", fill=GREY)
    _draw_areas(drawing, evaluation, panel, unit)
    _draw_capacity(drawing, panel, unit)
    waits = not len(evaluation.memory[use.logical_id].op)
    over = use.peak_bytes > use.memory_bytes
    says = f"peak {unit.show(use.peak_bytes)} of {unit.show(use.total_bytes)} {unit.name}"
    says += f", {unit.show(use.reserved_bytes)} reserved" if use.reserved_bytes else ""
    says += ", does not fit" if over else ", waits for its turn" if waits else ""
    name = f"device {use.logical_id}: {use.name}"
    drawing.text(LEFT, y - 6, name, bold=True)
    room = int((WIDTH - text_width(name, 12)) / text_width("m", 12)) - len(says) - 8
    says += f", at {_shortened(panel.peak_at, room)}" if panel.peak_at else ""
    drawing.text(LEFT + WIDTH, y - 6, says, anchor="end", fill=WARNING if over else INK)


def _draw_areas(drawing: Drawing, evaluation: Evaluation, panel: _Panel, unit: Unit) -> None:
    """Draw what is held, the highest first, so that each covers all above it but itself."""
    profile = evaluation.memory[panel.use.logical_id]
    span_s = evaluation.latency_s or 1.0
    amounts = np.diff(panel.tops, axis=0, prepend=0)
    for index in reversed(range(len(LAYERS))):
        label, _, colour = LAYERS[index]
        if not amounts[index].any():
            continue
        if index < 2:  # what stays
            size, top = int(amounts[index, -1]), panel.level(float(panel.tops[index, -1]))
            tip = f"{label} {unit.show(size)} {unit.name}"
            drawing.rect(LEFT, top, WIDTH, panel.base - top, fill=colour, tip=tip)
        elif len(profile.op):
            levels = panel.tops[index, :-1].astype(np.float64) * (panel.height / panel.top_bytes)
            end_s = float(evaluation.op_finish_s[profile.op[-1]])
            outline = _outline(profile.start_s / span_s, levels, end_s / span_s, panel.base)
            drawing.path(outline, fill=colour)
    if panel.peak_at:
        at = int(np.argmax(profile.held_bytes))
        x = LEFT + WIDTH * float(profile.start_s[at]) / span_s
        level = panel.level(panel.use.peak_bytes)
        drawing.path(
            f"M{x:.1f} {level:.1f}l-4 -7h8z", fill=INK, tip=f"the peak, at {panel.peak_at}"
        )


def _draw_capacity(drawing: Drawing, panel: _Panel, unit: Unit) -> None:
    use = panel.use
    level = max(panel.level(use.memory_bytes), panel.y)
    whole = max(panel.level(use.total_bytes), panel.y)
    if use.reserved_bytes:
        tip = f"reserved {unit.show(use.reserved_bytes)} {unit.name}"
        drawing.rect(LEFT, whole, WIDTH, level - whole, fill=GREY, opacity=0.3, tip=tip)
    line = f"M{LEFT:.0f} {level:.1f}h{WIDTH:.0f}"
    drawing.path(line, stroke=WARNING, width=2, dashes="6 3")


def _peak_at(graph: OpGraph, evaluation: Evaluation, use: DeviceUse) -> str:
    """Return what runs at the peak of a device, ``""`` where that is of a later input."""
    profile = evaluation.memory[use.logical_id]
    if not len(profile.op) or int(profile.held_bytes.max()) != use.peak_bytes:
        return ""
    op = int(profile.op[int(np.argmax(profile.held_bytes))])
    return f"{graph.modules[op] or graph.names[op]} ({doing(graph, op)})"


def _shortened(place: str, most: int) -> str:
    """Return the end of `place`, which says more than its beginning, where all is too long."""
    return place if len(place) <= most else "..." + place[3 - most :]


def _outline(start: FloatArray, above: FloatArray, end: float, base: float) -> str:
    """Return a stepped area as a path: from each `start` (a share of the width) `above` pixels.

    Of the steps within half a pixel only the highest is drawn, and none to the same height, so
    that a path has an end.
    """
    column = np.rint(start * WIDTH * STEPS_PER_PIXEL).astype(np.int64)
    first = np.flatnonzero(np.diff(column, prepend=-1))
    level = np.rint(10 * (base - np.maximum.reduceat(above, first))).astype(np.int64)
    changes = np.flatnonzero(np.diff(level, prepend=-1))
    x = (LEFT + column[first[changes]] / STEPS_PER_PIXEL).tolist()
    y = (level[changes] / 10).tolist()
    steps = "".join(f"H{a:.1f}V{b:.1f}" for a, b in zip(x, y, strict=True))
    return f"M{x[0]:.1f} {base:.1f}{steps}H{LEFT + WIDTH * end:.1f}V{base:.1f}z"


def _draw_time_axis(drawing: Drawing, latency_s: float, y: float) -> None:
    unit = time_unit(latency_s)
    for tick in ticks(latency_s / unit.size, 6):
        x = LEFT + WIDTH * tick * unit.size / (latency_s or 1.0)
        drawing.path(f"M{x:.1f} {y:.1f}v5", stroke=GREY)
        drawing.text(x, y + 18, f"{tick:g}", size=11, anchor="middle", fill=GREY)
    label = f"time in {unit.name}"
    drawing.text(LEFT + WIDTH - text_width(label, 12) / 2, y + 38, label, anchor="middle")

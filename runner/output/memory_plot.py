"""`memory.svg`: what each device holds over the time of one run, kind by kind, and its capacity."""

from typing import NamedTuple

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.cost.evaluation import DeviceUse, Evaluation
from fxpart.cost.peak_tensors import doing, memory_by_kind
from fxpart.cost.storage_kinds import KINDS
from runner.output.plot import Panel, Scale, axis_across, axis_up
from runner.output.svg import LIGHT, Drawing, text_width
from runner.output.units import Unit, size_unit, time_unit

__all__ = ["memory_svg"]

LEFT, RIGHT, TOP, BOTTOM, WIDTH, GAP = 84.0, 20.0, 84.0, 52.0, 820.0, 30.0
"""Margins of the panels, their width and what is between them, in pixels."""
ZOOM_BELOW = 0.2
"""When no device fills this much of its memory, the axes end at the fullest one instead."""
STEPS_PER_PIXEL = 2
LAYERS = (
    ("weights", ("weight",), LIGHT.series[0]),
    ("optimizer state", ("optimizer state",), LIGHT.series[4]),
    ("gradients", ("gradient",), LIGHT.series[1]),
    ("saved activations", ("saved activation",), LIGHT.series[2]),
    ("other tensors", ("input", "received", "output", "temporary"), LIGHT.series[3]),
)
"""What is drawn on top of each other, from below: its name, its kinds, its colour."""
RESIDENT = 2
"""The first of the layers stay the same over the run."""


class _DevicePanel(NamedTuple):
    """One device, and where it is drawn."""

    use: DeviceUse
    tops: IntArray
    """Bytes up to the top of each of `LAYERS` while each of its operators runs."""
    peak_at: str
    """What runs at its peak, where that is in the drawing."""
    panel: Panel
    """Bytes over seconds, both in the units of the axes."""
    unit: Unit

    def y_of(self, size_bytes: float) -> float:
        return self.panel.y_of(size_bytes / self.unit.size)

    def text(self, size_bytes: float) -> str:
        return self.unit.show(size_bytes)


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
    times = time_unit(evaluation.latency_s)
    across = Scale(0.0, evaluation.latency_s / times.size or 1.0)
    title = f"Memory held over one run, in {unit.name}"
    drawing = Drawing(title)
    drawing.text(LEFT, 28, title, size=17, bold=True)
    kinds = memory_by_kind(graph, assignment, len(evaluation.devices))
    layers = {use.logical_id: _layers(kinds[use.logical_id], use) for use in used}
    _draw_legend(drawing, list(layers.values()), zoomed)
    y = TOP
    for use, own_top in zip(used, tops, strict=True):
        top = most if zoomed else own_top
        panel = Panel(LEFT, y, WIDTH, height, across, Scale(0.0, 1.1 * top / unit.size))
        peak_at = _peak_at(graph, evaluation, use)
        device = _DevicePanel(use, layers[use.logical_id], peak_at, panel, unit)
        _draw_panel(drawing, evaluation, device)
        y += height + GAP
    bottom = y - GAP
    below = Panel(LEFT, bottom, WIDTH, 5.0, across, Scale(0.0, 1.0))
    axis_across(drawing, below, ticks=() if evaluation.latency_s else (0.0,))
    drawing.text(LEFT + WIDTH, bottom + 38, f"time in {times.name}", anchor="end")
    return drawing.svg(LEFT + WIDTH + RIGHT, bottom + BOTTOM)


def _layers(kinds: IntArray, use: DeviceUse) -> IntArray:
    """Return the top of each of `LAYERS` in bytes, one more column at the end for what stays."""
    rows = [kinds[[KINDS.index(kind) for kind in members]].sum(axis=0) for _, members, _ in LAYERS]
    resident = [use.weight_bytes, use.state_bytes, 0, 0, 0]
    return np.cumsum(np.column_stack([np.array(rows), resident]), axis=0)


def _draw_legend(drawing: Drawing, layers: list[IntArray], zoomed: bool) -> None:
    amounts = np.diff(np.concatenate(layers, axis=1), axis=0, prepend=0)
    x = LEFT
    for (label, _, colour), amount in zip(LAYERS, amounts, strict=True):
        if amount.any():
            drawing.rect(x, 41, 14, 12, fill=colour)
            drawing.text(x + 20, 52, label)
            x += 36 + text_width(label, 12)
    drawing.path(f"M{x:.0f} 47h22", stroke=LIGHT.warn, width=2, dashes="6 3")
    words = "capacity (axes are cut: it is far above)" if zoomed else "capacity"
    drawing.text(x + 28, 52, words)


def _draw_panel(drawing: Drawing, evaluation: Evaluation, device: _DevicePanel) -> None:
    """Draw one device: grid, areas from the highest to the lowest, capacity, peak, words."""
    use, panel = device.use, device.panel
    drawing.rect(panel.x, panel.y, panel.width, panel.height, fill=LIGHT.back)
    axis_up(drawing, panel, 3 if panel.height > 80 else 2)
    _draw_areas(drawing, evaluation, device)
    _draw_capacity(drawing, device)
    waits = not len(evaluation.memory[use.logical_id].op)
    over = use.peak_bytes > use.memory_bytes
    words = f"peak {device.text(use.peak_bytes)} of {device.text(use.total_bytes)}"
    words += f" {device.unit.name}"
    words += f", {device.text(use.reserved_bytes)} reserved" if use.reserved_bytes else ""
    words += ", does not fit" if over else ", waits for its turn" if waits else ""
    name = f"device {use.logical_id}: {use.name}"
    drawing.text(panel.x, panel.y - 6, name, bold=True)
    room = int((panel.width - text_width(name, 12)) / text_width("m", 12)) - len(words) - 8
    words += f", at {_shortened(device.peak_at, room)}" if device.peak_at else ""
    fill = LIGHT.warn if over else LIGHT.ink
    drawing.text(panel.right, panel.y - 6, words, anchor="end", fill=fill)


def _draw_areas(drawing: Drawing, evaluation: Evaluation, device: _DevicePanel) -> None:
    """Draw what is held, the highest first, so that each covers all above it but itself."""
    panel, profile = device.panel, evaluation.memory[device.use.logical_id]
    span_s = evaluation.latency_s or 1.0
    amounts = np.diff(device.tops, axis=0, prepend=0)
    for index in reversed(range(len(LAYERS))):
        label, _, colour = LAYERS[index]
        if not amounts[index].any():
            continue
        if index < RESIDENT:
            top = device.y_of(float(device.tops[index, -1]))
            tip = f"{label} {device.text(int(amounts[index, -1]))} {device.unit.name}"
            drawing.rect(panel.x, top, panel.width, panel.base - top, fill=colour, tip=tip)
        elif len(profile.op):
            px_per_byte = panel.height / (panel.up.high * device.unit.size)
            heights = device.tops[index, :-1].astype(np.float64) * px_per_byte
            end_s = float(evaluation.op_finish_s[profile.op[-1]])
            outline = _outline(profile.start_s / span_s, heights, end_s / span_s, panel.base)
            drawing.path(outline, fill=colour)
    if device.peak_at:
        start_s = float(profile.start_s[int(np.argmax(profile.held_bytes))])
        x, y = panel.x + panel.width * start_s / span_s, device.y_of(device.use.peak_bytes)
        tip = f"the peak, at {device.peak_at}"
        drawing.path(f"M{x:.1f} {y:.1f}l-4 -7h8z", fill=LIGHT.ink, tip=tip)


def _draw_capacity(drawing: Drawing, device: _DevicePanel) -> None:
    use, panel = device.use, device.panel
    usable = max(device.y_of(use.memory_bytes), panel.y)
    whole = max(device.y_of(use.total_bytes), panel.y)
    if use.reserved_bytes:
        tip = f"reserved {device.text(use.reserved_bytes)} {device.unit.name}"
        size = panel.width, usable - whole
        drawing.rect(panel.x, whole, *size, fill=LIGHT.muted, opacity=0.3, tip=tip)
    line = f"M{panel.x:.0f} {usable:.1f}h{panel.width:.0f}"
    drawing.path(line, stroke=LIGHT.warn, width=2, dashes="6 3")


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

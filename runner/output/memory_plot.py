"""`memory.svg`: the memory of each device by kind, at its peak and over the time of one run."""

from typing import NamedTuple

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.cost.evaluation import DeviceUse, Evaluation
from fxpart.cost.peak_tensors import doing, memory_by_kind
from fxpart.cost.storage_kinds import KINDS
from runner.output.plot import TEXT, Panel, Scale, axis_across, axis_up
from runner.output.svg import LIGHT, Drawing, text_width
from runner.output.units import Unit, size_unit, time_unit

__all__ = ["memory_svg"]

LEFT, RIGHT, TOP, BOTTOM, WIDTH, GAP = 60.0, 20.0, 104.0, 52.0, 820.0, 30.0
"""Margins of the panels, their width and the gap between them, in pixels."""
BAR, BETWEEN = 96.0, 84.0
"""Width of the bar of a whole device, and its distance to the panel over time."""
STEPS_PER_PIXEL = 2
LAYERS = (
    ("weights", ("weight",), LIGHT.series[0]),
    ("optimizer state", ("optimizer state",), LIGHT.series[4]),
    ("kv cache", ("kv cache",), LIGHT.series[4]),  # no step has both
    ("gradients", ("gradient",), LIGHT.series[1]),
    ("saved activations", ("saved activation",), LIGHT.series[2]),
    (
        "other tensors",
        ("input", "received", "output", "gathered weight", "temporary"),
        LIGHT.series[3],
    ),
)
"""The stacked layers from bottom to top: name, kinds, colour."""
RESIDENT = 3
"""Number of layers at the bottom that stay the same over the run."""


class _DevicePanel(NamedTuple):
    """One device and its panels."""

    use: DeviceUse
    tops: IntArray
    """Cumulative bytes of `LAYERS` while each of the device's operators runs."""
    peak_at: str
    """What runs at the peak, if it is in the drawing."""
    whole: Panel
    """The bar of the whole device, in `unit`."""
    alive: Panel
    """Tensors other than weights and their state over time, in `alive_unit`."""
    unit: Unit
    alive_unit: Unit

    @property
    def resident_bytes(self) -> int:
        """Bytes that stay constant over the run."""
        return _resident_bytes(self.use)

    def text(self, size_bytes: float) -> str:
        return self.unit.show(size_bytes)


def memory_svg(
    graph: OpGraph, assignment: Assignment, evaluation: Evaluation, subject: str = ""
) -> str:
    """Return a row for each computing device, with its memory at the peak and over time.

    The bar on the left is the whole device: weights, other tensors at the peak, and free memory. To
    its right, tensors other than weights and their state are drawn over the time of the first
    input, on a separate scale shared by all devices: next to the weights they may be too small to
    see. They are known only while the device's own operators run. `subject` is the first line.
    """
    used = [use for use in evaluation.devices if use.operators]
    kinds = memory_by_kind(graph, assignment, len(evaluation.devices))
    layers = {use.logical_id: _layers(kinds[use.logical_id], use) for use in used}
    tops = [max(1, use.peak_bytes, use.total_bytes) for use in used]
    beside = [use.peak_bytes - _resident_bytes(use) for use in used]
    unit, most_beside = size_unit(max(tops)), max(1, *beside)
    alive_unit = size_unit(most_beside)
    height = 110.0 if len(used) <= 12 else 56.0
    times = time_unit(evaluation.latency_s)
    across = Scale(0.0, evaluation.latency_s / times.size or 1.0)
    title = "Memory held over one run"
    drawing = Drawing(title, subject=subject)
    drawing.text(LEFT, 28, title, size=17, bold=True)
    _draw_legend(drawing, list(layers.values()))
    left = LEFT + BAR + BETWEEN
    drawing.text(LEFT, TOP - 26, f"the device, {unit.name}", size=TEXT, fill=LIGHT.muted)
    heading = f"beside {_what_stays(used)}, over time, {alive_unit.name}"
    drawing.text(left, TOP - 26, heading, size=TEXT, fill=LIGHT.muted)
    y = TOP
    for use, top in zip(used, tops, strict=True):
        device = _DevicePanel(
            use,
            layers[use.logical_id],
            _peak_at(graph, evaluation, use),
            Panel(LEFT, y, BAR, height, Scale(0.0, 1.0), Scale(0.0, 1.1 * top / unit.size)),
            Panel(left, y, WIDTH, height, across, Scale(0.0, 1.1 * most_beside / alive_unit.size)),
            unit,
            alive_unit,
        )
        _draw_device(drawing, evaluation, device)
        y += height + GAP
    bottom = y - GAP
    below = Panel(left, bottom, WIDTH, 5.0, across, Scale(0.0, 1.0))
    axis_across(drawing, below, ticks=() if evaluation.latency_s else (0.0,))
    drawing.text(left + WIDTH, bottom + 38, f"time in {times.name}", anchor="end")
    return drawing.svg(left + WIDTH + RIGHT, bottom + BOTTOM)


def _what_stays(used: list[DeviceUse]) -> str:
    has_cache = any(use.cache_bytes for use in used)
    return "weights and caches" if has_cache else "weights and their state"


def _resident_bytes(use: DeviceUse) -> int:
    return use.weight_bytes + use.state_bytes + use.cache_bytes


def _layers(kinds: IntArray, use: DeviceUse) -> IntArray:
    """Return the cumulative bytes of `LAYERS`, with a last column for the resident bytes only."""
    rows = [kinds[[KINDS.index(kind) for kind in members]].sum(axis=0) for _, members, _ in LAYERS]
    resident = [use.weight_bytes, use.state_bytes, use.cache_bytes, 0, 0, 0]
    return np.cumsum(np.column_stack([np.array(rows), resident]), axis=0)


def _draw_legend(drawing: Drawing, layers: list[IntArray]) -> None:
    amounts = np.diff(np.concatenate(layers, axis=1), axis=0, prepend=0)
    x = LEFT
    for (label, _, colour), amount in zip(LAYERS, amounts, strict=True):
        if amount.any():
            drawing.rect(x, 41, 14, 12, fill=colour)
            drawing.text(x + 20, 52, label)
            x += 36 + text_width(label, 12)
    drawing.path(f"M{x:.0f} 47h22", stroke=LIGHT.warn, width=2, dashes="6 3")
    drawing.text(x + 28, 52, "capacity")


def _draw_device(drawing: Drawing, evaluation: Evaluation, device: _DevicePanel) -> None:
    """Draw one device: its bar, live tensors over time, its peak, and labels."""
    use = device.use
    for panel in (device.whole, device.alive):
        drawing.rect(panel.x, panel.y, panel.width, panel.height, fill=LIGHT.back)
        axis_up(drawing, panel, 3 if panel.height > 80 else 2)
    _draw_bar(drawing, device)
    _draw_alive(drawing, evaluation, device)
    waits = not len(evaluation.memory[use.logical_id].op)
    over = use.peak_bytes > use.memory_bytes
    label = f"peak {device.text(use.peak_bytes)} of {device.text(use.total_bytes)}"
    label += f" {device.unit.name}"
    label += f", {device.text(use.reserved_bytes)} reserved" if use.reserved_bytes else ""
    label += ", does not fit" if over else ", waits for its turn" if waits else ""
    name = f"device {use.logical_id}: {use.name}"
    left, right = device.whole.x, device.alive.right
    drawing.text(left, device.whole.y - 6, name, bold=True)
    wide = right - left - text_width(name, 12)
    max_chars = int(wide / text_width("m", 12)) - len(label) - 8
    label += f", at {_shortened(device.peak_at, max_chars)}" if device.peak_at else ""
    fill = LIGHT.warn if over else LIGHT.ink
    drawing.text(right, device.whole.y - 6, label, anchor="end", fill=fill)


def _draw_bar(drawing: Drawing, device: _DevicePanel) -> None:
    """Draw the device's memory at its peak, by kind, and its capacity."""
    use, panel, tops = device.use, device.whole, device.tops
    # The peak of its first input; for later inputs only resident bytes are known.
    at_peak = int(np.argmax(tops[-1])) if tops.shape[1] > 1 else tops.shape[1] - 1
    base = panel.base
    for (label, _, colour), below, top in zip(
        LAYERS, [0, *tops[:-1, at_peak].tolist()], tops[:, at_peak].tolist(), strict=True
    ):
        if top == below:
            continue
        y = panel.y_of(top / device.unit.size)
        tip = f"{label} {device.text(top - below)} {device.unit.name}"
        drawing.rect(panel.x, y, panel.width, base - y, fill=colour, tip=tip)
        base = y
    usable = panel.y_of(use.memory_bytes / device.unit.size)
    if use.reserved_bytes:
        whole = panel.y_of(use.total_bytes / device.unit.size)
        tip = f"reserved {device.text(use.reserved_bytes)} {device.unit.name}"
        size = panel.width, usable - whole
        drawing.rect(panel.x, whole, *size, fill=LIGHT.muted, opacity=0.3, tip=tip)
    line = f"M{panel.x:.0f} {usable:.1f}h{panel.width:.0f}"
    drawing.path(line, stroke=LIGHT.warn, width=2, dashes="6 3")


def _draw_alive(drawing: Drawing, evaluation: Evaluation, device: _DevicePanel) -> None:
    """Draw the changing layers, the top one first, so that lower ones cover it."""
    panel, profile = device.alive, evaluation.memory[device.use.logical_id]
    if not len(profile.op):
        return
    span_s, unit_bytes = evaluation.latency_s or 1.0, device.alive_unit.size
    amounts = np.diff(device.tops, axis=0, prepend=0)
    px_per_byte = panel.height / (panel.up.high * unit_bytes)
    end_s = float(evaluation.op_finish_s[profile.op[-1]])
    for index in reversed(range(RESIDENT, len(LAYERS))):
        if amounts[index].any():
            alive = device.tops[index, :-1] - device.resident_bytes
            heights = np.maximum(alive, 0).astype(np.float64) * px_per_byte
            outline = _outline(panel, profile.start_s / span_s, heights, end_s / span_s)
            drawing.path(outline, fill=LAYERS[index][2])
    if device.peak_at:
        start_s = float(profile.start_s[int(np.argmax(profile.held_bytes))])
        x = panel.x + panel.width * start_s / span_s
        y = panel.y_of((device.use.peak_bytes - device.resident_bytes) / unit_bytes)
        tip = f"the peak, at {device.peak_at}"
        drawing.path(f"M{x:.1f} {y:.1f}l-4 -7h8z", fill=LIGHT.ink, tip=tip)


def _peak_at(graph: OpGraph, evaluation: Evaluation, use: DeviceUse) -> str:
    """Return what runs at the peak of a device; empty if that is during a later input."""
    profile = evaluation.memory[use.logical_id]
    if not len(profile.op) or int(profile.held_bytes.max()) != use.peak_bytes:
        return ""
    op = int(profile.op[int(np.argmax(profile.held_bytes))])
    return f"{graph.modules[op] or graph.names[op]} ({doing(graph, op)})"


def _shortened(place: str, width: int) -> str:
    """Return `place`, shortened to its more informative end if too long."""
    return place if len(place) <= width else "..." + place[3 - width :]


def _outline(panel: Panel, start: FloatArray, above: FloatArray, end: float) -> str:
    """Return a stepped area as a path: `above` pixels from each `start`, a share of the width.

    To bound the length of the path, only the highest step within half a pixel is drawn, and steps
    to the same height are skipped.
    """
    column = np.rint(start * panel.width * STEPS_PER_PIXEL).astype(np.int64)
    first = np.flatnonzero(np.diff(column, prepend=-1))
    level = np.rint(10 * (panel.base - np.maximum.reduceat(above, first))).astype(np.int64)
    changes = np.flatnonzero(np.diff(level, prepend=-1))
    x = (panel.x + column[first[changes]] / STEPS_PER_PIXEL).tolist()
    y = (level[changes] / 10).tolist()
    steps = "".join(f"H{a:.1f}V{b:.1f}" for a, b in zip(x, y, strict=True))
    base, right = panel.base, panel.x + panel.width * end
    return f"M{x[0]:.1f} {base:.1f}{steps}H{right:.1f}V{base:.1f}z"

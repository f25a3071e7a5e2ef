"""`partition_graph.svg`: the partitions in lanes by device, and the bytes sent between them.

A few partitions are labelled boxes with labelled arrows. Many are drawn over the time at which
their devices compute them, with the bytes sent summed by pair of devices.
"""

from typing import NamedTuple

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.cost.evaluation import Evaluation
from runner.output.partition_summary import (
    Edge,
    PartitionSummary,
    columns,
    device_matrix,
    summarise,
    title_of,
)
from runner.output.plot import Panel, Scale, axis_across, cut_text
from runner.output.svg import HEAD, LIGHT, Drawing, colour_of, text_width
from runner.output.terminal import counted
from runner.output.units import format_ids, format_s, format_size, size_unit, time_unit

__all__ = ["partition_graph_svg", "suits_boxes"]

MOST_PARTITIONS, MOST_COLUMNS = 40, 8
"""Most partitions that are readable one by one, and most columns that fit side by side."""
BOX_WIDTH, BOX_HEIGHT, LANE = 126.0, 80.0, 118.0
LEAST_GAP, WIDEST_GAP, SCREEN = 30.0, 78.0, 1420.0
"""Gaps between boxes, chosen so that the figure is as wide as a screen."""
LEFT, TOP, LABEL, LEGEND = 20.0, 84.0, 130.0, 880.0
ARROW = LIGHT.muted
Point = tuple[float, float]


def partition_graph_svg(
    graph: OpGraph, assignment: Assignment, evaluation: Evaluation, subject: str = ""
) -> str:
    """Return a figure of the partitions with labels and arrows, or of many over time.

    `subject` is the first line.
    """
    summary = summarise(graph, assignment, evaluation)
    if suits_boxes(summary):
        return _labelled_svg(summary, assignment, evaluation, subject)
    return _overview_svg(summary, assignment, evaluation, subject)


def suits_boxes(summary: PartitionSummary) -> bool:
    """Return whether there are few enough partitions for labelled boxes."""
    few = len(summary.device) <= MOST_PARTITIONS
    return few and max(columns(summary)) < MOST_COLUMNS


def _labelled_svg(
    summary: PartitionSummary, assignment: Assignment, evaluation: Evaluation, subject: str
) -> str:
    """Return a figure of boxes with modules, weights and time, and arrows with bytes.

    A partition is to the right of all partitions that it reads from.
    """
    lanes = sorted(set(summary.device.tolist()))
    column = columns(summary)
    count = max(column) + 1
    gap = (SCREEN - 2 * LEFT - LABEL - count * BOX_WIDTH) / max(count - 1, 1)
    gap = min(max(gap, LEAST_GAP), WIDEST_GAP)
    width = LEFT + LABEL + count * (BOX_WIDTH + gap) - gap + 2 * LEFT
    corners = [
        (
            LEFT + LABEL + c * (BOX_WIDTH + gap),
            TOP + lanes.index(d) * LANE + (LANE - BOX_HEIGHT) / 2,
        )
        for c, d in zip(column, summary.device.tolist(), strict=True)
    ]
    title = title_of(summary, evaluation)
    width = max(width, LEFT * 2 + text_width(title, 17), LEGEND)
    drawing = Drawing(title, subject=subject)
    drawing.text(LEFT, 28, title, size=17, bold=True)
    _draw_legend(drawing)
    for row, device in enumerate(lanes):
        use = evaluation.devices[device]
        y = TOP + row * LANE
        drawing.rect(LEFT, y + 2, width - 2 * LEFT, LANE - 4, fill=colour_of(device), opacity=0.07)
        drawing.text(LEFT + 10, y + LANE / 2 - 12, f"device {device}", size=13, bold=True)
        drawing.text(LEFT + 10, y + LANE / 2 + 6, use.name)
        drawing.text(LEFT + 10, y + LANE / 2 + 24, f"busy {format_s(use.load_s)}", fill=LIGHT.muted)
    _draw_edges(drawing, summary, corners, gap)
    for partition, corner in enumerate(corners):
        _draw_box(drawing, summary, assignment, partition, corner)
    return drawing.svg(width, TOP + len(lanes) * LANE + LEFT, (ARROW,))


def _draw_legend(drawing: Drawing) -> None:
    drawing.rect(LEFT, 42, 18, 13, fill=colour_of(0), opacity=0.25, stroke=colour_of(0), radius=3)
    drawing.text(LEFT + 26, 53, "partition: modules, operators, weights, computing time")
    x = LEFT + 430
    _draw_arrow(drawing, f"M{x:.0f} 49h22", 2.5, is_sent=True)
    drawing.text(x + 38, 53, "sent between devices, wider is more")
    _draw_arrow(drawing, f"M{x + 310:.0f} 49h22", 1.5, is_sent=False)
    drawing.text(x + 348, 53, "needs no sending")


def _draw_arrow(
    drawing: Drawing, commands: str, width: float, *, is_sent: bool, tip: str = ""
) -> None:
    opacity = 1.0 if is_sent else 0.5
    drawing.path(commands, stroke=ARROW, width=width, opacity=opacity, arrow=True, tip=tip)


def _draw_box(
    drawing: Drawing,
    summary: PartitionSummary,
    assignment: Assignment,
    partition: int,
    corner: Point,
) -> None:
    x, y = corner
    colour = colour_of(int(summary.device[partition]))
    replicas = assignment.devices_of_partition[partition][1:]
    copies = f"also held by {format_ids(replicas)}" if replicas else ""
    drawing.rect(x, y, BOX_WIDTH, BOX_HEIGHT, fill=LIGHT.paper, radius=5)
    modules = summary.modules[partition]
    tip = f"partition {partition} on device {summary.device[partition]}: {', '.join(modules)}"
    tip += f", {copies}" if copies else ""
    drawing.rect(
        x, y, BOX_WIDTH, BOX_HEIGHT, fill=colour, opacity=0.2, stroke=colour, radius=5, tip=tip
    )
    name = f"P{partition}" + (f" (+ {format_ids(replicas)})" if replicas else "")
    suffix = f" +{len(modules) - 1}" if len(modules) > 1 else ""
    shown = cut_text(modules[0], BOX_WIDTH - 12 - text_width(suffix, 12), 12) + suffix
    drawing.text(x + 7, y + 19, shown, size=12, bold=True)
    operators = counted(int(summary.operators[partition]), "op")
    kind = "backward" if summary.is_backward[partition] else operators
    lines = (
        f"{name}, {kind}",
        format_size(int(summary.weight_bytes[partition])),
        format_s(float(summary.time_s[partition])),
    )
    for line, line_text in enumerate(lines):
        drawing.text(x + 7, y + 37 + 17 * line, line_text, size=11)


def _draw_edges(
    drawing: Drawing, summary: PartitionSummary, corners: list[Point], gap: float
) -> None:
    """Draw edges within devices first, then edges with transfers on top, then labels."""
    ends = _ends(summary, corners)
    most_bytes = max((edge.sent_bytes for edge in summary.edges), default=0)
    labels: list[tuple[Edge, Point, Point]] = []
    for edge in sorted(summary.edges, key=lambda edge: edge.sent_bytes):
        a, b = ends[edge]
        bend = _bend(a, b, gap)
        curve = (
            f"M{a[0]:.1f} {a[1]:.1f}C{a[0] + bend:.1f} {a[1]:.1f}"
            f" {b[0] - bend:.1f} {b[1]:.1f} {b[0]:.1f} {b[1]:.1f}"
        )
        width = 1.2 + 3.3 * edge.sent_bytes / most_bytes if edge.sent_bytes else 1.2
        tip = f"P{edge.source} to P{edge.target}: {format_size(edge.sent_bytes)} sent"
        _draw_arrow(drawing, curve, width, is_sent=edge.sent_bytes > 0, tip=tip)
        if edge.sent_bytes:
            labels.append((edge, a, b))
    occupied = [(x, y, x + BOX_WIDTH, y + BOX_HEIGHT) for x, y in corners]
    for edge, a, b in reversed(labels):
        bends = a, (a[0] + _bend(a, b, gap), a[1]), (b[0] - _bend(a, b, gap), b[1]), b
        _draw_label(drawing, format_size(edge.sent_bytes), bends, occupied)


def _bend(a: Point, b: Point, gap: float) -> float:
    return max(gap * 0.55, (b[0] - a[0]) * 0.35)


def _ends(summary: PartitionSummary, corners: list[Point]) -> dict[Edge, tuple[Point, Point]]:
    """Return start and end of each arrow, spread over the sides of boxes in vertical order."""
    start: dict[Edge, Point] = {}
    end: dict[Edge, Point] = {}
    outgoing: list[list[Edge]] = [[] for _ in corners]
    incoming: list[list[Edge]] = [[] for _ in corners]
    for edge in summary.edges:
        outgoing[edge.source].append(edge)
        incoming[edge.target].append(edge)
    for partition, (x, y) in enumerate(corners):
        outward = sorted(outgoing[partition], key=lambda edge: corners[edge.target][1])
        inward = sorted(incoming[partition], key=lambda edge: corners[edge.source][1])
        for i, edge in enumerate(outward):
            start[edge] = (x + BOX_WIDTH, y + BOX_HEIGHT * (i + 1) / (len(outward) + 1))
        for i, edge in enumerate(inward):
            end[edge] = (x - HEAD, y + BOX_HEIGHT * (i + 1) / (len(inward) + 1))
    return {edge: (start[edge], end[edge]) for edge in summary.edges}


def _draw_label(
    drawing: Drawing,
    label: str,
    curve: tuple[Point, Point, Point, Point],
    occupied: list[tuple[float, float, float, float]],
) -> None:
    """Write a label on the arrow where there is room; otherwise only its tooltip has the text."""
    half = text_width(label, 11) / 2
    for t in (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8):
        x, y = (_bezier(t, *coordinates) for coordinates in zip(*curve, strict=True))
        box = (x - half, y - 8, x + half, y + 8)
        if not any(_overlap(box, other) for other in occupied):
            drawing.text(x, y + 4, label, size=11, anchor="middle", halo=True)
            occupied.append(box)
            return


def _bezier(t: float, p0: float, p1: float, p2: float, p3: float) -> float:
    u = 1 - t
    return u**3 * p0 + 3 * u * u * t * p1 + 3 * u * t * t * p2 + t**3 * p3


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


# Many partitions.

OVERVIEW_TOP, OVERVIEW_LABEL, LANES_WIDTH = 112.0, 190.0, 760.0
MOST_NUMBERED = 12
"""Most devices for which the bytes between pairs are written out."""
MOST_TIPS = 4000
"""Most boxes with tooltips; with more, these would be most of the file."""
JOINED, THINNEST = 0.5, 0.4
"""Largest gap that is closed, and least width of a box, in pixels."""


class _Stretch(NamedTuple):
    """An interval in which a device computes a partition without a visible gap."""

    partition: int
    device: int
    begin_s: float
    end_s: float


def _overview_svg(
    summary: PartitionSummary, assignment: Assignment, evaluation: Evaluation, subject: str
) -> str:
    """Return a figure of partitions over time by device, and a matrix of bytes between devices."""
    lanes = sorted(set(summary.device.tolist()))
    height = 34.0 if len(lanes) <= MOST_NUMBERED else 18.0
    title = title_of(summary, evaluation)
    drawing = Drawing(title, subject=subject)
    drawing.text(LEFT, 28, title, size=17, bold=True)
    caption = "Each box is a partition while its device computes it; neighbours differ in shade"
    drawing.text(LEFT, 53, caption)
    for row, device in enumerate(lanes):
        y = OVERVIEW_TOP + row * height
        lane_width = OVERVIEW_LABEL + LANES_WIDTH
        drawing.rect(LEFT, y + 1, lane_width, height - 2, fill=colour_of(device), opacity=0.07)
        use = evaluation.devices[device]
        share = use.load_s / evaluation.latency_s if evaluation.latency_s else 0.0
        size = 11 if height > 20 else 9
        drawing.text(LEFT + 8, y + height / 2 + 4, f"{device}: {use.name}", size=size)
        right = LEFT + OVERVIEW_LABEL - 8
        busy = f"{share:.0%}"
        drawing.text(right, y + height / 2 + 4, busy, size=size, anchor="end", fill=LIGHT.muted)
    busy_heading = LEFT + OVERVIEW_LABEL - 8, OVERVIEW_TOP - 8
    drawing.text(*busy_heading, "busy", size=11, anchor="end", fill=LIGHT.muted)
    _draw_stretches(drawing, summary, assignment, evaluation, height)
    width = _draw_matrix(drawing, device_matrix(summary), lanes, height)
    return drawing.svg(
        max(width, LEFT * 2 + text_width(title, 17)), OVERVIEW_TOP + len(lanes) * height + 44
    )


def _draw_stretches(
    drawing: Drawing,
    summary: PartitionSummary,
    assignment: Assignment,
    evaluation: Evaluation,
    height: float,
) -> None:
    """Draw the partitions of each device over time, and the axis below."""
    lanes = sorted(set(summary.device.tolist()))
    row_of = {device: row for row, device in enumerate(lanes)}
    times, x0 = time_unit(evaluation.latency_s), LEFT + OVERVIEW_LABEL
    px_per_s = LANES_WIDTH / (evaluation.latency_s or 1.0)
    stretches = _stretches(summary, assignment, evaluation, JOINED / px_per_s)
    turn = dict.fromkeys(lanes, 0)
    shown: dict[int, int] = {}
    for stretch in stretches:
        device, partition = stretch.device, stretch.partition
        if shown.get(device) != partition:
            shown[device], turn[device] = partition, turn[device] + 1
        begin, wide = stretch.begin_s * px_per_s, (stretch.end_s - stretch.begin_s) * px_per_s
        modules = ", ".join(summary.modules[partition])
        y = OVERVIEW_TOP + row_of[device] * height + 4
        drawing.rect(
            x0 + begin,
            y,
            max(wide, THINNEST),
            height - 8,
            fill=colour_of(device),
            opacity=0.9 if turn[device] % 2 else 0.55,
            tip=_partition_tip(summary, partition) if len(stretches) <= MOST_TIPS else "",
        )
        if wide > text_width(modules, 10) + 6 and height > 20:
            middle = x0 + begin + wide / 2
            drawing.text(middle, y + (height - 8) / 2 + 4, modules, size=10, anchor="middle")
    bottom = OVERVIEW_TOP + len(lanes) * height
    across = Scale(0.0, evaluation.latency_s / times.size or 1.0)
    panel = Panel(x0, bottom, LANES_WIDTH, 4.0, across, Scale(0.0, 1.0))
    axis_across(drawing, panel, ticks=() if evaluation.latency_s else (0.0,))
    drawing.text(x0 - 8, bottom + 20, f"time in {times.name}", size=11, anchor="end")


def _partition_tip(summary: PartitionSummary, partition: int) -> str:
    modules = ", ".join(summary.modules[partition])
    return (
        f"P{partition}: {modules}; {counted(int(summary.operators[partition]), 'operator')},"
        f" {format_size(int(summary.weight_bytes[partition]))},"
        f" {format_s(float(summary.time_s[partition]))}"
    )


def _stretches(
    summary: PartitionSummary, assignment: Assignment, evaluation: Evaluation, joined_s: float
) -> list[_Stretch]:
    """Return the stretches of all partitions, by start, joining those up to `joined_s` apart."""
    latest: dict[int, _Stretch] = {}
    stretches: list[_Stretch] = []
    partition_of, begins = assignment.partition_of, evaluation.op_start_s
    visited: set[int] = set()
    for op in np.argsort(begins, kind="stable").tolist():
        partition, begin_s = int(partition_of[op]), float(begins[op])
        end_s = float(evaluation.op_finish_s[op])
        if end_s <= begin_s and partition in visited:
            continue
        visited.add(partition)
        device = int(summary.device[partition])
        last = latest.get(device)
        if last and last.partition == partition and begin_s - last.end_s <= joined_s:
            latest[device] = last._replace(end_s=max(last.end_s, end_s))
            continue
        if last:
            stretches.append(last)
        latest[device] = _Stretch(partition, device, begin_s, end_s)
    return sorted([*stretches, *latest.values()], key=lambda s: (s.begin_s, s.device))


def _draw_matrix(
    drawing: Drawing, sent: dict[tuple[int, int], int], lanes: list[int], height: float
) -> float:
    """Draw a row of cells next to each lane; return the width of the whole drawing."""
    numbered = len(lanes) <= MOST_NUMBERED
    cell, size = (58.0, 12) if numbered else (18.0, 9)
    x0 = LEFT + OVERVIEW_LABEL + LANES_WIDTH + 30
    most_bytes = max(sent.values(), default=0)
    unit = size_unit(most_bytes)
    heading = (
        f"Sent by the lane's device, in {unit.name}, to device" if most_bytes else "Nothing is sent"
    )
    drawing.text(x0, OVERVIEW_TOP - 32, heading, bold=True)
    for i, target in enumerate(lanes):
        x, middle = x0 + i * cell, x0 + (i + 0.5) * cell
        name, y = str(target), OVERVIEW_TOP - 8
        drawing.text(middle, y, name, size=size, anchor="middle", fill=LIGHT.muted)
        drawing.rect(x + 1, OVERVIEW_TOP, cell - 2, len(lanes) * height, fill=LIGHT.back)
        for row, source in enumerate(lanes):
            size_bytes, y = sent.get((source, target), 0), OVERVIEW_TOP + row * height
            if not size_bytes:
                continue
            shade = round(0.1 + 0.4 * size_bytes / most_bytes, 2)
            tip = f"device {source} to {target}: {format_size(size_bytes)}"
            drawing.rect(x + 1, y + 1, cell - 2, height - 2, fill=ARROW, opacity=shade, tip=tip)
            if numbered:
                label = unit.show(size_bytes)
                drawing.text(middle, y + height / 2 + 4, label, size=11, anchor="middle")
    return x0 + max(len(lanes) * cell, text_width(heading, 12)) + LEFT

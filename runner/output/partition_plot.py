"""`partition_graph.svg`: the partitions in lanes by device, and what is sent between them.

A few partitions have a labelled box each, and labelled arrows; of many only boxes are drawn, and
what is sent is added up by pair of devices.
"""

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
from runner.output.svg import HEAD, LIGHT, Drawing, colour_of, text_width
from runner.output.terminal import counted
from runner.output.units import format_ids, format_s, format_size, size_unit

__all__ = ["partition_graph_svg", "suits_boxes"]

MOST_PARTITIONS, MOST_COLUMNS = 40, 12
"""More than these are no longer read one by one."""
BOX_WIDTH, BOX_HEIGHT, GAP, LANE = 120.0, 80.0, 78.0, 118.0
LEFT, TOP, LABEL, LEGEND = 20.0, 84.0, 170.0, 880.0
ARROW = LIGHT.muted
Point = tuple[float, float]


def partition_graph_svg(graph: OpGraph, assignment: Assignment, evaluation: Evaluation) -> str:
    """Return the partitions with labels and arrows, or without where they are many."""
    summary = summarise(graph, assignment, evaluation)
    if suits_boxes(summary):
        return _labelled_svg(summary, assignment, evaluation)
    return _overview_svg(summary, evaluation)


def suits_boxes(summary: PartitionSummary) -> bool:
    """Return whether the partitions are few enough for a labelled box each."""
    few = len(summary.device) <= MOST_PARTITIONS
    return few and max(columns(summary)) < MOST_COLUMNS


def _labelled_svg(summary: PartitionSummary, assignment: Assignment, evaluation: Evaluation) -> str:
    """Return boxes with operators, weights and time; arrows with the bytes that they carry.

    A partition stands to the right of all that it reads from.
    """
    lanes = sorted(set(summary.device.tolist()))
    column = columns(summary)
    width = LEFT + LABEL + (max(column) + 1) * (BOX_WIDTH + GAP)
    corners = [
        (
            LEFT + LABEL + c * (BOX_WIDTH + GAP),
            TOP + lanes.index(d) * LANE + (LANE - BOX_HEIGHT) / 2,
        )
        for c, d in zip(column, summary.device.tolist(), strict=True)
    ]
    title = title_of(summary, evaluation)
    width = max(width, LEFT * 2 + text_width(title, 17), LEGEND)
    drawing = Drawing(title)
    drawing.text(LEFT, 28, title, size=17, bold=True)
    _draw_legend(drawing)
    for row, device in enumerate(lanes):
        use = evaluation.devices[device]
        y = TOP + row * LANE
        drawing.rect(LEFT, y + 2, width - 2 * LEFT, LANE - 4, fill=colour_of(device), opacity=0.07)
        drawing.text(LEFT + 10, y + LANE / 2 - 12, f"device {device}", size=13, bold=True)
        drawing.text(LEFT + 10, y + LANE / 2 + 6, use.name)
        drawing.text(LEFT + 10, y + LANE / 2 + 24, f"busy {format_s(use.load_s)}", fill=LIGHT.muted)
    _draw_edges(drawing, summary, corners)
    for partition, corner in enumerate(corners):
        _draw_box(drawing, summary, assignment, partition, corner)
    return drawing.svg(width, TOP + len(lanes) * LANE + LEFT, (ARROW,))


def _draw_legend(drawing: Drawing) -> None:
    drawing.rect(LEFT, 42, 18, 13, fill=colour_of(0), opacity=0.25, stroke=colour_of(0), radius=3)
    drawing.text(LEFT + 26, 53, "partition: operators, weights, computing time")
    x = LEFT + 370
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
    tip = f"partition {partition} on device {summary.device[partition]}"
    tip += f", {copies}" if copies else ""
    drawing.rect(
        x, y, BOX_WIDTH, BOX_HEIGHT, fill=colour, opacity=0.2, stroke=colour, radius=5, tip=tip
    )
    name = f"P{partition}" + (f" (+ {format_ids(replicas)})" if replicas else "")
    drawing.text(x + 9, y + 19, name, size=13, bold=True)
    lines = (
        counted(int(summary.operators[partition]), "operator"),
        format_size(int(summary.weight_bytes[partition])),
        format_s(float(summary.time_s[partition])),
    )
    for line, words in enumerate(lines):
        drawing.text(x + 9, y + 37 + 17 * line, words)


def _draw_edges(drawing: Drawing, summary: PartitionSummary, corners: list[Point]) -> None:
    """Draw what stays first, so that what is sent lies over it, and labels over both."""
    ends = _ends(summary, corners)
    most = max((edge.sent_bytes for edge in summary.edges), default=0)
    labels: list[tuple[Edge, Point, Point]] = []
    for edge in sorted(summary.edges, key=lambda edge: edge.sent_bytes):
        a, b = ends[edge]
        bend = max(GAP * 0.55, (b[0] - a[0]) * 0.35)
        curve = (
            f"M{a[0]:.1f} {a[1]:.1f}C{a[0] + bend:.1f} {a[1]:.1f}"
            f" {b[0] - bend:.1f} {b[1]:.1f} {b[0]:.1f} {b[1]:.1f}"
        )
        width = 1.2 + 3.3 * edge.sent_bytes / most if edge.sent_bytes else 1.2
        tip = f"P{edge.source} to P{edge.target}: {format_size(edge.sent_bytes)} sent"
        _draw_arrow(drawing, curve, width, is_sent=edge.sent_bytes > 0, tip=tip)
        if edge.sent_bytes:
            labels.append((edge, a, b))
    taken = [(x, y, x + BOX_WIDTH, y + BOX_HEIGHT) for x, y in corners]
    for edge, a, b in reversed(labels):
        _draw_label(drawing, format_size(edge.sent_bytes), a, b, taken)


def _ends(summary: PartitionSummary, corners: list[Point]) -> dict[Edge, tuple[Point, Point]]:
    """Return start and end of each arrow, spread over the sides of the boxes in order of height."""
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
    words: str,
    a: Point,
    b: Point,
    taken: list[tuple[float, float, float, float]],
) -> None:
    """Write on the arrow where there is room; without any only its tip has the words."""
    half = text_width(words, 11) / 2
    bend = max(GAP * 0.55, (b[0] - a[0]) * 0.35)
    for t in (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8):
        x = _bezier(t, a[0], a[0] + bend, b[0] - bend, b[0])
        y = _bezier(t, a[1], a[1], b[1], b[1])
        box = (x - half, y - 8, x + half, y + 8)
        if not any(_overlap(box, other) for other in taken):
            drawing.text(x, y + 4, words, size=11, anchor="middle", halo=True)
            taken.append(box)
            return


def _bezier(t: float, p0: float, p1: float, p2: float, p3: float) -> float:
    u = 1 - t
    return u**3 * p0 + 3 * u * u * t * p1 + 3 * u * t * t * p2 + t**3 * p3


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


# Many partitions.

OVERVIEW_TOP, OVERVIEW_LABEL, LANES_WIDTH = 112.0, 190.0, 760.0
MOST_NUMBERED = 12
"""Up to so many devices, the bytes between two are written out."""


def _overview_svg(summary: PartitionSummary, evaluation: Evaluation) -> str:
    """Return a lane of boxes for each device and, beside it, how much it sends to each other."""
    lanes = sorted(set(summary.device.tolist()))
    height = 34.0 if len(lanes) <= MOST_NUMBERED else 18.0
    title = title_of(summary, evaluation)
    drawing = Drawing(title)
    drawing.text(LEFT, 28, title, size=17, bold=True)
    words = (
        "Each box is a partition, right of all that it reads; the darker, the longer it computes"
    )
    drawing.text(LEFT, 53, words)
    for row, device in enumerate(lanes):
        y = OVERVIEW_TOP + row * height
        lane_width = OVERVIEW_LABEL + LANES_WIDTH
        drawing.rect(LEFT, y + 1, lane_width, height - 2, fill=colour_of(device), opacity=0.07)
        name = f"{device}: {evaluation.devices[device].name}"
        drawing.text(LEFT + 8, y + height / 2 + 4, name, size=12 if height > 20 else 10)
    _draw_boxes(drawing, summary, lanes, height)
    width = _draw_matrix(drawing, device_matrix(summary), lanes, height)
    return drawing.svg(
        max(width, LEFT * 2 + text_width(title, 17)), OVERVIEW_TOP + len(lanes) * height + 24
    )


def _draw_boxes(
    drawing: Drawing, summary: PartitionSummary, lanes: list[int], height: float
) -> None:
    column = columns(summary)
    step = min(LANES_WIDTH / (max(column) + 1), 24.0)
    longest = float(summary.time_s.max())
    row_of = {device: row for row, device in enumerate(lanes)}
    for partition, device in enumerate(summary.device.tolist()):
        time_s = float(summary.time_s[partition])
        drawing.rect(
            LEFT + OVERVIEW_LABEL + column[partition] * step,
            OVERVIEW_TOP + row_of[device] * height + 4,
            max(step * 0.85, 0.6),
            height - 8,
            fill=colour_of(device),
            opacity=round(0.3 + 0.7 * time_s / longest, 2) if longest > 0 else 1.0,
            tip=f"P{partition}: {summary.operators[partition]} operators,"
            f" {format_size(int(summary.weight_bytes[partition]))}, {format_s(time_s)}",
        )


def _draw_matrix(
    drawing: Drawing, sent: dict[tuple[int, int], int], lanes: list[int], height: float
) -> float:
    """Draw a row of cells beside each lane; return the width of the whole drawing."""
    numbered = len(lanes) <= MOST_NUMBERED
    cell, size = (58.0, 12) if numbered else (18.0, 9)
    x0 = LEFT + OVERVIEW_LABEL + LANES_WIDTH + 30
    most = max(sent.values(), default=0)
    unit = size_unit(most)
    heading = f"Sent by the lane's device, in {unit.name}, to device" if most else "Nothing is sent"
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
            shade = round(0.1 + 0.4 * size_bytes / most, 2)
            tip = f"device {source} to {target}: {format_size(size_bytes)}"
            drawing.rect(x + 1, y + 1, cell - 2, height - 2, fill=ARROW, opacity=shade, tip=tip)
            if numbered:
                words = unit.show(size_bytes)
                drawing.text(middle, y + height / 2 + 4, words, size=11, anchor="middle")
    return x0 + max(len(lanes) * cell, text_width(heading, 12)) + LEFT

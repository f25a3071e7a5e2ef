"""`partition_graph.svg` of many partitions: boxes in lanes, what is sent added up by device."""

from fxpart.cost.evaluation import Evaluation
from runner.partition_summary import PartitionSummary, columns, device_matrix, title_of
from runner.svg import GREY, Drawing, colour_of, text_width
from runner.units import format_s, format_size, size_unit

__all__ = ["partition_overview_svg"]

LEFT, TOP, LABEL, LANES_WIDTH = 20.0, 112.0, 190.0, 760.0
MOST_NUMBERED = 12
"""Up to so many devices, the bytes between two are written out."""


def partition_overview_svg(summary: PartitionSummary, evaluation: Evaluation) -> str:
    """Return a lane of boxes for each device and, beside it, how much it sends to each other."""
    lanes = sorted(set(summary.device.tolist()))
    height = 34.0 if len(lanes) <= MOST_NUMBERED else 18.0
    title = title_of(summary, evaluation)
    drawing = Drawing(title)
    drawing.text(LEFT, 28, title, size=17, bold=True)
    says = "Each box is a partition, right of all that it reads; the darker, the longer it computes"
    drawing.text(LEFT, 53, says)
    for row, device in enumerate(lanes):
        y = TOP + row * height
        fill = colour_of(device)
        drawing.rect(LEFT, y + 1, LABEL + LANES_WIDTH, height - 2, fill=fill, opacity=0.07)
        name = f"{device}: {evaluation.devices[device].name}"
        drawing.text(LEFT + 8, y + height / 2 + 4, name, size=12 if height > 20 else 10)
    _draw_boxes(drawing, summary, lanes, height)
    width = _draw_matrix(drawing, device_matrix(summary), lanes, height)
    return drawing.svg(max(width, LEFT * 2 + text_width(title, 17)), TOP + len(lanes) * height + 24)


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
            LEFT + LABEL + column[partition] * step,
            TOP + row_of[device] * height + 4,
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
    cell = 58.0 if numbered else 18.0
    x0 = LEFT + LABEL + LANES_WIDTH + 30
    most = max(sent.values(), default=0)
    unit = size_unit(most)
    heading = f"Sent by the lane's device, in {unit.name}, to device" if most else "Nothing is sent"
    drawing.text(x0, TOP - 32, heading, bold=True)
    for i, target in enumerate(lanes):
        x = x0 + i * cell
        drawing.text(
            x + cell / 2,
            TOP - 8,
            str(target),
            size=12 if numbered else 9,
            anchor="middle",
            fill=GREY,
        )
        drawing.rect(x + 1, TOP, cell - 2, len(lanes) * height, fill="#f6f6f6")
        for row, source in enumerate(lanes):
            size_bytes, y = sent.get((source, target), 0), TOP + row * height
            if not size_bytes:
                continue
            drawing.rect(
                x + 1,
                y + 1,
                cell - 2,
                height - 2,
                fill="#444444",
                opacity=round(0.1 + 0.4 * size_bytes / most, 2),
                tip=f"device {source} to {target}: {format_size(size_bytes)}",
            )
            if numbered:
                words = unit.show(size_bytes)
                drawing.text(x + cell / 2, y + height / 2 + 4, words, size=11, anchor="middle")
    return x0 + max(len(lanes) * cell, text_width(heading, 12)) + LEFT

"""`schedule.svg`: the timeline of stages and microbatches, with a row per device."""

from fxpart.schedule import ReplicaSum, ScheduleResult, StageEvent, StageUpdate
from runner.output.plot import Panel, Scale, axis_across
from runner.output.svg import LIGHT, Drawing, text_width
from runner.output.terminal import counted
from runner.output.units import format_ids, format_s, format_size, time_unit

__all__ = ["schedule_svg"]

WIDTH, LEFT, TOP, MARGIN = 1120.0, 214.0, 74.0, 24.0
ROW, GAP = 30.0, 10.0
LOW_ROW, LOW_GAP = 16.0, 4.0
MOST_HIGH = 24
"""Most devices with rows of full height; with more, rows are low so that all are visible."""
THINNEST = 0.5
"""Least width of a box in pixels."""
JOINED = 1.0
"""Width in pixels within which several forwards, or backwards, of a stage share a box."""
MOST_TIPS = 4000
"""Most boxes with tooltips; with more, these would be most of the file."""
COLOURS = dict(zip("FBUS", LIGHT.series, strict=False))
WORDS = {"F": "forward", "B": "backward", "S": "sums over replicas", "U": "updates"}
WHITE_SHARES = (0.0, 0.35, 0.6, 0.8)
"""Shares of white in the colours of a device's first, second, ... stages; the last is for all
further ones."""


def schedule_svg(result: ScheduleResult, subject: str = "") -> str:
    """Return the timeline of one step; a box is a forward or backward, with its microbatch.

    The stages of a device share its row, later ones in lighter colours. Forwards of a stage in the
    same pixel share a box, and so do backwards. All-reduces and updates come last. `subject` is the
    first line.
    """
    work = "training step" if result.training else "step"
    drawing = Drawing(f"Schedule {result.name}: one {work}", subject=subject)
    title = (
        f"{result.name}: {work} {format_s(result.step_s)}, bubble {result.bubble_fraction:.1%},"
        f" {counted(result.microbatches, 'microbatch', 'microbatches')}"
    )
    drawing.text(MARGIN, 26, title, size=16, bold=True)
    _legend(drawing, result)
    bottom = _y(result, len(result.devices))
    _axis(drawing, result, bottom)
    for row in range(len(result.devices)):
        _label(drawing, result, row)
    _boxes(drawing, result)
    _sums_and_updates(drawing, result)
    return drawing.svg(WIDTH, bottom + 30)


def _row_height(result: ScheduleResult) -> tuple[float, float]:
    """Return the height of a row, and of the gap below it."""
    return (ROW, GAP) if len(result.devices) <= MOST_HIGH else (LOW_ROW, LOW_GAP)


def _y(result: ScheduleResult, row: int) -> float:
    return TOP + row * sum(_row_height(result))


def _x(result: ScheduleResult, time_s: float) -> float:
    whole_s = result.step_s or 1.0
    return LEFT + (WIDTH - LEFT - MARGIN) * time_s / whole_s


def _stages(result: ScheduleResult) -> int:
    return max((event.stage for event in result.events), default=-1) + 1


def _legend(drawing: Drawing, result: ScheduleResult) -> None:
    x = MARGIN
    kinds = "FB" if result.training else "F"
    for kind in kinds:
        x = _legend_entry(drawing, x, kind)
    devices, stages = len(result.devices), _stages(result)
    chunks = stages // max(devices, 1)
    x += 12
    for shade in range(min(chunks, len(WHITE_SHARES)) if chunks > 1 else 0):
        for kind in kinds:
            drawing.rect(x, 42, 12, 12, fill=_shaded(kind, shade))
            x += 14
        last = stages if shade == len(WHITE_SHARES) - 1 else (shade + 1) * devices
        label = f"stages {format_ids(tuple(range(shade * devices, last)))}"
        drawing.text(x + 4, 52, label)
        x += 20 + text_width(label, 12)
    for kind in [kind for kind, parts in (("S", result.sums), ("U", result.updates)) if parts]:
        x = _legend_entry(drawing, x, kind)
    if any(_has_number(result, event) for event in result.events):
        drawing.text(x, 52, "the number is the microbatch", fill=LIGHT.muted)


def _legend_entry(drawing: Drawing, x: float, kind: str) -> float:
    """Draw the colour and name of a kind of work; return the x of the next entry."""
    drawing.rect(x, 42, 12, 12, fill=COLOURS[kind])
    drawing.text(x + 18, 52, WORDS[kind])
    return x + 34 + text_width(WORDS[kind], 12)


def _label(drawing: Drawing, result: ScheduleResult, row: int) -> None:
    y, name = _y(result, row), f"device {result.devices[row]}"
    share = result.busy_s[row] / result.step_s if result.step_s > 0 else 0.0
    label = f"{format_size(result.peak_bytes[row])}, {share:.0%} busy"
    if _row_height(result)[0] < ROW:
        drawing.text(MARGIN, y + 12, name, size=11, bold=True)
        drawing.text(LEFT - 10, y + 12, label, size=10, fill=LIGHT.muted, anchor="end")
        return
    drawing.text(MARGIN, y + 13, name, bold=True)
    drawing.text(MARGIN, y + 27, f"peak {label}", size=11, fill=LIGHT.muted)


def _axis(drawing: Drawing, result: ScheduleResult, bottom: float) -> None:
    times, top = time_unit(result.step_s), TOP - 6
    across = Scale(0.0, result.step_s / times.size or 1.0)
    panel = Panel(LEFT, top, WIDTH - LEFT - MARGIN, bottom - top, across, Scale(0.0, 1.0))
    ticks = () if result.step_s > 0 else (0.0,)
    axis_across(drawing, panel, 8, ticks, lambda tick: f"{tick:.6g} {times.name}")


def _boxes(drawing: Drawing, result: ScheduleResult) -> None:
    boxes: list[tuple[StageEvent, float, float]] = []
    latest: dict[tuple[int, str], int] = {}
    for event in result.events:
        begin, end = _x(result, event.start_s), _x(result, event.finish_s)
        last = latest.get((event.stage, event.kind))
        if last is not None and end <= boxes[last][1] + JOINED:
            boxes[last] = (*boxes[last][:2], end)
            continue
        latest[event.stage, event.kind] = len(boxes)
        boxes.append((event, begin, end))
    row_of = {device: row for row, device in enumerate(result.devices)}
    for event, begin, end in boxes:
        span = (begin, max(end, begin + THINNEST), _y(result, row_of[event.device]))
        _box(drawing, result, event, span, tips=len(boxes) <= MOST_TIPS)


def _sums_and_updates(drawing: Drawing, result: ScheduleResult) -> None:
    """Draw the all-reduces and updates at the end of a step."""
    row_of = {device: row for row, device in enumerate(result.devices)}
    parts: list[tuple[str, str, ReplicaSum | StageUpdate]]
    parts = [("S", WORDS["S"], part) for part in result.sums]
    parts += [("U", f"{WORDS['U']} of stage {part.stage}", part) for part in result.updates]
    for kind, name, part in parts:
        begin, end = _x(result, part.start_s), _x(result, part.finish_s)
        width, height = max(end - begin, THINNEST), _row_height(result)[0]
        tip = f"{name}: {format_s(part.start_s)} to {format_s(part.finish_s)}"
        y = _y(result, row_of[part.device])
        drawing.rect(begin, y, _drawn_width(width), height, fill=COLOURS[kind], tip=tip)


def _box(
    drawing: Drawing,
    result: ScheduleResult,
    event: StageEvent,
    span: tuple[float, float, float],
    *,
    tips: bool,
) -> None:
    """Draw `event` at `span`: the x of its start and end, and its y."""
    begin, end, y = span
    width, height = end - begin, _row_height(result)[0]
    shade = min(event.stage // len(result.devices), len(WHITE_SHARES) - 1)
    tip = (
        f"{WORDS[event.kind]} of microbatch {event.microbatch}, stage {event.stage}:"
        f" {format_s(event.start_s)} to {format_s(event.finish_s)}"
    )
    fill = _shaded(event.kind, shade)
    drawing.rect(begin, y, _drawn_width(width), height, fill=fill, tip=tip if tips else "")
    if _has_number(result, event):
        colour = LIGHT.paper if event.kind == "F" and shade == 0 else LIGHT.ink
        middle, number = begin + width / 2, str(event.microbatch)
        drawing.text(middle, y + height / 2 + 4, number, size=11, fill=colour, anchor="middle")


def _drawn_width(width: float) -> float:
    """Return the width of a box, with a hairline of white to its neighbour if there is room."""
    return width - 0.8 if width > 3 else width


def _has_number(result: ScheduleResult, event: StageEvent) -> bool:
    """Return whether the largest number fits, so that boxes of equal length are labelled alike."""
    width = _x(result, event.finish_s) - _x(result, event.start_s)
    return width > text_width(str(result.microbatches - 1), 11) + 2


def _shaded(kind: str, shade: int) -> str:
    """Return the colour of forward or backward, mixed with white."""
    share = WHITE_SHARES[shade]
    parts = (int(COLOURS[kind][offset : offset + 2], 16) for offset in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)

"""`schedule.svg`: which stage runs which microbatch when, a row for each device."""

from fxpart.schedule import ScheduleResult, StageEvent
from runner.svg import GREY, INK, PALETTE, Drawing, text_width
from runner.units import format_size, time_unit

__all__ = ["schedule_svg"]

WIDTH, LEFT, TOP, ROW, GAP = 1120.0, 190.0, 74.0, 30.0, 10.0
MARGIN = 24.0
FORWARD, BACKWARD = PALETTE[0], PALETTE[1]
TICKS = 5


def schedule_svg(result: ScheduleResult) -> str:
    """Return the timeline of one step; a box is a forward or backward, with its microbatch.

    The stages of a device share its row, later ones lighter.
    """
    work = "training step" if result.training else "step"
    drawing = Drawing(f"Schedule {result.name}: one {work}")
    times = time_unit(result.step_s)
    drawing.text(
        MARGIN,
        26,
        f"{result.name}: {work} {times.show(result.step_s)} {times.name}, bubble"
        f" {result.bubble_fraction:.1%}",
        size=16,
        bold=True,
    )
    _legend(drawing, result)
    height = TOP + len(result.devices) * (ROW + GAP)
    _axis(drawing, result, height)
    for row, device in enumerate(result.devices):
        y = TOP + row * (ROW + GAP)
        drawing.text(MARGIN, y + 13, f"device {device}", bold=True)
        drawing.text(
            MARGIN, y + 27, f"peak {format_size(result.peak_bytes[row])}", size=11, fill=GREY
        )
    row_of = {device: row for row, device in enumerate(result.devices)}
    for event in result.events:
        _box(drawing, result, event, TOP + row_of[event.device] * (ROW + GAP))
    return drawing.svg(WIDTH, height + 40)


def _x(result: ScheduleResult, time_s: float) -> float:
    whole = result.step_s or 1.0
    return LEFT + (WIDTH - LEFT - MARGIN) * time_s / whole


def _legend(drawing: Drawing, result: ScheduleResult) -> None:
    x = MARGIN
    kinds = [("forward", FORWARD), ("backward", BACKWARD)][: 2 if result.training else 1]
    for word, colour in kinds:
        drawing.rect(x, 42, 12, 12, fill=colour)
        drawing.text(x + 18, 52, word)
        x += 34 + text_width(word, 12)
    drawing.text(x, 52, "the number is the microbatch", fill=GREY)


def _axis(drawing: Drawing, result: ScheduleResult, height: float) -> None:
    times = time_unit(result.step_s)
    for tick in range(TICKS + 1):
        time_s = result.step_s * tick / TICKS
        x = _x(result, time_s)
        drawing.path(f"M{x:.1f} {TOP - 6:.1f}V{height:.1f}", stroke="#dddddd")
        words = f"{times.show(time_s)} {times.name}"
        anchor = "start" if tick == 0 else "end" if tick == TICKS else "middle"
        drawing.text(x, height + 18, words, size=11, fill=GREY, anchor=anchor)


def _box(drawing: Drawing, result: ScheduleResult, event: StageEvent, y: float) -> None:
    begin, end = _x(result, event.start_s), _x(result, event.finish_s)
    chunk = event.stage // len(result.devices)
    times = time_unit(result.step_s)
    word = "forward" if event.kind == "F" else "backward"
    drawing.rect(
        begin,
        y,
        max(end - begin, 0.2),
        ROW,
        fill=FORWARD if event.kind == "F" else BACKWARD,
        stroke="#ffffff",
        opacity=1.0 if chunk == 0 else max(0.45, 0.8 - 0.2 * (chunk - 1)),
        tip=f"{word} of microbatch {event.microbatch}, stage {event.stage}:"
        f" {times.show(event.start_s)} to {times.show(event.finish_s)} {times.name}",
    )
    number = str(event.microbatch)
    if end - begin > text_width(number, 11) + 2:
        middle = (begin + end) / 2
        colour = "#ffffff" if event.kind == "F" and chunk == 0 else INK
        drawing.text(middle, y + 19, number, size=11, fill=colour, anchor="middle")

"""What the figures of a report share: colours that follow the page, frames, marks and legends."""

from collections.abc import Sequence
from dataclasses import dataclass

from runner.output.svg import Drawing, text_width
from runner.report.scale import Scale, tick_text

__all__ = [
    "ACCENT",
    "COLOURS",
    "FAINT",
    "GRID",
    "INK",
    "MUTED",
    "PAPER",
    "WARN",
    "Panel",
    "cross",
    "cut_text",
    "frame",
    "legend",
    "legend_across",
    "mark",
]

INK, MUTED, GRID, PAPER = "var(--ink)", "var(--muted)", "var(--grid)", "var(--paper)"
FAINT, ACCENT, WARN = "var(--faint)", "var(--accent)", "var(--warn)"
COLOURS = tuple(f"var(--c{index})" for index in range(8))
"""Told apart with the common kinds of colour blindness; the page says what they are."""
TEXT = 11.0


@dataclass(frozen=True, slots=True)
class Panel:
    """A rectangle in pixels, and the axes over it."""

    x: float
    y: float
    width: float
    height: float
    across: Scale
    up: Scale

    def place(self, right: float, above: float) -> tuple[float, float]:
        """Return where the point of these values is, in pixels from the top left."""
        return (
            self.x + self.width * self.across.at(right),
            self.y + self.height * (1 - self.up.at(above)),
        )


def frame(
    drawing: Drawing, panel: Panel, below: str, beside: str, ticks: Sequence[float] = ()
) -> None:
    """Draw grid, ticks and the names of the axes: `below` and, above the frame, `beside`.

    `ticks` are the numbers to show across; if left out, round ones.
    """
    base = panel.y + panel.height
    for tick in panel.up.ticks(5):
        y = panel.y + panel.height * (1 - panel.up.at(tick))
        drawing.path(f"M{panel.x:.1f} {y:.1f}h{panel.width:.1f}", stroke=GRID)
        drawing.text(panel.x - 7, y + 4, tick_text(tick), size=TEXT, anchor="end", fill=MUTED)
    for tick in ticks or panel.across.ticks(6):
        x = panel.x + panel.width * panel.across.at(tick)
        drawing.path(f"M{x:.1f} {panel.y:.1f}v{panel.height:.1f}", stroke=GRID)
        drawing.text(x, base + 16, tick_text(tick), size=TEXT, anchor="middle", fill=MUTED)
    drawing.path(f"M{panel.x:.1f} {base:.1f}h{panel.width:.1f}", stroke=MUTED)
    drawing.text(panel.x + panel.width, base + 33, below, size=TEXT, anchor="end", fill=MUTED)
    drawing.text(panel.x - 7, panel.y - 10, beside, size=TEXT, fill=MUTED)


def mark(
    drawing: Drawing,
    place: tuple[float, float],
    index: int,
    tip: str,
    *,
    solid: bool = True,
    size: float = 5.0,
) -> None:
    """Draw a point: `index` chooses its colour and its shape, what is not `solid` is hollow."""
    x, y = place
    colour = COLOURS[index % len(COLOURS)]
    commands = _SHAPES[index % len(_SHAPES)].format(
        x=f"{x:.1f}", y=f"{y:.1f}", r=f"{size:.1f}", m=f"-{size:.1f}", d=f"{2 * size:.1f}"
    )
    commands = f"M{x:.1f} {y:.1f}{commands}"
    fill = colour if solid else PAPER
    drawing.path(commands, fill=fill, stroke=colour, width=1.5 if solid else 1.3, tip=tip)


_SHAPES = (
    "m{m} 0a{r} {r} 0 1 0 {d} 0a{r} {r} 0 1 0 -{d} 0z",  # circle
    "m{m} {m}h{d}v{d}h-{d}z",  # square
    "m0 {m}l{r} {d}h-{d}z",  # triangle
    "m0 {m}l{r} {r}l{m} {r}l{m} {m}z",  # diamond
    "m{m} {m}h{d}l{m} {d}z",  # triangle, point down
    "m{m} {m}v{d}l{d} {m}z",  # triangle, point right
    "m{r} {m}v{d}l-{d} {m}z",  # triangle, point left
    "m{m} {m}h{d}l-{d} {d}h{d}z",  # hourglass
)


def legend_across(
    drawing: Drawing, x: float, y: float, names: Sequence[str], width: float
) -> float:
    """List `names` in lines of at most `width`, each beside its mark; return where they end."""
    left = x
    for index, name in enumerate(names):
        text = cut_text(name, width - 20)
        wide = text_width(text, TEXT) + 32
        if left > x and left + wide > x + width:
            left, y = x, y + 18
        mark(drawing, (left + 5, y), index, name)
        drawing.text(left + 16, y + 4, text, size=TEXT, fill=INK)
        left += wide
    return y + 12


def cross(drawing: Drawing, x: float, y: float, tip: str) -> None:
    """Draw the mark of a job that does not fit."""
    drawing.path(f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8", stroke=WARN, width=2, tip=tip)


def legend(drawing: Drawing, x: float, y: float, names: Sequence[str]) -> None:
    """List `names` downwards, each beside its mark."""
    for index, name in enumerate(names):
        mark(drawing, (x + 5, y + 18 * index), index, name)
        drawing.text(x + 16, y + 18 * index + 4, name, size=TEXT, fill=INK)


def cut_text(text: str, most_px: float, size: float = TEXT) -> str:
    """Return `text`, cut where it would be wider than `most_px`."""
    if text_width(text, size) <= most_px:
        return text
    return text[: max(int(most_px / (0.6 * size)) - 1, 1)] + "…"

"""Building blocks of all figures: scales with round ticks, panels with axes, marks and legends."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runner.output.svg import Drawing, colour_of, text_width

__all__ = [
    "TEXT",
    "Panel",
    "Scale",
    "axis_across",
    "axis_up",
    "cross",
    "cut_text",
    "frame",
    "legend",
    "legend_across",
    "mark",
    "scale_of",
    "tick_text",
]

TEXT = 11.0
"""Font size at axes and in legends."""
_WIDE = 8.0
"""Ratio of positive numbers above which the scale is logarithmic."""
_MARGIN = 0.06


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear or logarithmic scale from `low` to `high`, which differ."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the position of `value`, 0 at the low end and 1 at the high end."""
        low, high, position = self.low, self.high, value
        if self.log:
            low, high, position = math.log(low), math.log(high), math.log(value)
        return (position - low) / (high - low)

    def ticks(self, about: int) -> list[float]:
        """Return about `about` round numbers on the scale."""
        if not self.log:
            return self._even_ticks(about)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        inside = [
            value
            for decade in decades
            for digit in (1, 2, 5)
            if self.low <= (value := digit * 10.0**decade) <= self.high
        ]
        whole = [value for value in inside if math.log10(value).is_integer()]
        return whole if len(inside) > 2 * about and len(whole) > 1 else inside

    def _even_ticks(self, about: int) -> list[float]:
        rough = (self.high - self.low) / about
        decade = 10.0 ** math.floor(math.log10(rough))
        step = min((1, 2, 2.5, 5, 10), key=lambda factor: abs(factor * decade - rough)) * decade
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [float(f"{i * step:.9g}") for i in range(first, last + 1)]


def scale_of(values: Sequence[float], below: float = _MARGIN) -> Scale:
    """Return a scale with room for all `values`, not necessarily from 0.

    `below` is the margin below the smallest, as a share of their range.
    """
    low, high = min(values), max(values)
    if low > 0 and high / low > _WIDE:
        ratio = high / low
        return Scale(low / ratio**below, high * ratio**_MARGIN, log=True)
    width = (high - low) or abs(high) or 1.0
    lower = low - width * below
    return Scale(max(lower, 0.0) if low >= 0 else lower, high + width * _MARGIN)


def tick_text(value: float) -> str:
    """Return a round number as text for an axis."""
    return f"{value:,.0f}" if abs(value) >= 1000 and value.is_integer() else f"{value:g}"


@dataclass(frozen=True, slots=True)
class Panel:
    """A rectangle in pixels, with scales along its sides."""

    x: float
    y: float
    width: float
    height: float
    across: Scale
    up: Scale

    @property
    def right(self) -> float:
        """The x of its right side, in pixels."""
        return self.x + self.width

    @property
    def base(self) -> float:
        """The y of its lower side, in pixels."""
        return self.y + self.height

    def x_of(self, value: float) -> float:
        """Return the x of `value` on the horizontal scale, in pixels."""
        return self.x + self.width * self.across.at(value)

    def y_of(self, value: float) -> float:
        """Return the y of `value` on the vertical scale, in pixels from the top."""
        return self.y + self.height * (1 - self.up.at(value))

    def place(self, right: float, above: float) -> tuple[float, float]:
        """Return the point of two values, in pixels from the top left."""
        return self.x_of(right), self.y_of(above)


def axis_up(drawing: Drawing, panel: Panel, about: int = 5) -> None:
    """Draw horizontal grid lines, with their numbers on the left."""
    colours = drawing.palette
    for tick in panel.up.ticks(about):
        y = panel.y_of(tick)
        drawing.path(f"M{panel.x:.1f} {y:.1f}h{panel.width:.1f}", stroke=colours.grid)
        label = tick_text(tick)
        drawing.text(panel.x - 7, y + 4, label, size=TEXT, anchor="end", fill=colours.muted)


def axis_across(
    drawing: Drawing,
    panel: Panel,
    about: int = 6,
    ticks: Sequence[float] = (),
    text: Callable[[float], str] = tick_text,
) -> None:
    """Draw vertical grid lines at `ticks`, or at round numbers, with their numbers below."""
    colours = drawing.palette
    for tick in ticks or panel.across.ticks(about):
        x, label = panel.x_of(tick), text(tick)
        drawing.path(f"M{x:.1f} {panel.y:.1f}v{panel.height:.1f}", stroke=colours.grid)
        drawing.text(x, panel.base + 16, label, size=TEXT, anchor="middle", fill=colours.muted)


def frame(
    drawing: Drawing, panel: Panel, below: str, beside: str, ticks: Sequence[float] = ()
) -> None:
    """Draw both axes, the lower side, and the axes' names: `below`, and `beside` at the top."""
    muted = drawing.palette.muted
    axis_up(drawing, panel)
    axis_across(drawing, panel, ticks=ticks)
    drawing.path(f"M{panel.x:.1f} {panel.base:.1f}h{panel.width:.1f}", stroke=muted)
    drawing.text(panel.right, panel.base + 33, below, size=TEXT, anchor="end", fill=muted)
    drawing.text(panel.x - 7, panel.y - 10, beside, size=TEXT, fill=muted)


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


def mark(
    drawing: Drawing,
    place: tuple[float, float],
    index: int,
    tip: str,
    *,
    solid: bool = True,
    size: float = 5.0,
) -> None:
    """Draw a mark, whose `index` chooses colour and shape; hollow unless `solid`."""
    x, y = place
    colour = colour_of(index, drawing.palette)
    shape = _SHAPES[index % len(_SHAPES)].format(
        r=f"{size:.1f}", m=f"-{size:.1f}", d=f"{2 * size:.1f}"
    )
    fill = colour if solid else drawing.palette.paper
    width = 1.5 if solid else 1.3
    drawing.path(f"M{x:.1f} {y:.1f}{shape}", fill=fill, stroke=colour, width=width, tip=tip)


def cross(drawing: Drawing, x: float, y: float, tip: str) -> None:
    """Draw the mark of a job that does not fit."""
    commands = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"
    drawing.path(commands, stroke=drawing.palette.warn, width=2, tip=tip)


def legend(drawing: Drawing, x: float, y: float, names: Sequence[str]) -> None:
    """List `names` vertically, each next to its mark."""
    for index, name in enumerate(names):
        mark(drawing, (x + 5, y + 18 * index), index, name)
        drawing.text(x + 16, y + 18 * index + 4, name, size=TEXT)


def legend_across(
    drawing: Drawing, x: float, y: float, names: Sequence[str], width: float
) -> float:
    """List `names` in lines of at most `width`, each next to its mark; return the y of the end."""
    left = x
    for index, name in enumerate(names):
        text = cut_text(name, width - 20)
        needed = text_width(text, TEXT) + 32
        if left > x and left + needed > x + width:
            left, y = x, y + 18
        mark(drawing, (left + 5, y), index, name)
        drawing.text(left + 16, y + 4, text, size=TEXT)
        left += needed
    return y + 12


def cut_text(text: str, most_px: float, size: float = TEXT) -> str:
    """Return `text`, truncated to a width of `most_px`."""
    if text_width(text, size) <= most_px:
        return text
    return text[: max(int(most_px / (0.6 * size)) - 1, 1)] + "…"

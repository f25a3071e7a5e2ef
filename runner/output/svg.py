"""Write SVG drawings, with the colours of all figures and pages.

There are no scripts, fonts or dates, so equal input gives equal text. Importing matplotlib would
take longer than all of this, and rectangles, lines and text are enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from xml.sax.saxutils import escape, quoteattr

__all__ = ["DARK", "HEAD", "IN_PAGE", "LIGHT", "Drawing", "Palette", "colour_of", "text_width"]

HEAD = 10.0
"""Length of an arrow's head in pixels."""
_BAND = 20.0
"""Height and margin of the subject line above a figure, in pixels."""


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours of a page or of a figure."""

    paper: str
    back: str
    """Background of the paper, or of empty panels on it."""
    ink: str
    muted: str
    faint: str
    grid: str
    accent: str
    warn: str
    good: str
    series: tuple[str, ...]
    """Distinguishable with common colour blindness (after Okabe and Ito), and from `warn`."""

    def variables(self) -> dict[str, str]:
        """Return the colours by the CSS variables that `IN_PAGE` uses."""
        series = {f"c{index}": colour for index, colour in enumerate(self.series)}
        return {name: getattr(self, name) for name in _NAMES} | series


_NAMES = tuple(field.name for field in fields(Palette) if field.name != "series")
LIGHT = Palette(
    paper="#ffffff",
    back="#f4f5f7",
    ink="#1b1e23",
    muted="#5d6570",
    faint="#eef0f3",
    grid="#dfe3e8",
    accent="#0072b2",
    warn="#c04a00",
    good="#e4f1f9",
    series=(
        *("#0072b2", "#d98f00", "#00896a", "#b8558f"),
        *("#3f9fd8", "#7d6216", "#5b4fa2", "#6d6d6d"),
    ),
)
DARK = Palette(
    paper="#1b1f26",
    back="#12151a",
    ink="#e8ebef",
    muted="#a0a9b5",
    faint="#242a33",
    grid="#343c47",
    accent="#56b4e9",
    warn="#ff9a57",
    good="#173247",
    series=(
        *("#56b4e9", "#f0b54a", "#3fcaa2", "#e79bc7"),
        *("#9ad4f5", "#cfae58", "#a99ff0", "#b4b4b4"),
    ),
)
IN_PAGE = Palette(
    **{name: f"var(--{name})" for name in _NAMES},
    series=tuple(f"var(--c{index})" for index in range(len(LIGHT.series))),
)
"""For figures in a page whose style defines these variables."""


def colour_of(index: int, palette: Palette = LIGHT) -> str:
    """Return the colour of a device or a line; colours repeat after the eighth."""
    return palette.series[index % len(palette.series)]


def text_width(text: str, size: float) -> float:
    """Return an approximate width of `text` in pixels, erring on the large side."""
    return 0.6 * size * len(text)


class Drawing:
    """Collects shapes. Coordinates are pixels from the top left; later shapes are on top."""

    def __init__(self, title: str, palette: Palette = LIGHT, subject: str = "") -> None:
        """Start a drawing; `subject` is a line of text above all shapes."""
        self.palette = palette
        self._title, self._subject = title, subject
        self._shapes: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        stroke: str = "none",
        opacity: float = 1.0,
        radius: float = 0,
        tip: str = "",
    ) -> None:
        """Add a rectangle; `opacity` applies to its fill, and `tip` is a tooltip."""
        self._shapes.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
            f' fill="{fill}" stroke="{stroke}"{_unless_1("fill-opacity", opacity)}'
            + (f' rx="{_n(radius)}"' if radius else "")
            + _closed("rect", tip)
        )

    def path(
        self,
        commands: str,
        *,
        fill: str = "none",
        stroke: str = "none",
        width: float = 1.0,
        opacity: float = 1.0,
        dashes: str = "",
        arrow: bool = False,
        tip: str = "",
    ) -> None:
        """Add an SVG path; `arrow` adds a head of `HEAD` pixels at its end."""
        self._shapes.append(
            f'<path d="{commands}" fill="{fill}" stroke="{stroke}" stroke-width="{_n(width)}"'
            + _unless_1("opacity", opacity)
            + (f' stroke-dasharray="{dashes}"' if dashes else "")
            + (f' marker-end="url(#head-{stroke[1:]})"' if arrow else "")
            + _closed("path", tip)
        )

    def line(self, points: Sequence[tuple[float, float]], stroke: str) -> None:
        """Add a line through `points`, if any."""
        if points:
            commands = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            self.path(commands, stroke=stroke, width=2)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12,
        fill: str = "",
        anchor: str = "start",
        bold: bool = False,
        halo: bool = False,
    ) -> None:
        """Add a line of text with its baseline at `y`, in the ink colour by default.

        `halo` keeps it legible on top of lines.
        """
        ink, paper = fill or self.palette.ink, self.palette.paper
        self._shapes.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" fill="{ink}"'
            + (f' text-anchor="{anchor}"' if anchor != "start" else "")
            + (' font-weight="bold"' if bold else "")
            + (f' paint-order="stroke" stroke="{paper}" stroke-width="4"' if halo else "")
            + f">{escape(words)}</text>"
        )

    def svg(self, width: float, height: float, arrows: Sequence[str] = ()) -> str:
        """Return the SVG file; `arrows` are the stroke colours of all arrows."""
        heads = "".join(
            f'<marker id="head-{colour[1:]}" viewBox="0 0 10 10" refY="5" markerWidth="10"'
            f' markerHeight="10" markerUnits="userSpaceOnUse" orient="auto">'
            f'<path d="M0 0L10 5L0 10z" fill="{colour}"/></marker>'
            for colour in arrows
        )
        body = "\n".join(self._shapes)
        if self._subject:
            width = max(width, 2 * _BAND + text_width(self._subject, 12))
            height += _BAND
            line = escape(self._subject)
            ink = self.palette.muted
            body = (
                f'<text x="{_n(_BAND)}" y="20" font-size="12" fill="{ink}">{line}</text>\n'
                f'<g transform="translate(0 {_n(_BAND)})">\n{body}\n</g>'
            )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(width)}" height="{_n(height)}"'
            f' viewBox="0 0 {_n(width)} {_n(height)}" role="img"'
            f" aria-label={quoteattr(self._title)}"
            ' font-family="Verdana, DejaVu Sans, sans-serif">\n'
            f"<title>{escape(self._title)}</title>\n"
            + (f"<defs>{heads}</defs>\n" if heads else "")
            + f'<rect width="{_n(width)}" height="{_n(height)}" fill="{self.palette.paper}"/>\n'
            + body
            + "\n</svg>\n"
        )


def _n(number: float) -> str:
    """Return a coordinate to a tenth of a pixel, without a needless ``.0`` or ``-0``."""
    tenths = round(float(number) * 10)
    return str(tenths // 10) if tenths % 10 == 0 else f"{tenths / 10:.1f}"


def _unless_1(attribute: str, value: float) -> str:
    return "" if value == 1 else f' {attribute}="{value:g}"'


def _closed(shape: str, tip: str) -> str:
    return f"><title>{escape(tip)}</title></{shape}>" if tip else "/>"

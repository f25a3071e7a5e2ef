"""A drawing in SVG, by hand: no script, no font file, no date, so equal input is equal text.

Importing matplotlib takes longer than all of this, and rectangles, lines and words are enough.
"""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

__all__ = [
    "GREY",
    "HEAD",
    "INK",
    "PALETTE",
    "WARNING",
    "Drawing",
    "colour_of",
    "text_width",
    "ticks",
]


PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#8C6D1F", "#5B4FA2", "#7F7F7F")
"""Told apart with the common kinds of colour blindness (after Okabe and Ito); not `WARNING`."""
WARNING = "#D55E00"
HEAD = 10.0
INK = "#222222"
GREY = "#767676"


def colour_of(index: int) -> str:
    """Return the colour of a device; the ninth has that of the first."""
    return PALETTE[index % len(PALETTE)]


def text_width(text: str, size: float) -> float:
    """Return about how wide `text` is in pixels, never much too small."""
    return 0.6 * size * len(text)


class Drawing:
    """Collects shapes; coordinates are pixels from the top left, later shapes lie on top.

    `paper` is the colour of the background; in a page that has colours of its own, all colours may
    be CSS, such as ``var(--ink)``.
    """

    def __init__(self, title: str, paper: str = "#ffffff") -> None:
        self._title = title
        self._paper = paper
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
        """Add a rectangle; `opacity` is of its filling, `tip` shows under the pointer."""
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
        """Add an SVG path; with `arrow` a head follows its end, `HEAD` pixels long."""
        self._shapes.append(
            f'<path d="{commands}" fill="{fill}" stroke="{stroke}" stroke-width="{_n(width)}"'
            + _unless_1("opacity", opacity)
            + (f' stroke-dasharray="{dashes}"' if dashes else "")
            + (f' marker-end="url(#head-{stroke[1:]})"' if arrow else "")
            + _closed("path", tip)
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
        halo: bool = False,
    ) -> None:
        """Add a line of text with its baseline at `y`; `halo` keeps it legible over lines."""
        self._shapes.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" fill="{fill}"'
            + (f' text-anchor="{anchor}"' if anchor != "start" else "")
            + (' font-weight="bold"' if bold else "")
            + (f' paint-order="stroke" stroke="{self._paper}" stroke-width="4"' if halo else "")
            + f">{escape(words)}</text>"
        )

    def svg(self, width: float, height: float, arrows: Sequence[str] = ()) -> str:
        """Return the file; `arrows` are the stroke colours that arrows were drawn in."""
        heads = "".join(
            f'<marker id="head-{colour[1:]}" viewBox="0 0 10 10" refY="5" markerWidth="10"'
            f' markerHeight="10" markerUnits="userSpaceOnUse" orient="auto">'
            f'<path d="M0 0L10 5L0 10z" fill="{colour}"/></marker>'
            for colour in arrows
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(width)}" height="{_n(height)}"'
            f' viewBox="0 0 {_n(width)} {_n(height)}" role="img"'
            f" aria-label={quoteattr(self._title)}"
            ' font-family="Verdana, DejaVu Sans, sans-serif">\n'
            f"<title>{escape(self._title)}</title>\n"
            + (f"<defs>{heads}</defs>\n" if heads else "")
            + f'<rect width="{_n(width)}" height="{_n(height)}" fill="{self._paper}"/>\n'
            + "\n".join(self._shapes)
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


# Round numbers for the axes of figures.


def ticks(top: float, about: int) -> list[float]:
    """Return round numbers from 0 to `top`, around `about` of them above 0."""
    if top <= 0:
        return [0.0]
    rough = top / about
    decade = 10.0 ** math.floor(math.log10(rough))
    step = min((1, 2, 2.5, 5, 10), key=lambda factor: abs(factor * decade - rough)) * decade
    return [float(f"{i * step:.6g}") for i in range(int(top / step) + 1)]

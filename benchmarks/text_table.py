"""Aligned tables in plain text."""

from collections.abc import Iterable, Sequence

__all__ = ["markdown", "table"]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return lines with each column as wide as its widest cell; the first is flush left."""
    cells = [list(heads), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    lines = []
    for row in cells:
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *rest]).rstrip())
    return "\n".join(lines)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the same as a table in Markdown, numbers to the right."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

"""`serving_sweep.csv`, `.txt`, `.svg`: a generation's plan at each size of ``serving_sweep``."""

from collections.abc import Sequence
from pathlib import Path

from fxpart.support.text_files import write_text
from runner.experiment.serving_table import ServingRow
from runner.output.plot import Panel, frame, legend, mark, scale_of
from runner.output.result_files import write_table
from runner.output.svg import Drawing, colour_of
from runner.output.units import size_unit, time_unit

__all__ = ["serving_columns", "serving_text", "write_serving_files"]

_LEFT, _TOP, _WIDTH, _HEIGHT, _GAP, _RIGHT = 84.0, 84.0, 560.0, 210.0, 76.0, 130.0
"""Margins, and the size of each panel, in pixels."""
_HEADS = ("context", "batch", "first token", "a token", "tokens/s", "needed", "fits")
_WIDTHS = (10, 8, 13, 12, 12, 12, 6)


def write_serving_files(folder: Path, rows: Sequence[ServingRow], subject: str) -> None:
    """Write the three files into `folder`; `subject` is the first line of the figure.

    Raises `CacheError` if they cannot be written.
    """
    write_table(folder / "serving_sweep.csv", serving_columns(rows))
    write_text(folder / "serving_sweep.txt", f"{subject}\n{serving_text(rows)}\n")
    write_text(folder / "serving_sweep.svg", _serving_svg(rows, subject))


def serving_columns(rows: Sequence[ServingRow]) -> dict[str, list[object]]:
    """Return the table as columns, for files and MLflow."""
    return {
        "batch": [row.pace.texts for row in rows],
        "context_len": [row.context_len for row in rows],
        "ttft_ms": [row.pace.ttft_s * 1e3 for row in rows],
        "tpot_ms": [row.pace.tpot_s * 1e3 for row in rows],
        "tokens_per_s": [row.pace.tokens_per_s for row in rows],
        "needed_bytes": [row.needed_bytes for row in rows],
        "device": [row.device for row in rows],
        "fits": [row.fits for row in rows],
    }


def serving_text(rows: Sequence[ServingRow]) -> str:
    """Return the table as plain text of at most 80 columns."""
    longest_s = max(max(row.pace.ttft_s, row.pace.tpot_s) for row in rows)
    times, token = time_unit(longest_s), time_unit(max(row.pace.tpot_s for row in rows))
    sizes = size_unit(max(row.needed_bytes for row in rows))
    units = ("", "", times.name, token.name, "", sizes.name, "")
    lines = [_line(_HEADS), _line(units), "─" * sum(_WIDTHS)]
    lines += [
        _line(
            (
                f"{row.context_len:,}",
                f"{row.pace.texts:,}",
                times.show(row.pace.ttft_s),
                token.show(row.pace.tpot_s),
                f"{row.pace.tokens_per_s:,.1f}",
                sizes.show(row.needed_bytes),
                "yes" if row.fits else "no",
            )
        )
        for row in rows
    ]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    padded = (cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
    return "".join(padded).rstrip()


def _serving_svg(rows: Sequence[ServingRow], subject: str) -> str:
    """Return two panels over the context length, tokens/s and time per token, a line per batch.

    Sizes that do not fit have hollow marks.
    """
    title = "Tokens per second, and time per token, over the context"
    drawing = Drawing(title, subject=subject)
    drawing.text(_LEFT, 28, title, size=17, bold=True)
    token = time_unit(max(row.pace.tpot_s for row in rows))
    up = (
        ("tokens/s", [row.pace.tokens_per_s for row in rows]),
        (f"a token in {token.name}", [row.pace.tpot_s / token.size for row in rows]),
    )
    contexts = [float(row.context_len) for row in rows]
    batches = sorted({row.pace.texts for row in rows})
    top = _TOP
    for name, values in up:
        panel = Panel(_LEFT, top, _WIDTH, _HEIGHT, scale_of(contexts), scale_of(values))
        frame(drawing, panel, "tokens of a text", name)
        for index, batch in enumerate(batches):
            of_batch = [n for n, row in enumerate(rows) if row.pace.texts == batch]
            places = [panel.place(contexts[n], values[n]) for n in of_batch]
            drawing.line(places, stroke=colour_of(index))
            for n, place in zip(of_batch, places, strict=True):
                fits = rows[n].fits
                tip = f"batch {batch}, {contexts[n]:,.0f} tokens: {values[n]:,.4g} {name}"
                mark(drawing, place, index, tip if fits else f"{tip}, does not fit", solid=fits)
        top = panel.base + _GAP
    legend(drawing, _LEFT + _WIDTH + 14, _TOP, [f"batch {batch}" for batch in batches])
    below = _TOP + 18.0 * len(batches)
    drawing.text(_LEFT + _WIDTH + 14, below, "hollow: does not fit", size=11.0)
    return drawing.svg(_LEFT + _WIDTH + _RIGHT, max(top, below) + 8)

"""Compare fxpart's predictions with sets of published measurements; print one line a set.

    python -m benchmarks.truth --data FOLDER [--set NAME ...] [--worst 10] [--markdown]
        [--picture FILE] [--override latency=roofline ...]

The folder holds the files that the sets read; others published them, and they are not part of
fxpart. A set whose files are missing is skipped with a message. A set with `fit_note(data, rows)`
also prints the value of its fitted number that the rows not held out imply.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.text_table import markdown, table
from benchmarks.truth import (
    carried_curves,
    collectives,
    collectives_ring,
    end_to_end,
    finetune_memory,
    finetune_sharded,
    finetune_time,
    flexgen,
    gpt_fast,
    gpt_fast_products,
    kernel_attention,
    kernel_decode,
    kernel_gemm,
    kernels_interpolated,
    megatron_b200,
    megatron_b200_time,
    megatron_paper,
    megatron_paper_memory,
    offload,
    own_kernels,
    published_steps,
    served_tokens,
    single_gpu,
    single_gpu_time,
    timm_memory,
    vllm_cache,
    vtrain,
    vtrain_calibrated,
    vtrain_multi,
)
from benchmarks.truth.measured import add_data_argument
from benchmarks.truth.picture import picture
from benchmarks.truth.planned_run import ALSO
from benchmarks.truth.row import HEADS, Row, summary

__all__ = ["SETS", "main"]


class TruthSet(Protocol):
    """A module of this package with measurements of one kind."""

    NAME: str
    SOURCE: str
    """Who measured and published it, and under which licence."""

    def rows(self, data: Path) -> Iterator[Row]:
        """Yield a row for each measurement.

        Raises:
            FileNotFoundError: if `data` lacks the files of the set.

        """
        ...


SETS: tuple[TruthSet, ...] = (
    kernel_gemm,
    kernel_attention,
    kernel_decode,
    kernels_interpolated,
    carried_curves,
    collectives,
    collectives_ring,
    timm_memory,
    end_to_end,
    finetune_memory,
    finetune_sharded,
    finetune_time,
    flexgen,
    gpt_fast,
    gpt_fast_products,
    megatron_b200,
    megatron_b200_time,
    megatron_paper,
    megatron_paper_memory,
    offload,
    own_kernels,
    published_steps,
    served_tokens,
    single_gpu,
    single_gpu_time,
    vllm_cache,
    vtrain,
    vtrain_calibrated,
    vtrain_multi,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    options = _arguments(arguments)
    ALSO[:] = options.override
    lines: list[list[str]] = []
    worst: list[tuple[str, Row]] = []
    rows_of_set: dict[str, list[Row]] = {}
    notes: list[str] = []
    for truth_set in SETS:
        if options.set and truth_set.NAME not in options.set:
            continue
        try:
            rows = list(truth_set.rows(options.data))
        except FileNotFoundError as error:
            print(f"{truth_set.NAME} is skipped: there is no {error.filename}")
            continue
        lines += _lines(truth_set.NAME, rows)
        if fit_note := getattr(truth_set, "fit_note", None):
            notes.append(f"{truth_set.NAME}: {fit_note(options.data, rows)}")
        rows_of_set[truth_set.NAME] = rows
        rows.sort(key=lambda row: -abs(row.error))
        worst += [(truth_set.NAME, row) for row in rows[: options.worst]]
        print(f"{truth_set.NAME}: {truth_set.SOURCE}")
    show = markdown if options.markdown else table
    if lines:
        print("\n" + show(["set", "part", *HEADS], lines))
    if notes:
        print("\n" + "\n".join(notes))
    if options.picture and rows_of_set:
        options.picture.write_text(picture(rows_of_set), encoding="utf-8")
    if worst:
        print("\n" + show(["worst", "row", "predicted", "measured", "unit"], map(_cells, worst)))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [truth_set.NAME for truth_set in SETS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth")
    add_data_argument(parser)
    parser.add_argument("--set", nargs="+", choices=names, help="only these sets")
    parser.add_argument("--worst", type=int, default=0, help="also print N worst rows of each set")
    parser.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    parser.add_argument(
        "--override", nargs="+", default=[], help="appended to the overrides of each planned run"
    )
    parser.add_argument("--picture", type=Path, help="also draw the sets into this SVG file")
    return parser.parse_args(arguments)


def _lines(name: str, rows: Sequence[Row]) -> list[list[str]]:
    """Return a line for all rows, and one for the held-out rows if these are not all."""
    held_out = [row for row in rows if row.held_out]
    lines = [[name, "all", *summary(rows)]]
    if 0 < len(held_out) < len(rows):
        lines.append([name, "held out", *summary(held_out)])
    return lines


def _cells(set_row: tuple[str, Row]) -> list[str]:
    name, row = set_row
    return [name, row.label, f"{row.predicted:.6g}", f"{row.measured:.6g}", row.unit]


if __name__ == "__main__":
    main()

"""Print each set of published measurements beside what fxpart predicts for it, one line a set.

    python -m benchmarks.truth --data FOLDER [--set NAME ...] [--worst 10] [--markdown]
        [--picture FILE] [--override latency=roofline ...]

The folder holds the files that the sets name; they are of others and not part of fxpart. A set
whose files are not there is skipped with a sentence. A set with `asked_for(data, rows)` also says
what the rows that are not held out ask of the number that is fitted to them.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.text_table import markdown, table
from benchmarks.truth import (
    collectives,
    collectives_ring,
    end_to_end,
    finetune_memory,
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
from benchmarks.truth.picture import picture
from benchmarks.truth.planned_run import ALSO
from benchmarks.truth.row import HEADS, Row, summary

__all__ = ["SETS", "main"]


class TruthSet(Protocol):
    """A module of this package with measurements of one kind."""

    NAME: str
    SOURCE: str
    """Who measured and published it, and its licence."""

    def rows(self, data: Path) -> Iterator[Row]:
        """Yield a row for each measurement.

        Raises:
            FileNotFoundError: where `data` does not hold the files of the set.

        """
        ...


SETS: tuple[TruthSet, ...] = (
    kernel_gemm,
    kernel_attention,
    kernel_decode,
    kernels_interpolated,
    collectives,
    collectives_ring,
    timm_memory,
    end_to_end,
    finetune_memory,
    finetune_time,
    flexgen,
    gpt_fast,
    gpt_fast_products,
    megatron_b200,
    megatron_b200_time,
    megatron_paper,
    megatron_paper_memory,
    offload,
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
    asked = _arguments(arguments)
    # The folder itself, or the one that holds it beside other data.
    data = asked.data / "truth" if (asked.data / "truth").is_dir() else asked.data
    ALSO[:] = asked.override
    lines: list[list[str]] = []
    worst: list[tuple[str, Row]] = []
    drawn: dict[str, list[Row]] = {}
    fitted: list[str] = []
    for truth_set in SETS:
        if asked.set and truth_set.NAME not in asked.set:
            continue
        try:
            rows = list(truth_set.rows(data))
        except FileNotFoundError as error:
            print(f"{truth_set.NAME} is skipped: there is no {error.filename}")
            continue
        lines += _lines(truth_set.NAME, rows)
        if asked_for := getattr(truth_set, "asked_for", None):
            fitted.append(f"{truth_set.NAME}: {asked_for(data, rows)}")
        drawn[truth_set.NAME] = rows
        rows.sort(key=lambda row: -abs(row.error))
        worst += [(truth_set.NAME, row) for row in rows[: asked.worst]]
        print(f"{truth_set.NAME}: {truth_set.SOURCE}")
    shown = markdown if asked.markdown else table
    if lines:
        print("\n" + shown(["set", "of it", *HEADS], lines))
    if fitted:
        print("\n" + "\n".join(fitted))
    if asked.picture and drawn:
        asked.picture.write_text(picture(drawn), encoding="utf-8")
    if worst:
        print("\n" + shown(["worst", "row", "predicted", "measured", "unit"], map(_cells, worst)))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [truth_set.NAME for truth_set in SETS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth")
    parser.add_argument("--data", type=Path, required=True, help="folder of the published files")
    parser.add_argument("--set", nargs="+", choices=names, help="only these sets")
    parser.add_argument("--worst", type=int, default=0, help="also print so many rows of each set")
    parser.add_argument("--markdown", action="store_true", help="as tables in Markdown")
    parser.add_argument(
        "--override", nargs="+", default=[], help="of each run that a set plans, after its own"
    )
    parser.add_argument("--picture", type=Path, help="also draw the sets into this SVG file")
    return parser.parse_args(arguments)


def _lines(name: str, rows: Sequence[Row]) -> list[list[str]]:
    """Return a line for all rows, and one for those held out where that is not the same."""
    held_out = [row for row in rows if row.held_out]
    lines = [[name, "all", *summary(rows)]]
    if 0 < len(held_out) < len(rows):
        lines.append([name, "held out", *summary(held_out)])
    return lines


def _cells(of_set: tuple[str, Row]) -> list[str]:
    name, row = of_set
    return [name, row.label, f"{row.predicted:.6g}", f"{row.measured:.6g}", row.unit]


if __name__ == "__main__":
    main()

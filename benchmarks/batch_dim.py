"""``python -m benchmarks.batch_dim [PART ...] [--out FOLDER]``: check the batch-dimension analysis.

For every node of small models, the result of `analyze_batch_dims` is compared with what two gloo
processes compute, each on half the batch, with the same random weights. Prints a row for each model
and writes every node to ``FOLDER/<case>.csv``, by default in ``outputs/batch_dim``.

``whole`` counts values replicated on every process, ``split`` those split along a dimension,
``sums`` and ``means`` partial values that are summed and averaged. ``all-reduces`` counts those an
operator needs before the end. Values that are not comparable differ by design: the reasons, with
their number of values, are listed below the table.
"""

import argparse
import csv
import sys
from collections import Counter
from dataclasses import astuple, fields
from functools import partial
from pathlib import Path

from benchmarks.batch_dim_cases import CASES, make_case
from benchmarks.batch_dim_run import Compared, compare
from benchmarks.text_table import table

HEADS = (
    "graph",
    "values",
    "whole",
    "split",
    "sums",
    "means",
    "all-reduces",
    "by size",
    "right",
    "wrong",
    "not comparable",
)


def _row(name: str, rows: list[Compared]) -> list[str]:
    verdicts = Counter(row.verdict for row in rows)
    counts = (
        len(rows),
        sum(row.dim == -1 for row in rows),
        sum(row.dim >= 0 for row in rows),
        sum(row.dim == -2 and row.scale == 0 for row in rows),
        sum(row.dim == -2 and row.scale != 0 for row in rows),
        sum(bool(row.all_reduced) for row in rows),
        sum(row.by_size for row in rows),
        verdicts["right"],
        verdicts["wrong"],
        verdicts["not comparable"],
    )
    return [name, *map(str, counts)]


def _write(path: Path, rows: list[Compared]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Compared)])
        writer.writerows(astuple(row) for row in rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_dim", description=__doc__)
    parser.add_argument("parts", nargs="*", help="run only cases whose name contains one of these")
    parser.add_argument("--out", type=Path, default=Path("outputs") / "batch_dim")
    return parser.parse_args()


def main() -> int:
    """Print the table; return 1 if a result is wrong."""
    options = _arguments()
    folder: Path = options.out
    lines, reasons, wrong = [], Counter[str](), list[str]()
    names = [n for n in CASES if not options.parts or any(part in n for part in options.parts)]
    for name, (rows, unmatched) in zip(
        names, compare([partial(make_case, name) for name in names]), strict=True
    ):
        _write(folder / f"{name.replace(', ', '_').replace(' ', '_')}.csv", rows)
        lines.append(_row(name, rows))
        reasons.update(row.note for row in rows if row.verdict == "not comparable")
        wrong += [
            f"{name}: {row.name} ({row.target}) {row.dim}: {row.note}"
            for row in rows
            if row.verdict == "wrong"
        ]
        wrong += [f"{name}: {node} is not in all graphs" for node in unmatched]
    print(table(HEADS, lines))
    for reason, count in reasons.most_common():
        print(f"not comparable, {count} values: {reason}")
    for line in wrong:
        print(f"wrong: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Curves carried to other devices by their peaks, compared with kernels measured there.

    python -m benchmarks.truth.carried_curves [--markdown]

also prints them by device and kind, beside the curves of families that are fitted to those tables,
and the curves of the device's file with tables (`latency.tables=aiconfigurator`), both for the rows
held out of fit and interpolation. The tables are those of the package aiconfigurator-core; nothing
in a carried curve is fitted to them.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.text_table import markdown, table
from benchmarks.truth.kernel_tables import (
    FAMILIES,
    INSTALLED_DEVICES,
    kernel_rows,
    read_installed,
)
from benchmarks.truth.kernels_interpolated import interpolated_rows
from benchmarks.truth.measured import skipped_without_files
from benchmarks.truth.row import HEADS, Row, summary
from fxpart.cost.curves.tables import KINDS

__all__ = ["NAME", "SOURCE", "main", "rows"]

NAME = "carried_curves"
SOURCE = "ai-dynamo/aiconfigurator, aiconfigurator-core 0.12 (Apache-2.0), 16 bits"
_CARRIED = {"h200": "h100", "b200": "h100", "l40s": "a100"}
"""The family whose curves are carried to each device."""


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each kernel of the devices in `_CARRIED`; `data` is not read.

    Raises:
        FileNotFoundError: if the package is not installed.

    """
    for accelerator, family in _CARRIED.items():
        for kind in KINDS:
            yield from _rows(accelerator, kind, family)


def _rows(accelerator: str, kind: str, family: str) -> Iterator[Row]:
    curve = getattr(FAMILIES[family], KINDS[kind])
    is_carried = family == _CARRIED[accelerator]
    for row in kernel_rows(read_installed(accelerator, kind), curve):
        if is_carried or row.held_out:
            yield Row(row.label, row.predicted, row.measured, row.unit, held_out=True)


@skipped_without_files(NAME)
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the errors of each device and kind."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth.carried_curves")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    options = parser.parse_args(arguments)
    lines = []
    for accelerator, carried in _CARRIED.items():
        own = INSTALLED_DEVICES[accelerator].curves
        for kind, curve in KINDS.items():
            kernels = read_installed(accelerator, kind)
            with_tables = interpolated_rows(kernels, getattr(FAMILIES[own], curve))
            parts = {f"{carried}, carried": _rows(accelerator, kind, carried)}
            if own != carried:
                parts[f"{own}, fitted"] = _rows(accelerator, kind, own)
            parts[f"{own}, with tables"] = with_tables
            lines += [[accelerator, kind, how, *summary(list(p))] for how, p in parts.items()]
    show = markdown if options.markdown else table
    print(show(["device", "kernels", "curves", *HEADS], lines))


if __name__ == "__main__":
    main()

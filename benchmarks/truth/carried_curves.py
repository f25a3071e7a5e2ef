"""Curves carried to other devices by their peaks, compared with kernels measured there.

    python -m benchmarks.truth.carried_curves [--markdown]

also prints them by device and kind, beside the curves of families that are fitted to those tables,
and the curves of the device's file with tables (`latency.tables=aiconfigurator`), both for the rows
held out of fit and interpolation. The tables are those of the package aiconfigurator-core; nothing
in a carried curve is fitted to them. After the kernels it prints NCCL's collectives; those of
devices without curves for them, over PCIe, are rings at the rate of the link.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.text_table import markdown, table
from benchmarks.truth.collectives import message_rows
from benchmarks.truth.kernel_tables import (
    FAMILIES,
    INSTALLED_DEVICES,
    kernel_rows,
    read_installed,
)
from benchmarks.truth.kernels_interpolated import interpolated_rows
from benchmarks.truth.measured import skipped_without_files
from benchmarks.truth.nccl_tables import KINDS as COLLECTIVES
from benchmarks.truth.nccl_tables import read_installed_messages
from benchmarks.truth.row import HEADS, Row, summary
from fxpart.cost.curves.tables import KINDS

__all__ = ["NAME", "SOURCE", "main", "rows"]

NAME = "carried_curves"
SOURCE = "ai-dynamo/aiconfigurator, aiconfigurator-core 0.12 (Apache-2.0), 16 bits"
_CARRIED = {"h200": "h100", "b200": "h100", "l40s": "a100"}
"""The family whose curves are carried to each device."""
_PCIE_LATENCY_S = 10e-6
"""As in ``conf/transfer_rate/pcie4.yaml``."""


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


def _lines_of_collectives() -> Iterator[list[str]]:
    """Yield a line for each device, collective and source of its times.

    A family fitted to the rows is compared with those held out of the fit, others with all rows.
    """
    for accelerator, carried in _CARRIED.items():
        own = INSTALLED_DEVICES[accelerator].curves
        for kind in COLLECTIVES.values():
            measured = read_installed_messages(accelerator, kind)
            parts: dict[str, list[Row]] = {}
            if FAMILIES[own].collectives:
                of_carried = FAMILIES[carried].collectives
                parts[f"{carried}, carried"] = list(message_rows(kind, measured, of_carried))
                if own != carried:
                    fitted = message_rows(kind, measured, FAMILIES[own].collectives)
                    parts[f"{own}, fitted"] = [row for row in fitted if row.held_out]
            else:
                parts["rings"] = list(message_rows(kind, measured, None, _PCIE_LATENCY_S))
            for how, part in parts.items():
                yield [accelerator, kind, how, *summary(part)]


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
    lines += _lines_of_collectives()
    show = markdown if options.markdown else table
    print(show(["device", "kernels", "curves", *HEADS], lines))


if __name__ == "__main__":
    main()

"""What a run says in the terminal: tables and a summary line on stdout, progress on stderr.

Rich is imported where it is used, so that a run that only prints its help does not pay for it.
"""

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from fxpart.cost.evaluation import DeviceUse, Evaluation
from runner.units import Unit, format_ids, format_size, size_unit, time_unit

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

__all__ = ["device_table", "progress", "show", "summary_line", "sweep_reasons", "sweep_table"]

SETTINGS = ("model", "mode", "devices", "transfer_rate")
MOST_IDLE = 8
PATIENCE_S = 1.0
"""A stage that takes no longer than this is not worth a word."""


def show(*parts: "Table | str", stream: TextIO | None = None) -> None:
    """Print tables and lines to `stream`, stdout by default.

    Colours only on a terminal; elsewhere plain text, 80 columns unless COLUMNS says otherwise.
    """
    from rich.console import Console

    console = Console(file=stream, markup=False, highlight=False, emoji=False)
    for part in parts:
        # A line that is too long is the terminal's to wrap: cut by us it is two lines in a log.
        console.print(part, soft_wrap=isinstance(part, str))


def summary_line(evaluation: Evaluation) -> str:
    """Return the outcome in one line; the gap is how far latency is above the lower bound."""
    e, times = evaluation, time_unit(evaluation.latency_s)
    digits = ",.1f" if e.throughput_per_s >= 10 else ".2f" if e.throughput_per_s >= 1 else ".3g"
    rate = format(e.throughput_per_s, digits)
    return (
        f"latency {times.show(e.latency_s)} {times.name}, {rate} inputs/s,"
        f" {_count(e.partitions, 'partition')} on {e.devices_used} of"
        f" {_count(len(e.devices), 'device')}, {format_size(e.transfer_bytes)} transferred,"
        f" lower bound {times.show(e.lower_bound_s)} {times.name} (gap {e.optimality_gap:.1%})"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def device_table(evaluation: Evaluation, *, binary: bool = True) -> "Table":
    """Return what each device holds and does; GiB, or with `binary` false GB, as headings say.

    Load is the time that a device computes, also in % of the latency. A name that all devices share
    is in the title; of many idle devices only the number is said.
    """
    devices = evaluation.devices
    sizes = size_unit(max(use.memory_bytes for use in devices), binary=binary)
    held = size_unit(evaluation.peak_bytes, binary=binary)
    received = size_unit(max(use.received_bytes for use in devices), binary=binary)
    times = time_unit(evaluation.latency_s)
    names = {use.name for use in devices}
    alike = len(devices) > 1 and len(names) == 1
    table = _empty_table(_count(len(devices), "device") + (f", {names.pop()}" if alike else ""))
    _add_numbers(table, "id")
    if not alike:
        table.add_column("accelerator", overflow="fold")
    table.add_column("parts", overflow="fold")
    _add_numbers(table, "ops", f"weights\n{held.name}", f"peak\n{held.name}")
    _add_numbers(table, f"memory\n{sizes.name}", f"free\n{sizes.name}")
    _add_numbers(table, f"load\n{times.name}", "load\n%", f"received\n{received.name}")
    idle = sum(1 for use in devices if not use.operators)
    for use in devices:
        cells = _device_cells(use, evaluation.latency_s, (held, sizes, received), times)
        if alike:
            del cells[1]
        if use.operators or idle <= MOST_IDLE:
            table.add_row(*cells, style="" if use.operators else "dim")
    if idle > MOST_IDLE:
        table.caption = f"and {idle} idle devices"
    return table


def _device_cells(
    use: DeviceUse, latency_s: float, sizes: tuple[Unit, Unit, Unit], times: Unit
) -> list[str]:
    held, whole, received = sizes
    partitions = format_ids(use.partitions)
    if len(partitions) > 12:
        partitions = f"{len(use.partitions)} parts"
    share = use.load_s / latency_s if latency_s > 0 else 0.0
    return [
        str(use.logical_id),
        use.name,
        partitions,
        str(use.operators),
        held.show(use.weight_bytes),
        held.show(use.peak_bytes),
        whole.show(use.memory_bytes),
        whole.show(use.free_bytes),
        times.show(use.load_s),
        f"{share * 100:.0f}",
        received.show(use.received_bytes),
    ]


def sweep_table(rows: Sequence[Mapping[str, object]]) -> "Table":
    """Return the runs of a sweep, fastest first for each model, those without a result last.

    A row has ``mode``, ``devices``, ``transfer_rate``, ``model``, ``latency_ms``,
    ``peak_memory_gib``, ``partitions``, ``gap`` (0.1 is 10 % above the lower bound) and
    ``feasible``; a missing number shows as ``-``. A setting that all rows share is in the title.
    The best of each model, equals included, has a ``*``. Why a row has no result: `sweep_reasons`.
    """
    varied = [key for key in SETTINGS if key == "mode" or len({str(r.get(key)) for r in rows}) > 1]
    shared = [f"{key}={rows[0].get(key, '-')}" for key in SETTINGS if rows and key not in varied]
    table = _empty_table(", ".join([_count(len(rows), "run"), *shared]))
    table.add_column("")
    for key in varied:
        table.add_column(key.replace("_", " "), overflow="fold")
    _add_numbers(table, "latency\nms", "gap\n%", "peak\nGiB", "parts")
    ranked = sorted((row for row in rows if _finished(row)), key=_rank)
    best: dict[str, float] = {}
    for row in ranked:
        best.setdefault(str(row.get("model")), _number(row, "latency_ms"))
    for row in [*ranked, *(row for row in rows if not _finished(row))]:
        leads = _finished(row) and _number(row, "latency_ms") == best[str(row.get("model"))]
        style = "bold" if leads else "" if _finished(row) else "dim"
        settings = [str(row.get(key, "-")) for key in varied]
        table.add_row("*" if leads else "", *settings, *_measures(row), style=style)
    if ranked:
        table.caption = "* lowest latency" + (" for its model" if len(best) > 1 else "")
    return table


def sweep_reasons(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return one line for each row without a result: its settings and why (``reason``)."""
    return [
        " ".join(f"{key}={row[key]}" for key in SETTINGS if key in row)
        + f": {row.get('reason') or _measures(row)[0]}"
        for row in rows
        if not _finished(row)
    ]


def _finished(row: Mapping[str, object]) -> bool:
    return row.get("feasible") is True and isinstance(row.get("latency_ms"), int | float)


def _rank(row: Mapping[str, object]) -> tuple[str, float, str]:
    settings = " ".join(str(row.get(key)) for key in SETTINGS)
    return str(row.get("model")), _number(row, "latency_ms"), settings


def _number(row: Mapping[str, object], key: str) -> float:
    value = row[key]
    return float(value) if isinstance(value, int | float) else float("nan")


def _measures(row: Mapping[str, object]) -> list[str]:
    if not _finished(row):
        return ["infeasible" if row.get("feasible") is False else "failed", "-", "-", "-"]
    gap, peak, partitions = (row.get(key) for key in ("gap", "peak_memory_gib", "partitions"))
    return [
        f"{_number(row, 'latency_ms'):,.3f}",
        f"{gap * 100:.1f}" if isinstance(gap, int | float) else "-",
        f"{peak:.3f}" if isinstance(peak, int | float) else "-",
        "-" if partitions is None else str(partitions),
    ]


def _add_numbers(table: "Table", *headings: str) -> None:
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)


def _empty_table(title: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


@contextmanager
def progress(label: str, *, stream: TextIO | None = None) -> Iterator[None]:
    """Say on stderr that `label` is under way, but only if it takes more than a second.

    A terminal shows a spinner and the elapsed time meanwhile. In the end, everywhere, one line says
    how long it took; a log gets no more than that line.
    """
    out = stream or sys.stderr
    start_s = time.monotonic()
    spinner = _LateSpinner(label, out, start_s) if out.isatty() else None
    outcome = "failed after"
    try:
        yield
        outcome = "took"
    finally:
        if spinner:
            spinner.stop()
        elapsed_s = time.monotonic() - start_s
        if elapsed_s > PATIENCE_S:
            with suppress(OSError, ValueError):  # whoever read stderr may be gone
                out.write(f"{label} {outcome} {elapsed_s:.1f} s\n")
                out.flush()


class _LateSpinner:
    """A spinner that starts by itself after `PATIENCE_S`, unless it was stopped by then."""

    def __init__(self, label: str, stream: TextIO, start_s: float) -> None:
        self._label, self._stream, self._start_s = label, stream, start_s
        self._lock = threading.Lock()
        self._stopped = False
        self._running: Progress | None = None
        self._timer = threading.Timer(PATIENCE_S, self._start)
        self._timer.daemon = True
        self._timer.start()

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        running = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=Console(file=self._stream, markup=False, emoji=False),
            transient=True,
            redirect_stdout=False,  # results may be piped elsewhere; they must not end up here
        )
        with self._lock:
            if not self._stopped:
                task = running.add_task(self._label, total=None)
                running.tasks[task].start_time = self._start_s
                running.start()
                self._running = running

    def stop(self) -> None:
        """Take the spinner away, or keep it from coming."""
        self._timer.cancel()
        with self._lock:
            self._stopped = True
        if self._running:
            self._running.stop()

"""What a run says in the terminal: tables and a summary line on stdout, progress on stderr.

Rich is imported where it is used, so that a run that only prints its help does not pay for it.
"""

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from time import monotonic
from typing import TYPE_CHECKING, TextIO

from fxpart.cost.evaluation import DeviceUse, Evaluation
from runner.output.units import Unit, format_ids, format_size, size_unit, time_unit

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

__all__ = [
    "add_numbers",
    "counted",
    "device_table",
    "empty_table",
    "progress",
    "reserve_text",
    "show",
    "summary_line",
    "without_progress",
]

_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)
MOST_IDLE = 8
PATIENCE_S = 1.0
"""A stage that takes no longer than this is not worth a word."""


def show(*parts: "Table | str") -> None:
    """Print tables and lines to stdout.

    Colours only on a terminal; elsewhere plain text, 80 columns unless COLUMNS says otherwise.
    """
    from rich.console import Console

    class Lasting(Console):
        """Goes on without a reader; rich would end the program, before its result is recorded."""

        def on_broken_pipe(self) -> None:
            self.quiet = True
            # What Python flushes at its exit must not fail either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    console = Lasting(markup=False, highlight=False, emoji=False)
    for part in parts:
        # A line that is too long is the terminal's to wrap: cut by us it is two lines in a log.
        console.print(part, soft_wrap=isinstance(part, str))


def summary_line(evaluation: Evaluation, batch_size: int = 1) -> str:
    """Return the outcome in one line; the gap is how far latency is above the lower bound.

    An input has `batch_size` examples.
    """
    e, times = evaluation, time_unit(evaluation.latency_s)
    rate = f"{_rate(e.throughput_per_s)} inputs/s"
    if batch_size > 1:
        rate += f" ({_rate(e.throughput_per_s * batch_size)} examples/s)"
    turns = f", up to {e.replicas} replicas in turn" if e.replicas > 1 else ""
    return (
        f"latency {times.show(e.latency_s)} {times.name}, {rate},"
        f" {counted(e.partitions, 'partition')} on {e.devices_used} of"
        f" {counted(len(e.devices), 'device')}{turns}, {format_size(e.transfer_bytes)} transferred,"
        f" lower bound {times.show(e.lower_bound_s)} {times.name} (gap {e.optimality_gap:.1%})"
    )


def _rate(per_s: float) -> str:
    return format(per_s, ",.1f" if per_s >= 10 else ".2f" if per_s >= 1 else ".3g")


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return the number with its noun, such as ``1 run`` or ``2 runs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def device_table(evaluation: Evaluation) -> "Table":
    """Return what each device holds and does.

    Load is the time that a device computes, also in % of the latency. A name that all devices share
    is in the title, and so is what is reserved of them: free is what is left for tensors. The state
    of an optimizer has a column where there is any. Of many idle devices only the number is said.
    """
    devices = evaluation.devices
    sizes = size_unit(max(use.total_bytes for use in devices))
    held = size_unit(evaluation.peak_bytes)
    received = size_unit(max(use.received_bytes for use in devices))
    times = time_unit(evaluation.latency_s)
    names = {use.name for use in devices}
    alike = len(devices) > 1 and len(names) == 1
    with_state = any(use.state_bytes for use in devices)
    reserved = reserve_text([use.reserved_bytes for use in devices])
    title = [counted(len(devices), "device"), names.pop() if alike else "", reserved]
    table = empty_table(", ".join(part for part in title if part))
    add_numbers(table, "id")
    if not alike:
        table.add_column("accelerator", overflow="fold")
    table.add_column("parts", overflow="fold")
    state = [f"state\n{held.name}"] if with_state else []
    add_numbers(table, "ops", f"weights\n{held.name}", *state, f"peak\n{held.name}")
    add_numbers(table, f"memory\n{sizes.name}", f"free\n{sizes.name}")
    add_numbers(table, f"load\n{times.name}", "load\n%", f"received\n{received.name}")
    idle = sum(1 for use in devices if not use.operators)
    for use in devices:
        cells = _device_cells(use, evaluation.latency_s, (held, sizes, received), times)
        if not with_state:
            del cells[5]
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
        held.show(use.state_bytes),
        held.show(use.peak_bytes),
        whole.show(use.total_bytes),
        whole.show(use.free_bytes),
        times.show(use.load_s),
        f"{share * 100:.0f}",
        received.show(use.received_bytes),
    ]


def reserve_text(reserved_bytes: Sequence[int]) -> str:
    """Return what is not for tensors, such as ``0.56 GiB of each reserved``, or ``""`` for nothing.

    `reserved_bytes` has an item for each device.
    """
    most, least = max(reserved_bytes), min(reserved_bytes)
    if not most:
        return ""
    unit = size_unit(most)
    many = "of each " if len(reserved_bytes) > 1 else ""
    amount = unit.show(most) if most == least else f"{unit.show(least)} to {unit.show(most)}"
    return f"{amount} {unit.name} {many}reserved"


def add_numbers(table: "Table", *headings: str) -> None:
    """Add a column of numbers for each heading."""
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)


def empty_table(title: str) -> "Table":
    """Return a table with our lines and margins, without columns."""
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
def without_progress() -> Iterator[None]:
    """Keep `progress` silent in the block, as for the jobs of a sweep."""
    before = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(before)


@contextmanager
def progress(label: str) -> Iterator[None]:
    """Say on stderr that `label` is under way, but only if it takes more than a second.

    A terminal shows a spinner and the elapsed time meanwhile. In the end, everywhere, one line says
    how long it took; a log gets no more than that line. Nothing is said in `without_progress`.
    """
    if _QUIET.get():
        yield
        return
    out = sys.stderr
    start_s = monotonic()
    spinner = _LateSpinner(label, out, start_s) if out.isatty() else None
    outcome = "failed after"
    try:
        yield
        outcome = "took"
    finally:
        if spinner:
            spinner.stop()
        elapsed_s = monotonic() - start_s
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

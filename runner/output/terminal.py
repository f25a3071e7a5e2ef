"""The terminal output of a run: tables and lines on stdout, progress on stderr.

Rich is imported lazily to keep `--help` fast.
"""

import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, TextIO

from fxpart.cost.evaluation import DeviceUse, Evaluation
from runner.output.metrics import DEVICE_METRICS, DeviceMetric
from runner.output.stdout import discard, stop_printing
from runner.output.units import Unit, format_ids, format_size, size_unit, time_unit

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

__all__ = [
    "COLUMN_GAP",
    "add_numbers",
    "columns_shown",
    "counted",
    "device_table",
    "empty_table",
    "progress",
    "rate_text",
    "reserve_text",
    "show",
    "summary_line",
    "without_progress",
]

_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)
MOST_IDLE = 8
"""Most idle devices with rows; of more only the number is shown."""
COLUMN_GAP = 2
"""Spaces after a column of a table."""
_WIDEST = 10_000
"""A width larger than any table, within which rich neither wraps nor truncates."""
PATIENCE_S = 1.0
"""Shorter work is not reported."""


def show(*parts: "Table | str") -> None:
    """Print tables and lines to stdout, in colour on a terminal and as plain text elsewhere.

    Cells are not wrapped, so callers must make tables fit `columns_shown`. Lines of plain text have
    no trailing spaces.
    """
    from rich.console import Console

    class Lasting(Console):
        """Survives a closed pipe, where rich would exit before the result is recorded."""

        def on_broken_pipe(self) -> None:
            self.quiet = True
            discard(sys.stdout)

    console = Lasting(markup=False, highlight=False, emoji=False)
    try:
        for part in parts:
            if isinstance(part, str):
                # Terminals wrap long lines; wrapping them here would split them in logs.
                console.print(part, soft_wrap=True)
            elif console.is_terminal:
                console.print(part, width=_WIDEST, crop=False, no_wrap=True)
            else:
                with console.capture() as captured:
                    console.print(part, width=_WIDEST, crop=False, no_wrap=True)
                lines = [line.rstrip() for line in captured.get().splitlines()]
                console.print("\n".join(lines), soft_wrap=True)
    except OSError as error:  # the result must be recorded even if, say, a log is on a full disk
        stop_printing(error)


def columns_shown() -> int:
    """Return the width of the output: without a terminal, that in COLUMNS or 80 columns."""
    from rich.console import Console

    return Console().width


def summary_line(
    evaluation: Evaluation,
    rate: str | None,
    *,
    with_gap: bool = True,
    group: int = 1,
    replicas: int = 1,
    subject: str = "",
    n_devices: int | None = None,
) -> str:
    """Return a line that summarizes the result.

    Args:
        evaluation: the cost of the placement.
        rate: the throughput as text; None if another line has it.
        with_gap: whether to show the lower bound and the gap of the latency to it. The bound is for
            a single input, not for schedules or replicas.
        group: number of devices that each device of `evaluation` stands for.
        replicas: number of replicas of all these devices.
        subject: text naming what the latency is of, such as the last token; empty for the whole.
        n_devices: number of devices, after which `evaluation` may have the host as a tier that
            computes.

    """
    e, times = evaluation, time_unit(evaluation.latency_s)
    uses = e.devices[:n_devices]
    used = sum(1 for use in uses if use.operators)
    throughput = "" if rate is None else f" {rate},"
    turns = f", up to {e.replicas} replicas in turn" if e.replicas > 1 else ""
    bound = (
        f", lower bound for whole operators {times.show(e.lower_bound_s)} {times.name}"
        f" (gap {e.optimality_gap:.1%})"
    )
    scope = f" in each of {replicas} replicas" if replicas > 1 else ""
    return (
        f"latency{subject} {times.show(e.latency_s)} {times.name},{throughput}"
        f" {counted(e.partitions, 'partition')} on {used * group} of"
        f" {counted(len(uses) * group, 'device')}{_idle(uses)}{_host(e, n_devices)}{scope}{turns},"
        f" {format_size(e.transfer_bytes)} transferred{bound if with_gap else ''}"
    )


def _host(evaluation: Evaluation, n_devices: int | None) -> str:
    """Return text saying that the host computes too, if it has a row after the devices."""
    return "" if n_devices in {None, len(evaluation.devices)} else " and the host"


def _idle(devices: Sequence[DeviceUse]) -> str:
    """Return the idle devices in parentheses; empty if there are none."""
    idle = tuple(use.logical_id for use in devices if not use.operators)
    return f" (device{'s' if len(idle) > 1 else ''} {format_ids(idle)} idle)" if idle else ""


def rate_text(per_s: float, noun: str = "examples") -> str:
    """Return a throughput with its unit, such as ``1.70 examples/s``."""
    digits = ",.1f" if per_s >= 10 else ".2f" if per_s >= 1 else ".3g"
    return f"{per_s:{digits}} {noun}/s"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return the number with its noun, such as ``1 run`` or ``2 runs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def device_table(
    evaluation: Evaluation,
    group: int = 1,
    *,
    with_memory: bool = True,
    n_devices: int | None = None,
) -> "Table":
    """Return the table of devices: memory, load and transfers.

    Load is the time that a device computes, also in % of the latency. The title has a name shared
    by all devices, and their reserve; free memory is what remains for tensors. Optional columns,
    such as optimizer states, appear only if not zero. Of many idle devices only the number is
    shown. A narrow terminal omits the least important columns, and those that follow from others.

    Args:
        evaluation: the cost of the placement.
        group: number of devices that each row stands for; the numbers are those of one of them.
        with_memory: whether to show the peak and free memory. A published problem states only the
            sizes of weights.
        n_devices: number of devices, after which `evaluation` may have the host as a tier that
            computes.

    """
    devices = evaluation.devices
    names = {use.name for use in devices}
    share_name = len(devices) > 1 and len(names) == 1
    reserved = reserve_text([use.reserved_bytes for use in devices])
    many = counted(len(devices[:n_devices]), "device") + _host(evaluation, n_devices)
    if group > 1:
        many = f"{counted(len(devices), 'group')} of {group} devices"
    title = [many, names.pop() if share_name else "", reserved]
    table = empty_table(", ".join(part for part in title if part))
    idle = sum(1 for use in devices if not use.operators)
    shown = [use for use in devices if use.operators or idle <= MOST_IDLE]
    left_out = {"accelerator"} if share_name else set()
    left_out |= set() if with_memory else {"peak_gib", "free_gib"}
    columns = _device_columns(evaluation, shown, left_out)
    fitting = _that_fit(columns, columns_shown())
    for column in fitting:
        table.add_column(column.heading, justify="right" if column.is_number else "left")
    for use, *cells in zip(shown, *(column.cells for column in fitting), strict=True):
        table.add_row(*cells, style="" if use.operators else "dim")
    notes = [f"and {idle} idle devices"] if idle > MOST_IDLE else []
    if hidden := [column.label for column in columns if column not in fitting]:
        notes.append(f"not shown, for want of columns: {', '.join(hidden)}")
    table.caption = "\n".join(notes) or None
    return table


class _Column(NamedTuple):
    """A column of the table of devices."""

    heading: str
    cells: list[str]
    is_number: bool
    spare: int
    """Order in which a narrow table drops it; 0 is never."""

    @property
    def label(self) -> str:
        return self.heading.replace("\n", " ")

    @property
    def width(self) -> int:
        return max(map(len, (*self.heading.splitlines(), *self.cells)))


def _that_fit(columns: Sequence[_Column], width: int) -> list[_Column]:
    """Return the columns that fit `width`, dropping others in the order of their `spare`."""
    shown = list(columns)
    for left_out in range(1, max(column.spare for column in columns) + 1):
        if sum(column.width + COLUMN_GAP for column in shown) <= width:
            break
        shown = [column for column in columns if not 0 < column.spare <= left_out]
    return shown


def _device_columns(
    evaluation: Evaluation, shown: Sequence[DeviceUse], left_out: Collection[str]
) -> list[_Column]:
    """Return the columns with cells for the devices `shown`, without the metrics `left_out`."""
    devices, latency_s = evaluation.devices, evaluation.latency_s
    units = {
        "held": size_unit(evaluation.peak_bytes),
        "memory": size_unit(max(use.total_bytes for use in devices)),
        "load": time_unit(latency_s),
        "received": size_unit(max(use.received_bytes for use in devices)),
    }
    columns = []
    for metric in DEVICE_METRICS:
        empty = metric.optional and not any(map(metric.amount, devices))
        if not metric.heading or empty or metric.name in left_out:
            continue
        unit = units.get(metric.scale)
        heading = f"{metric.heading}\n{unit.name}" if unit else metric.heading
        cells = [_device_cell(metric, use, unit) for use in shown]
        is_number = metric.name not in ("accelerator", "partitions")
        columns.append(_Column(heading, cells, is_number, metric.spare))
        if metric.name == "load_ms":
            shares = [use.load_s / latency_s if latency_s > 0 else 0.0 for use in shown]
            cells = [f"{share * 100:.0f}" for share in shares]
            columns.append(_Column(f"{metric.heading}\n%", cells, is_number=True, spare=1))
    return columns


def _device_cell(metric: DeviceMetric, use: DeviceUse, unit: Unit | None) -> str:
    if metric.name == "partitions":
        ids = format_ids(use.partitions)
        return ids if len(ids) <= 12 else f"{len(use.partitions)} parts"
    amount = metric.amount(use)
    return unit.show(float(amount)) if unit else str(amount)


def reserve_text(reserved_bytes: Sequence[int]) -> str:
    """Return the reserve as text, such as ``0.56 GiB of each reserved``; empty for none.

    `reserved_bytes` has an item for each device.
    """
    highest, lowest = max(reserved_bytes), min(reserved_bytes)
    if not highest:
        return ""
    unit = size_unit(highest)
    many = "of each " if len(reserved_bytes) > 1 else ""
    amount = (
        unit.show(highest) if highest == lowest else f"{unit.show(lowest)} to {unit.show(highest)}"
    )
    return f"{amount} {unit.name} {many}reserved"


def add_numbers(table: "Table", *headings: str) -> None:
    """Add a column of numbers for each heading."""
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)


def empty_table(title: str) -> "Table":
    """Return a table in our style, without columns."""
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
    """Silence `progress` in the block, as in the jobs of a sweep."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


def quiet() -> bool:
    """Return whether progress is silenced (`without_progress`)."""
    return _QUIET.get()


@contextmanager
def progress(label: str) -> Iterator[None]:
    """Report the work `label` on stderr, if it takes more than a second.

    A terminal shows a spinner with the elapsed time. At the end a line says how long it took, also
    in a log. Nothing is reported in `without_progress`.
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
    except KeyboardInterrupt:
        outcome = "interrupted after"
        raise
    finally:
        if spinner:
            spinner.stop()
        elapsed_s = monotonic() - start_s
        if elapsed_s > PATIENCE_S:
            with suppress(OSError, ValueError):  # the reader of stderr may be gone
                out.write(f"{label} {outcome} {elapsed_s:.1f} s\n")
                out.flush()


class _LateSpinner:
    """A spinner that starts after `PATIENCE_S`, unless it has been stopped."""

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
            redirect_stdout=False,  # stdout may be piped elsewhere
        )
        with self._lock:
            if not self._stopped:
                task = running.add_task(self._label, total=None)
                running.tasks[task].start_time = self._start_s
                running.start()
                self._running = running

    def stop(self) -> None:
        """Remove the spinner, or prevent it from starting."""
        self._timer.cancel()
        with self._lock:
            self._stopped = True
        if self._running:
            self._running.stop()

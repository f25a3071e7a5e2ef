"""`profile_operators`: measure the time of each operator of a program, cached on disk."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.export import ExportedProgram

from fxpart.core.graph import OpGraph
from fxpart.cost.profile import OperatorProfile
from fxpart.errors import CacheError, SpecError
from fxpart.execution.device import checked_device
from fxpart.execution.profiling.passes import measure, measured_on
from fxpart.execution.profiling.steps import Step, shapes_of, steps_of
from fxpart.execution.profiling.tensors import placeholders_of
from fxpart.support.digest import stable_digest
from fxpart.support.file_lock import file_lock
from fxpart.support.host import installed_version
from fxpart.support.json_file import read_document
from fxpart.support.whole_file import write_whole

__all__ = ["OperatorTime", "profile_operators", "read_times", "times_path", "write_times"]


_SCHEMA, _VERSION = "fxpart-operator-times", 1
_ADVICE = "make the folder writable, or name another one"
_MOST_S = 1e9
"""Upper limit of a plausible stored time, in seconds."""


# Times on disk: one JSON file for each device and version of torch, so that operators of the same
# shapes in another model are not measured again. Several writers may add entries to a file, under a
# lock if the system supports one. The folder can be deleted at any time.


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """Measured time of one signature."""

    target: str
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the operands, for human readers."""
    seconds: float
    """Median of the samples."""
    samples: int
    lost_share: float = 0.0
    """Share of the measurement in which the processor ran other work."""

    def is_better(self, other: "OperatorTime") -> bool:
        """Return whether this has more samples, or lost less time, and is not worse otherwise."""
        own, others = (self.samples, -self.lost_share), (other.samples, -other.lost_share)
        return own != others and all(x >= y for x, y in zip(own, others, strict=True))


def times_path(cache_dir: Path, device_name: str) -> Path:
    """Return the path of a device's times, which need not exist."""
    parts = {"device": device_name, "torch": installed_version("torch"), "version": _VERSION}
    return cache_dir / f"operators-{stable_digest(parts)[:32]}.json"


def read_times(path: Path) -> dict[str, OperatorTime]:
    """Return the file's entries by signature; empty if it is missing or damaged."""
    try:
        entries = read_document(path, _SCHEMA, _VERSION)["entries"]
        return {str(name): _operator_time(entry) for name, entry in sorted(entries.items())}
    except (SpecError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return {}


def _operator_time(entry: Mapping[str, object]) -> OperatorTime:
    seconds, samples, shapes = entry["seconds"], entry["samples"], entry["shapes"]
    if not isinstance(seconds, float | int) or not 0 <= seconds < _MOST_S:
        raise ValueError(f"seconds are {seconds!r}")
    if not isinstance(samples, int) or samples < 1 or not isinstance(shapes, list):
        raise ValueError(f"samples are {samples!r}")
    listed = tuple(tuple(int(size) for size in shape) for shape in shapes)
    lost_share = entry.get("lost_share", 0.0)
    if not isinstance(lost_share, float | int) or not 0 <= lost_share <= 1:
        raise ValueError(f"lost_share is {lost_share!r}")
    return OperatorTime(str(entry["target"]), listed, float(seconds), samples, float(lost_share))


def write_times(path: Path, entries: Mapping[str, OperatorTime]) -> None:
    """Add `entries` to the file, unless it has a better one of their signature.

    Raises:
        CacheError: if the folder cannot be written.

    """
    with _locked(path):
        merged = read_times(path)
        for name, entry in entries.items():
            existing = merged.get(name)
            if existing is None or not existing.is_better(entry):
                merged[name] = entry
        document = {
            "schema": _SCHEMA,
            "version": _VERSION,
            "entries": {
                name: {
                    "target": entry.target,
                    "shapes": entry.shapes,
                    "seconds": entry.seconds,
                    "samples": entry.samples,
                    "lost_share": entry.lost_share,
                }
                for name, entry in sorted(merged.items())
            },
        }
        write_whole(path, json.dumps(document, indent=1), _what(path), _ADVICE)


def _what(path: Path) -> str:
    return f"operator times to {path.parent}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of the file, if files can be locked.

    If not, entries of another writer may be lost and are measured again.
    """
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(file_lock(path.with_suffix(".lock")))
        except OSError as error:
            raise CacheError(
                f"cannot write {_what(path)}: {error.strerror or error}; {_ADVICE}"
            ) from error
        yield


def profile_operators(
    program: ExportedProgram,
    graph: OpGraph,
    *,
    device: str = "cpu",
    cache_dir: str | Path | None = None,
    repeats: int = 5,
    budget_s: float = 120.0,
    most_lost: float = 1.0,
) -> OperatorProfile:
    """Return the time of each operator of `program`, measured on this machine's `device`.

    `graph` is that of `program`: ``op_graph(program)``, or both from one `joint_capture`. The
    program may have been captured on the meta device: random weights and inputs are created when
    first needed and, if they would take much of the memory, dropped after their last use.

    Operators run in graph order, so that caches are in the state of a real run; an operator run
    repeatedly would find its data in them. Calls of one signature (target, shapes, strides, dtypes,
    other arguments) share one time: the median of `repeats` runs after an uncounted warm-up, since
    interruptions distort the mean and luck the minimum. Passes over the graph are repeated until
    every signature has its runs, and skip operators whose signature has them, so that forty equal
    layers take the time of a few. After `budget_s` seconds, only signatures without any run are
    measured: `OperatorProfile.samples` has the number of runs behind each time.

    With `cache_dir`, times are cached there by device, torch version and signature, and those of at
    least `repeats` samples are not measured again.

    Other work on the processor is detected by comparing two clocks. For a single thread, its own
    CPU time then counts, and `OperatorProfile.lost_share` reports the share of time lost to others,
    in this measurement or when cached times were measured. If it exceeds `most_lost`, cached times
    are measured again; several threads wait for each other, so their times are refused and not
    cached.

    Raises:
        SpecError: if the device is missing, `repeats` is below 1, the graph is of another program,
            sizes are symbolic, or several threads run on a busy machine.
        CaptureError: if an operator cannot be run on the device.
        CacheError: if the cache cannot be written.

    """
    deadline_s = time.perf_counter() + budget_s
    if repeats < 1:
        raise SpecError(f"repeats={repeats} measures nothing; give 1 or more")
    target = checked_device(device)
    steps, name = steps_of(program, graph, target), measured_on(target)
    path = times_path(Path(cache_dir), name) if cache_dir else None
    stored = read_times(path) if path else {}
    measured_signatures = frozenset(
        key
        for key, entry in stored.items()
        if entry.samples >= repeats and entry.lost_share <= most_lost
    )
    executed, fresh = 0, dict[str, OperatorTime]()
    if any(step.signature not in measured_signatures for step in steps):
        measured = measure(
            steps, placeholders_of(program, target), repeats + 1, measured_signatures, deadline_s
        )
        lost = measured.lost_s / max(measured.taken_s, 1e-9)
        _refuse_busy(target, lost, most_lost)
        executed, fresh = measured.executed, _entries(steps, measured.seconds, lost)
    if path and fresh:
        write_times(path, fresh)
    known = stored | {
        key: entry
        for key, entry in fresh.items()
        if key not in stored or not stored[key].is_better(entry)
    }
    times = [known[step.signature] for step in steps]
    seconds = np.array([entry.seconds for entry in times], dtype=np.float64)
    lost_s = seconds @ np.array([entry.lost_share for entry in times])
    return OperatorProfile(
        seconds,
        np.array([entry.samples for entry in times], dtype=np.int64),
        name,
        executed,
        float(lost_s / max(seconds.sum(), 1e-9)),
    )


def _refuse_busy(device: torch.device, lost: float, most_lost: float) -> None:
    """Refuse multithreaded times if other work had the processor for too large a share `lost`.

    A single thread's own clock gives its undisturbed time; several threads wait for each other.
    """
    threads = torch.get_num_threads()
    if device.type == "cpu" and threads > 1 and lost > most_lost:
        raise SpecError(
            f"other processes used the processor for {lost:.0%} of the time measured with "
            f"{threads} threads; measure when the machine is idle, or with latency.threads=1"
        )


def _entries(
    steps: list[Step], seconds: dict[str, list[float]], lost_share: float
) -> dict[str, OperatorTime]:
    """Return the median of each signature's runs, without the first if there are several."""
    entries: dict[str, OperatorTime] = {}
    for step in steps:
        runs = seconds.get(step.signature)
        if runs and step.signature not in entries:
            counted = runs[1:] or runs
            entries[step.signature] = OperatorTime(
                str(step.node.target),
                tuple(tuple(shape) for shape in shapes_of(step.node)),
                median(counted),
                len(counted),
                lost_share,
            )
    return entries

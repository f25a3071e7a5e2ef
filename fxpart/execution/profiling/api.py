"""`profile_operators`: a captured program in, the measured time of each of its operators out."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from torch.export import ExportedProgram

from fxpart.core.graph import OpGraph
from fxpart.cost.profile import OperatorProfile
from fxpart.errors import CacheError, SpecError
from fxpart.execution.device import checked_device
from fxpart.execution.profiling.passes import measure, measured_on
from fxpart.execution.profiling.steps import Step, shapes_of, steps_of
from fxpart.execution.profiling.tensors import given_to
from fxpart.support.digest import stable_digest
from fxpart.support.host import installed_version
from fxpart.support.json_file import read_document
from fxpart.support.whole_file import write_whole

__all__ = ["OperatorTime", "profile_operators", "read_times", "times_path", "write_times"]


# Times of operators on disk: one JSON file for each device and version of torch.
#
# A second model with operators of the same shapes then needs no measurement of them. Writers may be
# several: each adds its entries to what is there, under a lock where the system has one. The folder
# can be deleted at any time.

_SCHEMA, _VERSION = "fxpart-operator-times", 1
_ADVICE = "make the folder writable, or name another one"


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """The measured time of one signature."""

    target: str
    shapes: tuple[tuple[int, ...], ...]
    """Of the tensors that it reads; for people to look at."""
    seconds: float
    """Median of the samples."""
    samples: int


def times_path(cache_dir: Path, device_name: str) -> Path:
    """Return where the times of that device lie, or would lie."""
    parts = {"device": device_name, "torch": installed_version("torch"), "version": _VERSION}
    return cache_dir / f"operators-{stable_digest(parts)[:32]}.json"


def read_times(path: Path) -> dict[str, OperatorTime]:
    """Return the entries of the file by signature; none when it is not there, or is damaged."""
    try:
        entries = read_document(path, _SCHEMA, _VERSION)["entries"]
        return {str(name): _entry(said) for name, said in sorted(entries.items())}
    except (SpecError, KeyError, TypeError, ValueError, AttributeError):
        return {}


def _entry(said: Mapping[str, object]) -> OperatorTime:
    seconds, samples, shapes = said["seconds"], said["samples"], said["shapes"]
    if not isinstance(seconds, float | int) or not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"seconds are {seconds!r}")
    if not isinstance(samples, int) or samples < 1 or not isinstance(shapes, list):
        raise ValueError(f"samples are {samples!r}")
    listed = tuple(tuple(int(size) for size in shape) for shape in shapes)
    return OperatorTime(str(said["target"]), listed, float(seconds), samples)


def write_times(path: Path, entries: Mapping[str, OperatorTime]) -> None:
    """Add `entries` to the file; of two for one signature, the one of more samples stays.

    Raises:
        CacheError: when the folder cannot be written.

    """
    with _locked(path):
        merged = read_times(path)
        for name, entry in entries.items():
            known = merged.get(name)
            if known is None or known.samples <= entry.samples:
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
                }
                for name, entry in sorted(merged.items())
            },
        }
        write_whole(path, json.dumps(document, indent=1), _what(path), _ADVICE)


def _what(path: Path) -> str:
    return f"operator times to {path.parent}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let no two writers of the file interleave, where files can be locked.

    Where they cannot, one writer's entries may be lost, and are measured again.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    except OSError as error:
        raise CacheError(
            f"cannot write {_what(path)}: {error.strerror or error}; {_ADVICE}"
        ) from error
    with lock:
        # Closing the file lets go of the lock.
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def profile_operators(
    program: ExportedProgram,
    graph: OpGraph,
    *,
    device: str = "cpu",
    cache_dir: Path | None = None,
    repeats: int = 5,
    budget_s: float = 120.0,
) -> OperatorProfile:
    """Return the time of each operator of `program`, measured on this machine's `device`.

    `graph` is that of `program`: ``op_graph(program)``, or both of one `joint_capture`. The program
    may have been captured on the meta device: weights and inputs are made (random), each when it is
    first needed, and dropped after its last use where they would take much of the memory.

    Operators are run in the order of the graph, as in a real run: caches hold what they would hold
    then, and one operator again and again would find its data there. Calls of one signature
    (target, shapes, strides, dtypes, other arguments) have one time: the median of `repeats` runs
    after a first one, which sets things up and does not count. The median, since a run that was
    interrupted says nothing about the operator, and the fastest of a few is luckier than the usual
    one. Passes over the graph are repeated until every signature has its runs; an operator whose
    signature has them is not run, so forty equal layers take the time of a few. After `budget_s`
    seconds only signatures without any run are still run: `OperatorProfile.samples` says how many
    each time comes from.

    With `cache_dir`, times are kept there by device, version of torch and signature, and those of
    at least `repeats` samples are not measured again.

    Raises:
        SpecError: for a device that is not here, no repeats, a graph of another program, or sizes
            that are symbols.
        CaptureError: for an operator that cannot be run on the device.
        CacheError: when the cache cannot be written.

    """
    deadline_s = time.perf_counter() + budget_s
    if repeats < 1:
        raise SpecError(f"repeats={repeats} measures nothing; give 1 or more")
    where = checked_device(device)
    steps, name = steps_of(program, graph, where), measured_on(where)
    path = times_path(cache_dir, name) if cache_dir else None
    stored = read_times(path) if path else {}
    known = frozenset(key for key, entry in stored.items() if entry.samples >= repeats)
    executed, fresh = 0, dict[str, OperatorTime]()
    if any(step.signature not in known for step in steps):
        measured = measure(steps, given_to(program, where), repeats + 1, known, deadline_s)
        executed, fresh = measured.executed, _entries(steps, measured.seconds)
    if path and fresh:
        write_times(path, fresh)
    times = {**stored, **fresh}
    return OperatorProfile(
        np.array([times[step.signature].seconds for step in steps], dtype=np.float64),
        np.array([times[step.signature].samples for step in steps], dtype=np.int64),
        name,
        executed,
    )


def _entries(steps: list[Step], seconds: dict[str, list[float]]) -> dict[str, OperatorTime]:
    """Return the median of each signature's runs; the first does not count where there are more."""
    found: dict[str, OperatorTime] = {}
    for step in steps:
        runs = seconds.get(step.signature)
        if runs and step.signature not in found:
            counted = runs[1:] or runs
            found[step.signature] = OperatorTime(
                str(step.node.target),
                tuple(tuple(shape) for shape in shapes_of(step.node)),
                median(counted),
                len(counted),
            )
    return found

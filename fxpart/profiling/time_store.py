"""Times of operators on disk: one JSON file for each device and version of torch.

A second model with operators of the same shapes then needs no measurement of them. Writers may be
several: each adds its entries to what is there, under a lock where the system has one. The folder
can be deleted at any time.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fxpart.errors import CacheError, SpecError
from fxpart.installed import installed_version
from fxpart.json_file import read_document
from fxpart.stable_json import stable_digest
from fxpart.whole_file import write_whole

__all__ = ["OperatorTime", "read_times", "times_path", "write_times"]

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

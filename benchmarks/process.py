"""Run one command of a user, and say how long it took and how much memory it held at most."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Measured", "run_python"]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one process took."""

    seconds: float
    peak_bytes: int
    """Largest resident set of the process."""
    output: str
    messages: str
    """What it wrote to stderr: its progress, with times."""


def run_python(
    arguments: list[str],
    folder: Path,
    *,
    may_fail: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Measured:
    """Run ``python <arguments>`` in `folder` and return what it took.

    Captured graphs are kept in the folder, not in the user's cache. The command is started through
    a second interpreter, whose only child it is, so that the memory measured is that of this
    process and of none before it.

    Raises:
        SystemExit: when the command fails, unless that may be.

    """
    measure = (
        "import resource, subprocess, sys;"
        "code = subprocess.call(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr);"
        "sys.exit(code)"
    )
    root = Path(__file__).resolve().parent.parent
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", measure, sys.executable, *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(root),
            "XDG_CACHE_HOME": str(folder / "cache"),
            **(environment or {}),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - begin
    if done.returncode and not may_fail:
        raise SystemExit(f"python {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    # ru_maxrss counts KiB on Linux.
    *messages, peak_kib = done.stderr.strip().splitlines()
    return Measured(seconds, int(peak_kib) * 1024, done.stdout, "\n".join(messages))

"""Run a command as a user would, and measure its time and peak memory."""

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
    """The time, peak memory and output of one process."""

    seconds: float
    peak_bytes: int
    """Peak resident set size of the process."""
    output: str
    messages: str
    """Its stderr: progress messages with times."""


def run_python(
    arguments: list[str],
    folder: Path,
    *,
    may_fail: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Measured:
    """Run ``python <arguments>`` in `folder` and return its measurements.

    Captured graphs are cached in the folder, not in the user's cache. Python keeps the bytecode of
    what it compiles, as it does by default. The command is started by a second interpreter as its
    only child, so that the measured memory is that of this process alone.

    Raises:
        SystemExit: if the command fails, unless `may_fail`.

    """
    measure = (
        "import resource, subprocess, sys;"
        "code = subprocess.call(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr);"
        "sys.exit(code)"
    )
    root = Path(__file__).resolve().parent.parent
    begin = time.perf_counter()
    process = subprocess.run(
        [sys.executable, "-c", measure, sys.executable, *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPATH": str(root),
            "XDG_CACHE_HOME": str(folder / "cache"),
            **(environment or {}),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - begin
    if process.returncode and not may_fail:
        raise SystemExit(f"python {' '.join(arguments)} failed:\n{process.stdout}{process.stderr}")
    # ru_maxrss counts KiB on Linux.
    *messages, peak_kib = process.stderr.strip().splitlines()
    return Measured(seconds, int(peak_kib) * 1024, process.stdout, "\n".join(messages))

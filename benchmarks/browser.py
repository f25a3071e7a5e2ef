"""A real browser, and a real ``mlflow ui`` for it to look at."""

import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.mlflow_server import kill_server, start_server
from benchmarks.postgres import free_port

__all__ = ["BROWSER", "FLAGS", "NAMES", "served"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
"""None where there is none."""
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def served(command: str, folder: Path, logs: Path) -> Iterator[str]:
    """Run the command that a sweep in `folder` prints for its dashboard; yield the address.

    It gets a port of its own, writes its log into `logs`, and ends with the block.

    Raises:
        RuntimeError: when it is not up in two minutes.

    """
    port = free_port()
    process = start_server(shlex.split(command), folder, logs / "server.log", port)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        kill_server(process)

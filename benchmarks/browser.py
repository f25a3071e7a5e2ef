"""A real browser, and a real ``mlflow ui`` for it to open."""

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
"""None if no browser is installed."""
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
    """Run the dashboard command printed by a sweep in `folder`; yield its address.

    The server gets its own port, logs to `logs`, and is stopped when the block ends.

    Raises:
        RuntimeError: if the server is not up within two minutes.

    """
    port = free_port()
    process = start_server(shlex.split(command), folder, logs / "server.log", port)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        kill_server(process)

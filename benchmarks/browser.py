"""A real browser, and a real ``mlflow ui`` for it to look at."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

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
_START_S = 120
_ANNOUNCED = "http://127.0.0.1:5000"


@contextmanager
def served(command: str, folder: Path, logs: Path) -> Iterator[str]:
    """Run the command that a sweep in `folder` prints for its dashboard; yield the address.

    It gets a port of its own, writes its log into `logs`, and ends with the block.

    Raises:
        RuntimeError: when it is not up in two minutes.

    """
    server, log = f"http://127.0.0.1:{_free_port()}", logs / "server.log"
    arguments = [*shlex.split(command), "--workers", "1", "--port", server.rpartition(":")[2]]
    switches = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments,
            cwd=folder,
            stdout=output,
            stderr=output,
            env={**os.environ, **switches},
            start_new_session=True,  # so that the workers can be killed with it
        )
    try:
        _wait_until_up(server, process, log)
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_up(server: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(urllib.error.URLError, TimeoutError, ConnectionError):
            urllib.request.urlopen(f"{server}/health", timeout=2).close()
            return
        time.sleep(0.2)  # between looks: a server says nothing when it is up
    raise RuntimeError(f"mlflow ui was not up after {_START_S} s: {log.read_text()[-2000:]}")

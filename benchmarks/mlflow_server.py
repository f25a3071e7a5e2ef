"""A real MLflow server on loopback, which can be killed and started again."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.postgres import free_port

__all__ = ["Served", "kill_server", "start_server"]

_START_S = 120
_LOOK_S = 0.05
# Not needed by a run store, and slower to start than everything else.
_QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def start_server(
    command: Sequence[str], folder: Path, log: Path, port: int
) -> "subprocess.Popen[bytes]":
    """Start `command` in `folder` with one worker at `port`; return when it answers.

    It runs in its own process group, for `kill_server`.

    Raises:
        RuntimeError: if it ends, or is not up within two minutes.

    """
    with log.open("ab") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"],
            cwd=folder,
            stdout=out,
            stderr=out,
            env={**os.environ, **_QUIET},
            start_new_session=True,
        )
    try:
        _wait_until_up(process, port, log)
    except BaseException:
        kill_server(process)
        raise
    return process


def _wait_until_up(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(urllib.error.URLError, TimeoutError, ConnectionError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
            return
        time.sleep(_LOOK_S)  # there is no other signal that it is ready
    raise RuntimeError(f"the server was not up after {_START_S} s: {log.read_text()[-2000:]}")


def kill_server(process: "subprocess.Popen[bytes]") -> None:
    """SIGKILL the server and the workers that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Served:
    """A server for one database, always at the same address."""

    def __init__(self, folder: Path, database: Path) -> None:
        self._folder, self._database, self._port = folder, database, free_port()
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        command = [sys.executable, "-m", "mlflow", "server"]
        command += ["--backend-store-uri", f"sqlite:///{self._database}"]
        command += ["--artifacts-destination", str(self._folder / "served")]
        self._process = start_server(command, self._folder, self._folder / "server.log", self._port)

    @property
    def group(self) -> int:
        """The process group of the server and its workers."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL the server if it runs."""
        if self._process:
            kill_server(self._process)
            self._process = None

"""A real MLflow server on loopback, which can be killed and started again."""

import multiprocessing
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.postgres import free_port

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

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
        _wait_until_up(lambda: process.poll() is None, port, log)
    except BaseException:
        kill_server(process)
        raise
    return process


def _wait_until_up(is_alive: Callable[[], bool], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and is_alive():
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
    """A server for one database, always at the same address.

    It is the application that ``mlflow server`` serves, in a process forked from one that has
    imported it: importing it anew takes seconds for each start. The tests of the dashboard run a
    command, ``mlflow ui``.
    """

    def __init__(self, folder: Path, database: Path) -> None:
        self._folder, self._database, self._port = folder, database, free_port()
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: ForkServerProcess | None = None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        context = multiprocessing.get_context("forkserver")
        # With uvicorn imported first, MLflow's application takes the process for a server's.
        context.set_forkserver_preload(["uvicorn", "mlflow.server.fastapi_app", __name__])
        log = self._folder / "server.log"
        settings = (self._database, self._folder / "served", self._port, log)
        self._process = context.Process(target=_serve, args=settings)
        self._process.start()
        try:
            _wait_until_up(lambda: self._is_alive, self._port, log)
        except BaseException:
            self.kill()
            raise

    @property
    def _is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    @property
    def group(self) -> int:
        """The process group of the server."""
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL the server if it runs."""
        if self._process:
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(database: Path, artifacts: Path, port: int, log: Path) -> None:
    """Serve, with the variables that ``mlflow server`` of MLflow 3.17 makes of its options."""
    import uvicorn
    from mlflow.server import constants

    os.setsid()
    with log.open("ab") as out:
        for descriptor in (1, 2):
            os.dup2(out.fileno(), descriptor)
    os.environ |= {
        **_QUIET,
        constants.BACKEND_STORE_URI_ENV_VAR: f"sqlite:///{database}",
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
        constants.ARTIFACTS_DESTINATION_ENV_VAR: str(artifacts),
        # As the command does, for an artifact location that clients see.
        constants.ARTIFACT_ROOT_ENV_VAR: "mlflow-artifacts:/",
    }
    uvicorn.run("mlflow.server.fastapi_app:app", host="127.0.0.1", port=port)

"""A real `mlflow server` on loopback, which can be killed and started again."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from benchmarks.postgres import free_port

_START_S = 120
_POLL_S = 0.05
# What a store of runs does not need, and takes longer to start than all else.
_QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


class Served:
    """Serves the store of a folder, always at the same address."""

    def __init__(self, folder: Path, database: Path) -> None:
        self._folder, self._database, self._port = folder, database, free_port()
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--port", str(self._port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self._database}"]
        command += ["--artifacts-destination", str(self._folder / "served")]
        log = self._folder / "server.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**os.environ, **_QUIET},
            )
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, log.read_text()[-2000:]
            with suppress(urllib.error.URLError, TimeoutError, ConnectionError):
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
                return
            time.sleep(_POLL_S)  # it says nowhere that it is ready
        raise AssertionError(log.read_text()[-2000:])

    @property
    def group(self) -> int:
        """The process group of the server and its workers."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL the server and the workers that it started."""
        if self._process:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

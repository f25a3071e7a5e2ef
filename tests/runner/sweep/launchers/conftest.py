"""Clusters on this machine."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.postgres import free_port
from benchmarks.slurm_here import NoSlurmError, slurm_here
from runner.sweep.launchers.ray_address import answers_http2
from tests.runner.sweep.launchers.driven import WAIT_S, hear_interrupts

_LOOK_S = 0.1


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which a real Slurm is found."""
    try:
        with slurm_here(tmp_path_factory.mktemp("slurm")) as variables:
            yield variables
    except NoSlurmError as error:
        pytest.skip(f"no Slurm: {error}")


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """The address of a Ray cluster started by another process, which must outlive each sweep."""
    ray = Path(sys.executable).with_name("ray")
    if not ray.exists():
        pytest.skip("no ray installed")
    port = free_port()
    # Ray's sockets are there, and their paths may have a hundred characters.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as folder:
        options = [f"--port={port}", f"--temp-dir={folder}", "--num-cpus=2"]
        options += ["--include-dashboard=false", "--include-log-monitor=false"]
        options += ["--node-ip-address=127.0.0.1"]
        with (Path(folder) / "log").open("w") as log:
            head = subprocess.Popen(
                [ray, "start", "--head", "--block", "--disable-usage-stats", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=hear_interrupts,  # noqa: PLW1509 - no threads here
            )
        try:
            _wait(head, port, Path(log.name))
            yield f"127.0.0.1:{port}"
            assert head.poll() is None
            assert answers_http2("127.0.0.1", port) is None
        finally:
            head.terminate()
            head.wait(timeout=WAIT_S)


def _wait(head: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    """Return when the cluster answers: its command does not report when it is ready."""
    end_s = time.monotonic() + WAIT_S
    while answers_http2("127.0.0.1", port) or "Ray runtime started" not in log.read_text():
        assert head.poll() is None, log.read_text()
        assert time.monotonic() < end_s, log.read_text()
        time.sleep(_LOOK_S)

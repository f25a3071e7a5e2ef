"""Each launcher with real processes: results, losses and leftovers."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runner.sweep.launchers.driven import (
    WAIT_S,
    driving,
    ends,
    settings,
    wait_for,
    wait_until_gone,
)

HERE = ["joblib", "ray", "submitit_local"]


def _in_cluster(address: str, folder: Path) -> dict[str, Any]:
    """Return the settings of jobs in an existing cluster of Ray."""
    changed = settings("ray", folder)
    changed["init"]["address"] = address
    return changed


def _check(outcomes: list[list[object]], folder: Path) -> None:
    """Of five jobs one has a bug and one was killed; the others end, except those lost with it."""
    statuses = [status for status, _ in outcomes]
    finished = [what for status, what in outcomes if status == "COMPLETED"]
    assert statuses[1] == statuses[3] == "FAILED"
    assert "killed" in str(outcomes[3][1])
    # A job running in the pool of the killed one is lost with it.
    for what in (what for status, what in outcomes if status == "FAILED"):
        assert what == "ZeroDivisionError: a bug" or "its process was killed" in str(what)
    for what in finished:
        assert isinstance(what, dict)
        assert what["folder"] == str(folder)
        assert what["process"] != os.getpid()
        assert what["threads"] == "1"
    squares = [what["square"] for what in finished if isinstance(what, dict)]
    assert squares == sorted(squares)
    assert set(squares) <= {0, 4, 16}
    assert squares


@pytest.mark.parametrize("launcher", HERE)
def test_every_job_has_an_end_though_one_was_killed(
    launcher: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    changed = None
    if launcher == "ray":  # starting a cluster takes longer than the jobs
        changed = _in_cluster(request.getfixturevalue("ray_address"), tmp_path)
    one_thread = {"OMP_NUM_THREADS": "1"}
    with driving(
        launcher, "mixed", 5, tmp_path, changed=changed, environment=one_thread
    ) as process:
        _check(ends(process), tmp_path)


def test_every_job_of_slurm_has_an_end(
    slurm: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # jobs have as many as cpus_per_task
    with driving("submitit_slurm", "mixed", 5, tmp_path, environment=slurm) as process:
        _check(ends(process), tmp_path)


def _interrupt_group(process: int) -> None:
    os.killpg(process, signal.SIGINT)


def _terminate(process: int) -> None:
    os.kill(process, signal.SIGTERM)


@pytest.mark.parametrize(
    ("launcher", "stop", "code", "message"),
    [
        ("joblib", _interrupt_group, 130, "interrupted\n"),
        ("submitit_local", _interrupt_group, 130, "interrupted\n"),
        ("submitit_local", _terminate, 143, "terminated\n"),
        ("ray", _interrupt_group, 130, "interrupted\n"),
    ],
)
def test_an_interrupt_reaches_the_jobs_and_leaves_no_process(
    launcher: str, stop: Callable[[int], None], code: int, message: str, tmp_path: Path
) -> None:
    begun = [tmp_path / "begun_0", tmp_path / "begun_1"]
    with driving(launcher, "endless", 3, tmp_path) as process:
        wait_for(begun)
        workers = [int(path.read_text()) for path in begun]
        stop(process.pid)
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (code, "", message)
    for worker in workers:
        wait_until_gone(worker)
    assert (tmp_path / "interrupted_0").exists()
    assert (tmp_path / "interrupted_1").exists()
    assert not (tmp_path / "begun_2").exists()


def test_ending_a_sweep_leaves_an_existing_ray_cluster(ray_address: str, tmp_path: Path) -> None:
    begun = [tmp_path / "begun_0", tmp_path / "begun_1"]
    changed = _in_cluster(ray_address, tmp_path)
    with driving("ray", "endless", 3, tmp_path, changed=changed) as process:
        wait_for(begun)
        _terminate(process.pid)
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (143, "", "terminated\n")
    wait_for([tmp_path / "interrupted_0", tmp_path / "interrupted_1"])
    assert not (tmp_path / "begun_2").exists()


def test_jobs_wait_for_a_machine_with_enough_cores(ray_address: str, tmp_path: Path) -> None:
    changed = _in_cluster(ray_address, tmp_path)
    changed["remote"]["num_cpus"] = 64
    with driving("ray", "endless", 1, tmp_path, changed=changed) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == (
            f"no machine of the Ray cluster at {ray_address} has num_cpus=64, which"
            " hydra.launcher.remote asks for; the jobs wait until one has\n"
        )
        _terminate(process.pid)
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (143, "", "terminated\n")


def test_an_interrupt_cancels_the_jobs_of_slurm(slurm: dict[str, str], tmp_path: Path) -> None:
    begun = [tmp_path / "begun_0", tmp_path / "begun_1"]
    with driving("submitit_slurm", "endless", 3, tmp_path, environment=slurm) as process:
        wait_for(begun)
        _terminate(process.pid)
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (143, "", "terminated\n")
    wait_for([tmp_path / "interrupted_0", tmp_path / "interrupted_1"])
    assert not (tmp_path / "begun_2").exists()


@pytest.mark.parametrize("launcher", HERE)
def test_workers_end_with_a_sweep_that_is_killed(launcher: str, tmp_path: Path) -> None:
    begun = [tmp_path / "begun_0", tmp_path / "begun_1"]
    with driving(launcher, "endless", 3, tmp_path) as process:
        wait_for(begun)
        workers = [int(path.read_text()) for path in begun]
        process.kill()
    for worker in workers:
        wait_until_gone(worker)
    assert (tmp_path / "interrupted_0").exists()
    assert not (tmp_path / "begun_2").exists()


def test_a_job_at_its_time_limit_reports_it(tmp_path: Path) -> None:
    begun = [tmp_path / "begun_0", tmp_path / "begun_1"]
    with driving("submitit_local", "endless", 2, tmp_path) as process:
        wait_for(begun)
        for path in begun:
            os.kill(int(path.read_text()), signal.SIGUSR2)  # as Slurm does before its limit
        for status, why in ends(process):
            assert status == "FAILED"
            assert "reached the limit of hydra.launcher.timeout_min; raise it" in why

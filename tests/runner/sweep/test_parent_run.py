"""A sweep's own run and its lock, which is held exactly while the sweep is in progress."""

import atexit
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from runner.config.schema import TrackingConfig
from runner.errors import TrackingError
from runner.job.locks import sweep_lock
from runner.sweep import parent_run
from runner.sweep.parent_run import SweepSpec, how_to_resume, opened_parent
from runner.tracking.open_tracker import open_tracker
from runner.tracking.tracker import Tracker

SPEC = SweepSpec("title", "the key", swept=("mode",), overrides=(), total=1, command="")
IS_HELD = f"""
import sys
from pathlib import Path
from runner.job.locks import Locks
sys.exit(Locks(Path.cwd()).is_held_elsewhere({sweep_lock(SPEC.key)!r}))
"""


def is_held(folder: Path) -> bool:
    """Return whether this process holds the sweep's lock: only another process can tell."""
    return bool(subprocess.run([sys.executable, "-c", IS_HELD], cwd=folder, check=False).returncode)


@pytest.fixture
def config(folder: Path) -> DictConfig:
    hydra = {"sweep": {"dir": str(folder / "swept")}, "overrides": {"hydra": []}}
    return OmegaConf.create({"tracking": {"name": "none"}, "resume": True, "hydra": hydra})


@pytest.fixture
def closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statuses with which the run was closed."""
    statuses: list[str] = []
    tracker = open_tracker(TrackingConfig(name="none"), folder)

    def finish_sweep(_tracker: Tracker, _run_id: str | None, status: str) -> None:
        statuses.append(status)
        if status == "FINISHED" and statuses.count("FINISHED") > 1:
            raise TrackingError("the store is gone")

    monkeypatch.setattr(type(tracker), "finish_sweep", finish_sweep)
    monkeypatch.setattr(parent_run, "read_tracking", lambda _: TrackingConfig(name="none"))
    return statuses


def test_a_run_is_closed_with_the_status_of_its_sweep(
    folder: Path, config: DictConfig, closed: list[str]
) -> None:
    with opened_parent(config, SPEC, folder) as parent:
        assert is_held(folder)
        assert closed == []
    assert not is_held(folder)
    with pytest.raises(KeyboardInterrupt), opened_parent(config, SPEC, folder):
        raise KeyboardInterrupt
    assert not is_held(folder)
    assert closed == ["FINISHED", "KILLED"]
    assert parent.problems == []
    # The results matter more than a store that is gone by then.
    with opened_parent(config, SPEC, folder) as parent:
        pass
    assert parent.problems == ["the store is gone"]


@pytest.mark.usefixtures("closed")
def test_a_run_that_cannot_be_opened_leaves_no_lock_and_a_closed_one_no_hook(
    folder: Path, config: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = atexit._ncallbacks()
    with opened_parent(config, SPEC, folder) as parent:
        pass
    assert atexit._ncallbacks() == hooks

    def refuses(*_: object) -> None:
        raise TrackingError("the store is gone")

    monkeypatch.setattr(type(parent.tracker), "start_sweep", refuses)
    with pytest.raises(TrackingError, match="gone"), opened_parent(config, SPEC, folder):
        raise AssertionError("it is not open")
    assert not is_held(folder)


@pytest.mark.parametrize(
    ("resumes", "folder_name", "words"),
    [
        (True, None, "the same command resumes it"),
        (False, None, "the same command without resume=false resumes it"),
        (True, "outputs/mine", "the same command with hydra.sweep.dir=outputs/mine resumes it"),
        (
            False,
            "outputs/mine",
            "the same command without resume=false and with hydra.sweep.dir=outputs/mine"
            " resumes it",
        ),
    ],
)
def test_the_command_to_type(resumes: bool, folder_name: str | None, words: str) -> None:
    place = Path.cwd() / folder_name if folder_name else None
    assert how_to_resume(resumes=resumes, needs_folder=place) == words

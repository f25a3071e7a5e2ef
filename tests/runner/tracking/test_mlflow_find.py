"""A run found by the beginning of its id, in a file; server and PostgreSQL tests use this too."""

from pathlib import Path
from unittest.mock import patch

import pytest

from fxpart.errors import SpecError
from runner.config.schema import TrackingConfig
from runner.tracking.mlflow_runs import FoundRun, find_run
from runner.tracking.mlflow_tracker import MlflowTracker

IDS = ("a05e2893" + "0" * 24, "a05e28b1" + "0" * 24, "123456e7" + "0" * 24)


@pytest.fixture
def ids(tracker: MlflowTracker, tmp_path: Path) -> tuple[str, ...]:
    """Runs with chosen ids, the last in an experiment of its own."""
    other = MlflowTracker(TrackingConfig(experiment="depth"), tmp_path)
    for place, run_id in ((tracker, IDS[0]), (tracker, IDS[1]), (other, IDS[2])):
        with patch("uuid.uuid4") as uuid4:
            uuid4.return_value.hex = run_id
            with place.start(run_id[:8], {}) as run:
                pass
        assert run.run_id == run_id
    return IDS


def test_a_unique_beginning_is_enough(ids: tuple[str, ...], tmp_path: Path) -> None:
    for start in ("a05e289", ids[0], ids[0][:-1]):
        assert find_run(TrackingConfig(), tmp_path, start) == FoundRun(ids[0], "fxpart")
    elsewhere = TrackingConfig(experiment="never made")
    assert find_run(elsewhere, tmp_path, "123456") == FoundRun(ids[2], "depth")


@pytest.mark.usefixtures("ids")
@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("a05e28", f"several runs begin with 'a05e28'; give more of one: {IDS[0]}, {IDS[1]}$"),
        ("a05e2", "'a05e2' is too short for a run's id; give its first 6 characters or more"),
        ("a05e27", "there is no run 'a05e27' at sqlite:"),
        ("A05E289", "there is no run 'A05E289' at"),
        ("a05e%%", "there is no run 'a05e%%' at"),
        ("______", "there is no run '______' at"),
        ("a05e2893" + "1" * 24, "there is no run 'a05e28931"),
        ("x' or 1=1 --", "there is no run"),
    ],
)
def test_a_beginning_of_no_run_is_one_line(start: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        find_run(TrackingConfig(), tmp_path, start)
    assert "\n" not in str(caught.value)


def test_a_missing_store_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no run 'a05e2893' at sqlite:"):
        find_run(TrackingConfig(), tmp_path, "a05e2893")
    assert not (tmp_path / "outputs").exists()

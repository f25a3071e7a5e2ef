"""Messages of the command while it sends many runs; `test_unsent` checks that each is sent once."""

from pathlib import Path

import pytest

from runner import send
from runner.output import countdown
from runner.tracking.mlflow_tracker import MlflowTracker
from runner.tracking.tracker import UnsentRun
from runner.tracking.unsent import write_unsent


@pytest.fixture
def kept(tracker: MlflowTracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four runs on disk, the first of which cannot be sent; each takes 20 s by the clock."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["send"])
    (tmp_path / "tiny").write_text("a file where the folder should be")
    for number in range(4):
        run = UnsentRun(
            record_id=f"record-{number}",
            name=str(number),
            uri=tracker.uri if number else "sqlite:///tiny/x.db",
            experiment="fxpart",
            status="FINISHED",
            start_ms=1000,
            end_ms=2000,
            tags={"kind": "run", "outcome": "finished", "record_id": f"record-{number}"},
        )
        write_unsent(tmp_path / "outputs" / str(number), run)
    clock = iter(range(0, 2000, 20))
    monkeypatch.setattr(countdown, "monotonic", lambda: float(next(clock)))


@pytest.mark.usefixtures("kept")
def test_a_log_gets_a_line_from_time_to_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert send.main() == 2
    captured = capsys.readouterr()
    assert captured.out == "sent 3 runs\n"
    *lines, error = captured.err.splitlines()
    assert [line.partition(", about")[0] for line in lines] == [
        "0 of 4 runs sent (1 could not be), 3 left",
        "1 of 4 runs sent (1 could not be), 2 left",
        "2 of 4 runs sent (1 could not be), 1 left",
    ]
    assert error.startswith("error: 1 run could not be sent: ")


@pytest.mark.usefixtures("kept")
def test_a_terminal_shows_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert send.main() == 2
    captured = capsys.readouterr()
    assert captured.out == "sent 3 runs\n"
    assert "4/4" in captured.err
    assert "runs sent" not in captured.err

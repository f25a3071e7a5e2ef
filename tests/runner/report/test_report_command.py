"""`python -m runner.report` after a real sweep, and the same sweep from its files."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fxpart.errors import SpecError
from runner.mlflow_reading import open_stored
from runner.report.__main__ import main, parsed
from runner.report.choose import sweeps_of
from runner.report.from_files import sweep_from_files
from runner.report.from_store import sweep_from_store
from runner.tracking import TrackingConfig
from tests.runner.command import OWN, Done, run, tracked_runs


@pytest.fixture
def report(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """The command in this process: another would take seconds to import MLflow."""

    def command(*arguments: str) -> Done:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["report", *arguments])
        code = main()
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return command


def table_of(said: str) -> list[str]:
    """Return the ranked table and the reasons."""
    lines = said.splitlines()
    first = next(i for i, line in enumerate(lines) if " runs, " in line)
    last = next(i for i, line in enumerate(lines) if line.startswith("report:"))
    return lines[first:last]


@pytest.mark.usefixtures("store")
def test_the_report_of_a_sweep_is_the_same_later(folder: Path, report: Callable[..., Done]) -> None:
    swept = ["mode=single,size_based", "devices=1x0.06mb,2x0.06mb", "hydra.sweep.dir=outputs/s"]
    done = run(folder, "-m", *OWN, *swept)
    assert done.code == 0, done.err
    later = report("fxpart")
    assert (later.code, later.err) == (0, "")
    assert table_of(later.out) == table_of(done.out)
    written = folder / "outputs" / "reports" / "fxpart" / "report.html"
    assert written.read_text().startswith("<!doctype html>")
    (parent,) = tracked_runs(folder, "tags.kind = 'sweep'")
    kept = Path(parent.info.artifact_uri.removeprefix("file://")) / "report.html"
    assert kept.read_text() == written.read_text()
    source = open_stored(TrackingConfig(), folder)
    (sweep,) = sweeps_of(source)
    stored = sweep_from_store(source, sweep)
    filed = sweep_from_files(folder / "outputs" / "s", sweep.tags["sweep_id"], swept=stored.swept)
    assert stored.swept == ("mode", "devices")
    known = {row.settings["mode"] + row.settings["devices"]: row for row in stored.rows}
    assert len(filed.rows) == len(known) == 4
    for row in filed.rows:
        same = known[row.settings["mode"] + row.settings["devices"]]
        assert row.settings == same.settings
        assert (row.status, row.error) == (same.status, same.error)
        # The series of memory over operators is in no file of numbers.
        assert row.metrics == {k: v for k, v in same.metrics.items() if k != "memory_gib"}


def result_file(folder: Path, name: str, **changed: object) -> Path:
    choices = {"model": "m", "mode": "a", "devices": "2x16gb", "transfer_rate": "pcie4"}
    document = {
        "schema": "fxpart.result",
        "version": 1,
        "status": "finished",
        "metrics": {"latency_ms": 1.23456789, "throughput_per_s": None},
        "devices": [],
        "config": {"choices": choices, "overrides": ["mode.depth='3'"], "resolved": None},
        "error": None,
        "sweep": "s1",
        **changed,
    }
    path = folder / name / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document))
    return path


def test_files_of_this_sweep_alone_and_those_that_are_damaged(tmp_path: Path) -> None:
    result_file(tmp_path, "10_b", status="infeasible", metrics={}, error="too large")
    result_file(tmp_path, "2_a")
    result_file(tmp_path, "3_other", sweep="s2")
    result_file(tmp_path, "4_broken", config={"choices": {}, "overrides": [3]})
    result_file(tmp_path, "5_cut").write_text("{")
    data = sweep_from_files(tmp_path, "s1")
    assert [row.name for row in data.rows] == ["2_a", "4_broken", "5_cut", "10_b"]
    first, broken, cut, last = data.rows
    assert first.metrics == {"latency_ms": 1.234568}
    assert (first.settings["mode"], first.settings["mode.depth"]) == ("a", "3")
    assert (last.status, last.error) == ("infeasible", "too large")
    for row, name in ((broken, "4_broken"), (cut, "5_cut")):
        assert row.status == "failed"
        assert name in (row.error or "")
    later_ms = int(max(p.stat().st_mtime for p in tmp_path.rglob("*.json")) * 1e3) + 1000
    kept = sweep_from_files(tmp_path, "s1", started_ms=later_ms).rows
    assert [row.name for row in kept] == ["2_a", "10_b"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "b"], "unrecognized arguments: b"),
        (["--rows", "0"], "--rows 0 shows nothing"),
        (["--rows", "x"], "invalid int value"),
        (["--nothing"], "unrecognized arguments"),
    ],
)
def test_arguments_that_mean_nothing(arguments: list[str], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parsed(arguments)


def test_what_is_asked_for() -> None:
    found = parsed([])
    assert (found.experiment, found.sweep, found.rows) == ("fxpart", "latest", 20)
    assert parsed(["a/b c"]).output == Path("outputs/reports/a_b_c")
    assert parsed([".."]).output == Path("outputs/reports/_")
    assert parsed(["x", "--output", "y"]).output == Path("y")


def test_a_store_that_is_not_there_is_one_line(folder: Path, report: Callable[..., Done]) -> None:
    done = report("--uri", "sqlite:///none.db")
    assert done.code == 2
    assert done.error.startswith("there are no runs at ")
    assert not (folder / "outputs").exists()
    assert not (folder / "none.db").exists()


def test_its_help_is_quick() -> None:
    program = (
        "import runner.report.__main__ as m, sys\n"
        "try:\n m.parsed(['--help'])\nexcept SystemExit: pass\n"
        "print([n for n in ('torch', 'mlflow', 'hydra', 'numpy', 'rich') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "usage: python -m runner.report" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"

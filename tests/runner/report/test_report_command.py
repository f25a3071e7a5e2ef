"""`python -m runner.report` after a real sweep, and the same sweep from its files."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from fxpart.errors import InfeasibleError, SpecError
from runner.config.schema import TrackingConfig
from runner.report.__main__ import main, parsed
from runner.report.from_files import sweep_from_files
from runner.report.from_store import sweep_from_store, sweeps_of
from runner.tracking.mlflow_runs import open_stored
from runner.tracking.open_tracker import open_tracker
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
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return command


def table_of(output: str) -> list[str]:
    """Return the ranked table and the reasons."""
    lines = output.splitlines()
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
    # From the folder of the store, links would lead nowhere.
    page = written.read_text()
    links = re.findall(r' <a href="([^"]+)">\w+</a>', page)
    assert {Path(link).name for link in links if not link.endswith("/")} == {
        "memory.svg",
        "partition_graph.svg",
    }
    assert all((written.parent / link).exists() for link in links)
    # One in each row, and one beside the best in the findings.
    assert len([link for link in links if link.endswith("/")]) == 4 + 1
    assert kept.read_text() == re.sub(r" ?<a href=.*?</a>", "", page)
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


def log_sweep(folder: Path, sweep_id: str, jobs: dict[str, tuple[str, float | None]]) -> str:
    """Log a sweep of modes, each with its schedule and its latency; return the sweep's id."""
    tracker = open_tracker(TrackingConfig(), folder)
    parent = tracker.start_sweep(f"sweep {sweep_id}", {"sweep_id": sweep_id, "swept": '["mode"]'})
    assert parent is not None
    for mode, (schedule, latency_ms) in jobs.items():
        params = {"model": "m", "mode": mode, "devices": "2x16gb", "transfer_rate": "pcie4"}
        # A run without a schedule has no parameter of that name; its configuration says so.
        if schedule != "none":
            params["schedule"] = schedule
        tags = {
            "config_key": f"{sweep_id} {mode}",
            "sweeps": f" {sweep_id} ",
            "config.0": json.dumps({"schedule": {"name": schedule}}),
        }
        with suppress(InfeasibleError), tracker.start(mode, params, tags) as run:
            if latency_ms is None:
                raise InfeasibleError("too large")
            run.log(metrics={"latency_ms": latency_ms, "peak_memory_gib": 1.0})
    tracker.finish_sweep(parent)
    return parent


@pytest.mark.usefixtures("store")
def test_two_sweeps_are_compared_job_by_job(folder: Path, report: Callable[..., Done]) -> None:
    jobs: dict[str, tuple[str, float | None]]
    jobs = {"a": ("none", 10.0), "b": ("none", 20.0), "c": ("none", 5.0), "old": ("none", 7.0)}
    before = log_sweep(folder, "s1", jobs)
    time.sleep(0.002)  # the store counts milliseconds: the newest is to be another sweep
    jobs = {"a": ("gpipe", 11.0), "b": ("gpipe", 15.0), "c": ("gpipe", None), "new": ("gpipe", 4.0)}
    after = log_sweep(folder, "s2", jobs)
    done = report("--against", before[:8])
    assert (done.code, done.err) == (0, "")
    lines = [line.split() for line in done.out.splitlines()]
    assert (
        "3 jobs in both, model=m, devices=2x16gb, transfer_rate=pcie4,"
        " schedule=none before and gpipe after"
    ) in done.out.splitlines()
    cells = [line for line in lines if line and line[0] in ("a", "b", "c")]
    assert cells == [
        ["c", "5.000", "infeasible", "-", "1.000", "infeasible", "-"],
        ["b", "20.000", "15.000", "-25.0", "1.000", "1.000", "0.0"],
        ["a", "10.000", "11.000", "+10.0", "1.000", "1.000", "0.0"],
    ]
    assert "only before: mode=old, 7.000 ms" in done.out
    assert "only after: mode=new, 4.000 ms" in done.out
    best = "best: before mode=c, 5.000 ms, 1.000 GiB; after mode=new, 4.000 ms, 1.000 GiB (-20.0 %)"
    assert best in done.out
    written = folder / "outputs" / "reports" / "fxpart" / f"{after[:8]}_against_{before[:8]}.html"
    page = written.read_text()
    assert "Compared with sweep s1, started" in page
    assert page.count('data-v="-25"') == 1
    for text in (best, "only before: mode=old, 7.000 ms"):
        assert text in page
    other_way = report("--sweep", before, "--against", after, "--rows", "1")
    assert "not shown: 2 that change less; --rows 3 shows all" in other_way.out
    assert report("--against", after).error.startswith(f"sweep {after[:8]} is compared with itself")
    assert "has no sweep 'nothing1'" in report("--against", "nothing1").error


def result_file(folder: Path, name: str, **changed: object) -> Path:
    choices = {"model": "m", "mode": "a", "devices": "2x16gb", "transfer_rate": "pcie4"}
    document = {
        "schema": "fxpart.result",
        "version": 1,
        "status": "finished",
        "metrics": {"latency_ms": 1.23456789, "examples_per_s": None},
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


def test_files_of_this_sweep_alone_and_damaged_files(tmp_path: Path) -> None:
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
    ("arguments", "message"),
    [
        (["a", "b"], "unrecognized arguments: b"),
        (["--rows", "0"], "--rows 0 shows nothing"),
        (["--rows", "x"], "invalid int value"),
        (["--nothing"], "unrecognized arguments"),
        (["--sweep", "a1", "--sweep", "b2"], "to compare two, use --sweep b2 --against a1"),
        (["--against", "a1", "--against", "b2"], "a sweep is compared with one other; give one"),
        (["--sweep", "all", "--against", "b2"], "two sweeps are compared, not all"),
        (["--against", "all"], "two sweeps are compared, not all"),
    ],
)
def test_meaningless_arguments_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parsed(arguments)


def test_the_parsed_arguments() -> None:
    options = parsed([])
    assert (options.experiment, options.sweep, options.rows) == ("fxpart", "latest", 20)
    assert parsed(["a/b c"]).output == Path("outputs/reports/a_b_c")
    assert parsed([".."]).output == Path("outputs/reports/_")
    assert parsed(["x", "--output", "y"]).output == Path("y")
    assert options.against is None
    assert parsed(["--against", "a1"]).against == "a1"


def test_a_missing_store_is_one_line(folder: Path, report: Callable[..., Done]) -> None:
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

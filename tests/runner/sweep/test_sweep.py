"""Sweeps in a process of their own."""

import json
import os
from pathlib import Path

import pytest

from tests.runner.command import OWN, SMALL, run, tracked_runs

CRASH = """
import sys
import runner.job.files
from runner.app import main
whole = runner.job.files.write_figures
def crash(folder, *rest, **more):
    if not folder.name.startswith("1_"):
        raise ZeroDivisionError("a bug")
    return whole(folder, *rest, **more)
runner.job.files.write_figures = crash
sys.exit(main())
"""


@pytest.mark.usefixtures("store")
def test_a_sweep_ranks_its_jobs_and_continues_after_infeasible_ones(folder: Path) -> None:
    done = run(
        folder,
        "-m",
        *OWN,
        "mode=single,size_based",
        "devices=1x0.06mb,2x0.06mb",
        "hydra.sweep.dir=outputs/swept",
    )
    assert done.code == 0, done.err
    assert done.out.count("infeasible") >= 3
    assert "* lowest latency" in done.out
    parents = tracked_runs(folder, "tags.kind = 'sweep'")
    assert [parent.info.status for parent in parents] == ["FINISHED"]
    children = tracked_runs(folder, f"tags.mlflow.parentRunId = '{parents[0].info.run_id}'")
    by_status = sorted(child.info.status for child in children)
    assert by_status == ["FAILED", "FAILED", "FAILED", "FINISHED"]
    for child in children:
        feasible = child.info.status == "FINISHED"
        assert child.data.metrics["feasible"] == float(feasible)
        assert ("error" in child.data.tags) is not feasible


def test_a_failed_job_in_a_sweep_gives_exit_code_2(folder: Path) -> None:
    done = run(folder, "-m", *OWN, "model.batch_size=0,1", SMALL, "tracking=none")
    assert done.code == 2
    assert "batch_size=0 must be a whole number" in done.out
    assert "* lowest latency" in done.out
    assert {"batch", "size"} <= set(done.out.partition("─")[0].split())


@pytest.mark.usefixtures("store")
def test_a_crash_in_one_job_does_not_stop_the_others(folder: Path) -> None:
    swept = [*OWN, SMALL, "mode=size_based,kl_based", "hydra.sweep.dir=outputs/swept"]
    done = run(folder, "-m", *swept, program=("-c", CRASH))
    assert done.code == 2
    error = (
        "ZeroDivisionError: a bug; traceback in"
        " outputs/swept/0_tiny_2x0.06mb_size_based/traceback.txt"
    )
    assert done.error == error
    assert "mode=size_based: ZeroDivisionError: a bug" in done.out
    assert "* lowest latency" in done.out
    (crashed,) = (folder / "outputs" / "swept").glob("0_*")
    result = json.loads((crashed / "result.json").read_text())
    assert (result["status"], result["error"]) == ("failed", error)
    assert "in crash" in (crashed / "traceback.txt").read_text()
    assert {r.data.params.get("mode"): r.info.status for r in tracked_runs(folder)} == {
        "size_based": "FAILED",
        "kl_based": "FINISHED",
        None: "FINISHED",
    }


@pytest.mark.usefixtures("store")
def test_a_crash_alone_shows_its_traceback(folder: Path) -> None:
    done = run(folder, *OWN, SMALL, "hydra.run.dir=outputs/0_one", program=("-c", CRASH))
    assert done.code == 1
    assert "ZeroDivisionError: a bug" in done.err
    assert "Traceback" in done.err
    assert [tracked.info.status for tracked in tracked_runs(folder)] == ["FAILED"]


def test_a_broken_store_ends_a_sweep_before_it_begins(folder: Path) -> None:
    store = "tracking.uri=sqlite:///tiny.py/runs.db"
    done = run(folder, "-m", *OWN, SMALL, "mode=single,size_based", store)
    assert done.code == 2
    assert done.error.startswith("tracking at sqlite:")
    assert "infeasible" not in done.out
    assert not (folder / "outputs").exists()


def test_a_reused_folder_shows_this_sweep_alone(folder: Path) -> None:
    (folder / "conf" / "model" / "sub").mkdir(parents=True)
    text = "name: ${oc.select:.factory}\nfactory: tiny:build\n"
    (folder / "conf" / "model" / "sub" / "mine.yaml").write_text(text)
    swept = ["-m", "model=sub/mine", SMALL, "reserve=none", "tracking=none"]
    swept += ["hydra.sweep.dir=outputs/swept"]
    done = run(folder, *swept, "mode=size_based,kl_based")
    assert done.code == 0, done.err
    assert "2 runs, model=tiny:build" in done.out
    (old,) = (folder / "outputs" / "swept").glob("1_*/**/result.json")
    old.write_text("{")
    os.utime(old, (0, 0))
    done = run(folder, *(s for s in swept if s != SMALL), "mode=single", "devices=1x1gb,1x2gb")
    assert done.code == 0, done.err
    assert "2 runs, model=tiny:build, mode=single" in done.out
    table = done.out.partition("2 runs")[2]
    assert "size_based" not in table
    assert "kl_based" not in table


def test_jobs_that_would_overwrite_each_other_are_refused(folder: Path) -> None:
    swept = ["-m", *OWN, SMALL, "tracking=none", "mode=size_based,kl_based"]
    done = run(folder, *swept, "hydra.sweep.dir=outputs/swept", "hydra.sweep.subdir=one")
    assert done.code == 2
    assert done.error.startswith("2 jobs would write to ")


def test_a_rate_can_be_swept_by_number(folder: Path) -> None:
    done = run(folder, "-m", *OWN, SMALL, "tracking=none", "transfer_rate=choice(16e9,32e9)")
    assert done.code == 0, done.err
    assert {"transfer", "rate"} <= set(done.out.partition("─")[0].split())


@pytest.mark.usefixtures("store")
def test_an_incompatible_combination_is_no_failure(folder: Path) -> None:
    """In a grid over modes and schedules: exit code 0, no metric, and nothing is run again."""
    swept = ("-m", *OWN, SMALL, "schedule=none,gpipe", "mode=pipeline", "microbatches=2")
    done = run(folder, *swept)
    assert done.code == 0, done.err
    assert "2 of 2 jobs done (1 not applicable)" in done.err
    assert "not applicable" in done.out
    assert "failed" not in done.out
    assert "microbatches=2 needs a schedule" in done.out
    (parent,) = tracked_runs(folder, "tags.kind = 'sweep'")
    runs = tracked_runs(folder, f"tags.mlflow.parentRunId = '{parent.info.run_id}'")
    outcomes = {child.data.tags["outcome"]: child for child in runs}
    assert set(outcomes) == {"finished", "not_applicable"}
    aside = outcomes["not_applicable"]
    assert (aside.info.status, aside.data.metrics) == ("FINISHED", {})
    assert aside.data.tags["mlflow.note.content"].startswith("not applicable: microbatches=2")
    assert run(folder, *swept).err.startswith("2 of 2 jobs done (2 before, 1 not applicable)")
    # On its own it is a mistake.
    alone = run(folder, *OWN, SMALL, "microbatches=2")
    assert alone.code == 2
    (failed,) = tracked_runs(folder, "tags.outcome = 'failed'")
    assert failed.info.status == "FAILED"

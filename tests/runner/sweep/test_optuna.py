"""The search with Optuna as a command: interrupted, resumed, and refused."""

import re
import shlex
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from omegaconf import OmegaConf

from fxpart.errors import SpecError
from runner.sweep.optuna.sweeper import run_optuna
from tests.runner.command import MODEL, OWN, SMALL, Done, tracked_runs
from tests.runner.several import run_several

# With such a small model, the host that starts its operators would make all plans equally fast.
OPTUNA = ["-m", "hydra/sweeper=optuna", *OWN, "runtime=graph"]
SEARCH = [
    *OPTUNA,
    "mode=kl_based,cost_aware,size_based",
    "devices=1x0.06mb,2x0.06mb,4x0.06mb",
    "transfer_rate=1gb,16gb",
]
"""18 combinations, of which 6 do not fit."""
NONE = ["tracking=none", "hydra.sweep.dir=outputs/swept"]
COMMANDS = {
    "first": [*SEARCH, "hydra.sweeper.n_trials=5"],
    # Settings that are no part of a job do not make it another sweep.
    "second": [*SEARCH, "hydra.sweeper.n_trials=10", "-v", "figures=none", "question=Why?"],
    "whole": [*SEARCH, "hydra.sweeper.n_trials=10", "tracking=none"],
    "where": [*SEARCH, *NONE, "where='n_devices > 1 and mode == \"kl_based\"'"],
    "pareto": [
        *SEARCH,
        "hydra.sweeper.metric=[latency_ms,lower_bound_ms]",
        # Two opposed goals, so that several jobs are best.
        "hydra.sweeper.direction=[minimize,maximize]",
        "hydra.sweeper.n_jobs=4",
    ],
    "unfit": [*OPTUNA, *NONE, "mode=kl_based,size_based", "devices=1x0.06mb"],
    "no_step": [*OPTUNA, *NONE, "mode=kl_based,size_based", "hydra.sweeper.metric=step_ms", SMALL],
    "typo": [*OPTUNA, *NONE, "mode=kl_based,size_based", "hydra.sweeper.metric=latency"],
}
BEST = re.compile(r"best: +latency_ms ([\d.e-]+) in job (\d+)\n +python -m runner (.+)")


def best(done: Done) -> tuple[float, int, list[str]]:
    """Return the best latency, its job, and the overrides that repeat it."""
    match = BEST.search(done.out)
    assert match, done.out + done.err
    return float(match[1]), int(match[2]), shlex.split(match[3])


@pytest.fixture(scope="module")
def searched(
    tmp_path_factory: pytest.TempPathFactory, graph_cache: Path, empty_store: Path
) -> Iterator[tuple[Path, dict[str, Done]]]:
    """A folder in which all the commands were run, and their results."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "tiny.py").write_text(MODEL)
    (folder / "outputs").mkdir()
    shutil.copy(empty_store, folder / "outputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(graph_cache))
        patch.setenv("COLUMNS", "120")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        done = run_several(folder, *COMMANDS.values())
        yield folder, dict(zip(COMMANDS, done, strict=True))


Searched = tuple[Path, dict[str, Done]]


def test_an_interrupted_search_continues(searched: Searched) -> None:
    folder, done = searched
    assert [done[name].code for name in ("first", "second", "whole")] == [0] * 3
    assert "5 of 5 jobs done" in done["first"].err
    assert "10 of 10 jobs done (5 before" in done["second"].err
    assert best(done["second"]) == best(done["whole"])
    ended, _ = tracked_runs(folder, "tags.kind = 'sweep'")[::-1]
    assert ended.info.status == "FINISHED"
    children = tracked_runs(folder, f"tags.sweeps LIKE '% {ended.data.tags['sweep_id']} %'")
    assert len(children) == len({child.data.tags["config_key"] for child in children}) == 10


def test_the_best_is_logged_to_the_sweep(searched: Searched) -> None:
    folder, done = searched
    latency, _, overrides = best(done["second"])
    parent, pareto = tracked_runs(folder, "tags.kind = 'sweep'")[::-1]
    assert parent.data.metrics["best_latency_ms"] == latency
    assert parent.data.tags["best_command"] == shlex.join(["python", "-m", "runner", *overrides])
    children = tracked_runs(folder, "tags.kind = 'run'")
    latencies = {child.info.run_id: child.data.metrics.get("latency_ms") for child in children}
    assert latencies[parent.data.tags["best_run"]] == latency
    assert latency == min(value for value in latencies.values() if value is not None)
    # Of jobs run now as of earlier ones; for several, no command.
    ids = pareto.data.tags["best_run"].split()
    assert len(ids) == done["pareto"].out.count("best: ") > 1
    assert set(ids) <= set(latencies)
    assert not pareto.data.tags.get("best_command")


def test_a_search_ends_when_no_combination_is_left(searched: Searched) -> None:
    _, done = searched
    assert done["where"].code == 0, done["where"].err
    assert "nothing new to propose after 4 jobs" in done["where"].out
    overrides = best(done["where"])[2]
    assert "mode=kl_based" in overrides
    assert "devices=1x0.06mb" not in overrides


def test_with_two_goals_the_best_are_those_that_no_other_dominates(searched: Searched) -> None:
    _, done = searched
    assert done["pareto"].code == 0, done["pareto"].err
    match = re.search(r"pareto: +(\d+) of 18 jobs that no other beats in (.+)", done["pareto"].out)
    assert match
    assert match[2] == "latency_ms and lower_bound_ms"
    values = re.findall(
        r"best: +latency_ms ([\d.e-]+), lower_bound_ms ([\d.e-]+) ", done["pareto"].out
    )
    assert len(values) == int(match[1]) > 1
    ordered = sorted((float(latency), float(bound)) for latency, bound in values)
    for (latency, bound), (slower, higher) in pairwise(ordered):
        assert latency < slower
        assert bound < higher


def test_a_search_in_which_nothing_fits_has_no_best(searched: Searched) -> None:
    _, done = searched
    assert done["unfit"].code == 2
    assert "best:" not in done["unfit"].out
    assert "Traceback" not in done["unfit"].err


def test_an_unknown_metric_is_one_line(searched: Searched) -> None:
    _, done = searched
    assert done["typo"].code == 2
    assert done["typo"].error.startswith(
        "hydra.sweeper.metric=latency is not a metric of a finished job; nearest: latency_ms"
    )
    assert "jobs done" not in done["typo"].err
    # Names that depend on the configuration are not known before.
    assert done["no_step"].code == 2
    assert "2 of 2 jobs done" in done["no_step"].err
    assert (
        "hydra.sweeper.metric=step_ms is not a numeric metric of any finished job"
        in done["no_step"].err
    )


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"n_trials": 0}, "hydra.sweeper.n_trials=0 must be a whole number from 1"),
        ({"n_jobs": True}, "hydra.sweeper.n_jobs=True must be a whole number from 1"),
        ({"seed": "x"}, "hydra.sweeper.seed=x must be a whole number from 0"),
    ],
)
def test_meaningless_numbers_are_refused(mistake: dict[str, object], message: str) -> None:
    sweeper = {"params": None, "n_trials": 3, "n_jobs": 1, "seed": None, **mistake}
    config = OmegaConf.create({"hydra": {"sweeper": sweeper}})
    with pytest.raises(SpecError, match=message):
        run_optuna(cast("Any", None), lambda _: None, config, [])


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SpecError, match=r"needs optuna; pip install .*\[optuna\]"):
        run_optuna(cast("Any", None), lambda _: None, cast("Any", None), [])

"""`objective=`, published problems as models, and how a search continues."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fxpart.errors import SpecError
from fxpart.placement.optimal.mode import WATCHER, Progress
from runner.experiment.check import check_all
from runner.experiment.experiment import plan
from runner.experiment.headline import headline, memory_series
from runner.experiment.model_spec import model_spec
from runner.experiment.objective import objective_line, progress_text, watched
from runner.experiment.result import Result
from runner.output.metrics import SERIES
from tests.placement.workloads import document, largest_load_s, sample_s
from tests.runner.command import OWN
from tests.runner.composed import read

WORKLOAD = ("model=workload", "model.path=problem.json", "mode=optimal", "mode.steps=8")


@pytest.fixture
def problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of `WORKLOAD`, in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("problem.json").write_text(json.dumps(document(1)))
    return Path("problem.json")


def _planned(*overrides: str) -> Result:
    config = read(*overrides)
    return plan(config, model_spec(config))


@pytest.mark.usefixtures("problem")
@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_a_published_problem_sets_its_devices_and_its_cost_model(objective: str) -> None:
    result = _planned(*WORKLOAD, f"objective={objective}")
    assert result.problem.topology.n_devices == 3
    assert "optimal, 2xaccelerator+1xcpu_core" in result.subject_line
    workload = result.problem.workload
    assert workload is not None
    metrics, device_of = headline(result), tuple(result.assignment.device_of.tolist())
    if objective == "throughput":
        expected = largest_load_s(workload, device_of) * 1e3
        assert metrics["load_ms"] == pytest.approx(expected, rel=1e-9)
        assert metrics["load_gap_pct"] == pytest.approx(
            (metrics["load_ms"] / metrics["load_bound_ms"] - 1) * 100
        )
    else:
        expected = sample_s(workload, device_of) * 1e3
        assert metrics["latency_ms"] == pytest.approx(expected, rel=1e-9)
        assert "load_ms" not in metrics
    series = memory_series(result)
    assert set(series) == {m.name for m in SERIES} - {"search_best_gib", "search_best_j"}
    assert series["search_best_ms"][-1][1] == pytest.approx(expected, rel=1e-9)
    points = {(round(p.seconds * 1e3), p.best_s * 1e3) for p in result.curve}
    assert set(series["search_best_ms"]) <= points
    assert "bound" in progress_text(result.curve[-1])
    nothing = replace(result.curve[-1], best_s=float("inf"))
    text = progress_text(nothing)
    assert "s: no placement yet, bound " in text
    assert "inf" not in text


def test_an_interrupted_search_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(1.5, 12, 0.5, 0.4, "work", is_interrupted=True)
    with watched(shown=False) as curve:
        watcher = WATCHER.get()
        assert watcher is not None
        watcher(progress)
    assert curve == [progress]
    assert capsys.readouterr().err == ("interrupted after 12 steps: the best plan found so far\n")


def test_the_load_of_a_search_for_throughput_is_no_larger_than_for_latency(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    model = (*OWN, "+model.factory_args.layers=8", "devices=3x16gb")
    loads = {}
    for mode in (("mode=kl_based",), ("mode=optimal", "mode.steps=7")):
        by_objective = [
            _planned(*model, *mode, f"objective={objective}").evaluation.load_s
            for objective in ("latency", "throughput")
        ]
        assert by_objective[1] <= by_objective[0] * (1 + 1e-9)
        loads[mode[0]] = by_objective[1]
    assert loads["mode=optimal"] <= loads["mode=kl_based"] * (1 + 1e-9)


@pytest.mark.usefixtures("problem")
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("objective=speed",), "objective=speed does not exist"),
        (("phase=training",), "phase=training applies to models"),
        (("execute=local",), "execute=local applies to models"),
        (("weights=int8",), "weights=int8 applies to models"),
        (("granularity=module",), "granularity=module applies to models"),
        (("model.batch_size=2",), "use model.batch_size=1"),
        (("runtime.host_launch_s=1e-6",), "use runtime.host_launch_s=null"),
        (("mode.steps=0",), "mode.steps must be 1"),
        (("mode.time_limit_s=0",), "mode.time_limit_s must be above 0"),
    ],
)
def test_meaningless_combinations_are_refused(overrides: tuple[str, ...], words: str) -> None:
    config = read(*WORKLOAD, *overrides)
    with pytest.raises(SpecError, match=words):
        check_all(config)


@pytest.mark.usefixtures("problem")
@pytest.mark.parametrize("override", ["devices=2xa10", "transfer_rate=pcie5"])
def test_devices_of_a_published_problem_are_its_own(override: str) -> None:
    with pytest.raises(SpecError, match=f"{override} applies to models, .*; leave out"):
        read(*WORKLOAD, override)


def test_a_file_without_an_object_is_named_in_one_line(problem: Path) -> None:
    problem.write_text("[1, 2]")
    with pytest.raises(SpecError, match="placement problem; it needs an object with maxFPGAs"):
        read(*WORKLOAD)


@pytest.mark.usefixtures("problem")
@pytest.mark.parametrize("mode", ["kl_based", "cost_aware"])
def test_options_of_another_search_are_refused(mode: str) -> None:
    with pytest.raises(SpecError, match=r"mode.min_gain=0.01 applies to models"):
        _planned(*WORKLOAD[:2], f"mode={mode}", "mode.min_gain=0.01")


@pytest.mark.parametrize(
    ("objective", "metric", "series"),
    [("memory", "peak_memory_gib", "search_best_gib"), ("energy", "energy_j", "search_best_j")],
)
def test_memory_and_energy_are_objectives_of_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, objective: str, metric: str, series: str
) -> None:
    monkeypatch.chdir(folder)
    model = (*OWN, "+model.factory_args.layers=3", "devices=2x16gb+1xt4")
    result = _planned(*model, "mode=optimal", "mode.steps=8", f"objective={objective}")
    other = _planned(*model, "mode=kl_based")
    metrics = headline(result)
    bound = metrics[metric.replace("peak_", "").replace(objective, f"{objective}_bound")]
    assert metrics[f"{objective}_gap_pct"] == pytest.approx((metrics[metric] / bound - 1) * 100)
    assert memory_series(result)[series][-1][1] == pytest.approx(metrics[metric], rel=1e-9)
    assert objective_line(result.problem, result.evaluation, 3).count("lower bound") == 1
    assert objective_line(other.problem, other.evaluation, 3) == ""
    if objective == "memory":
        assert metrics[metric] < headline(other)[metric]
    with pytest.raises(
        SpecError, match=("applies to one input, without schedule, data_parallel and")
    ):
        _planned(*model, f"objective={objective}", "schedule=gpipe")


@pytest.mark.parametrize("objective", ["memory", "energy"])
def test_replicas_that_share_a_sequence_are_no_plan_for_one_input(objective: str) -> None:
    of_training = ("phase=training", "mode=single", "devices=2xh100", "context_parallel=2")
    with pytest.raises(SpecError, match=f"objective={objective} applies to one input"):
        check_all(read("model=gpt2", *of_training, f"objective={objective}"))


def test_energy_counts_each_board_of_a_group() -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    llama = ("model.architecture=LlamaForCausalLM", "+model.config.num_attention_heads=4")
    model = (
        *("model=transformers", *llama, "model.seq_len=16", "mode=single"),
        *(f"+model.config.{name}={size}" for name, size in sizes.items()),
        *("devices=4xh100", "tensor_parallel=4"),
    )
    result = _planned(*model, "objective=energy")
    (group,) = result.evaluation.devices
    waiting_s = result.evaluation.latency_s - group.load_s
    energy_j = 4 * 700 * (group.load_s + 0.15 * waiting_s)
    assert headline(result)["energy_j"] == pytest.approx(energy_j, rel=1e-9)

"""Pipelines carried out by the command, in processes of their own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.runner.command import OWN, SMALL, Done, run, tracked_runs

PIPELINE = [*OWN, "mode=pipeline"]
ON_THIS_CPU = ["devices=2xcpu", "transfer_rate=loopback"]
AS_RUN = ["phase=training", "phase.train_mode=false", "optimizer=none"]
"""A training step with the settings of a real run here."""
PLAN_FILES = ("assignment.json", "trace.json", "schedule.svg", "config/resolved.yaml")
MORE_MODELS = """
import torch
from torch import nn

def tied(batch_size, dtype, width=64):
    first, last = nn.Linear(width, width), nn.Linear(width, width)
    last.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(width, width), nn.Tanh(), last)
    return model.to(dtype), (torch.linspace(-1, 1, batch_size * width).reshape(batch_size, width),)

def by_chance(batch_size, dtype, width=64):
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)
    return nn.Sequential(nn.Linear(width, width), Noise()), (torch.zeros(batch_size, width),)

def checkpointed(batch_size, dtype, width=64):
    from torch.utils.checkpoint import checkpoint
    class Again(nn.Linear):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False).tanh()
    model = nn.Sequential(nn.Linear(width, width), Again(width, width))
    return model, (torch.zeros(batch_size, width),)

class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x.tanh()
    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.x

def keeping(batch_size, dtype, width=64):
    class Layer(nn.Linear):
        def forward(self, x):
            return Keeping.apply(super().forward(x))
    return nn.Sequential(*(Layer(width, width) for _ in range(4))), (torch.ones(batch_size, width),)
"""


def result_of(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def test_a_sweep_over_schedules_is_ranked(folder: Path) -> None:
    done = run(
        folder,
        "-m",
        *PIPELINE,
        SMALL,
        "mode.stages=2",
        "schedule=gpipe,1f1b",
        "microbatches=2,4",
        "tracking=none",
        "hydra.sweep.dir=outputs/swept",
    )
    assert done.code == 0, done.err
    assert "* least time per example for its model" in done.out
    rows = [line.split() for line in done.out.splitlines() if line.startswith((" * ", " = "))]
    # Equal jobs are in the order of their settings, the first marked as the best of its batch.
    assert [(cells[0], cells[2]) for cells in rows] == [("*", "1f1b"), ("=", "gpipe")] * 2
    (out, *_) = sorted((folder / "outputs" / "swept").glob("1_*"))
    result = result_of(out)
    schedule, metrics = result["schedule"], result["metrics"]
    assert (schedule["name"], schedule["microbatches"]) == ("gpipe", 4)
    assert [row["device"] for row in schedule["devices"]] == [0, 1]
    # Two equal stages of four microbatches: five times a stage's turn, and a transfer.
    turn_s = schedule["devices"][0]["busy_s"] / 4
    assert schedule["devices"][1]["busy_s"] == pytest.approx(4 * turn_s)
    assert 5 * turn_s < schedule["step_s"] < 6 * turn_s
    assert metrics["step_ms"] == pytest.approx(schedule["step_s"] * 1e3)
    assert metrics["examples_per_s"] == pytest.approx(
        4 * result["config"]["resolved"]["model"]["batch_size"] / schedule["step_s"]
    )
    assert result["measured"] is None
    assert "gpipe: one step" in (out / "schedule.svg").read_text()


def test_stages_cut_after_modules_are_run_and_kept(folder: Path) -> None:
    from fxpart.execution.stages.stage_files import load_stage

    done = run(
        folder,
        *PIPELINE,
        "devices=3x1mb",
        "mode.cut_after=[1,3]",
        "execute=local",
        "execute.repeats=2",
        "execute.save_stages=true",
        "latency=calibrated",
        "tracking=none",
        "hydra.run.dir=outputs/cut",
    )
    assert done.code == 0, done.err
    assert "results:   equal to the unsplit model's" in done.out
    out = folder / "outputs" / "cut"
    result = result_of(out)
    measured, metrics = result["measured"], result["metrics"]
    assert (measured["way"], measured["max_difference"]) == ("local", 0.0)
    assert len(measured["runs_s"]) == 2
    # Two layers per device, of 64 x 64 + 64 floats each, and two rows of 64.
    assert measured["peak_bytes"] == measured["predicted_peak_bytes"]
    assert min(measured["peak_bytes"]) == 2 * 16_640 + 2 * 256
    assert metrics["measured_ms"] == pytest.approx(measured["time_s"] * 1e3)
    error = measured["predicted_s"] / measured["time_s"] - 1
    assert metrics["time_error_pct"] == pytest.approx(error * 100)
    points = json.loads((out / "split_points.json").read_text())
    assert points == {"2.0": "BEGINNING", "4.0": "BEGINNING"}
    loaded = [load_stage(out / "stages", stage) for stage in range(3)]
    for stage in loaded:
        assert stage.n_stages == 3
        weights = sum(weight.numel() for weight in stage.module.parameters())
        assert weights == 2 * (64 * 64 + 64)


@pytest.mark.usefixtures("store")
def test_a_training_step_in_two_processes(folder: Path) -> None:
    done = run(
        folder,
        *PIPELINE,
        *ON_THIS_CPU,
        "mode.cut_after=[2]",
        *AS_RUN,
        "schedule=1f1b",
        "microbatches=4",
        "execute=pipeline",
        "execute.repeats=1",
        "latency=profiled",
        "latency.repeats=1",
        "hydra.run.dir=outputs/trained",
    )
    assert done.code == 0, done.err
    assert "equal to the unsplit model's, gradients equal" in done.out
    out = folder / "outputs" / "trained"
    assert "1f1b: one training step" in (out / "schedule.svg").read_text()
    result = result_of(out)
    measured, metrics = result["measured"], result["metrics"]
    assert (result["schedule"]["name"], result["schedule"]["training"]) == ("1f1b", True)
    assert (measured["way"], measured["max_difference"]) == ("pipeline", 0.0)
    assert measured["gradient_difference"] == 0.0
    assert len(measured["peak_bytes"]) == 2
    # Weights and their gradients: three layers per stage. The engine adds small tensors of its own.
    assert min(measured["peak_bytes"]) > 2 * 3 * 16_640
    assert abs(metrics["peak_error_pct"]) < 5
    (tracked,) = tracked_runs(folder, "tags.kind = 'run'")
    assert tracked.info.status == "FINISHED"
    for name in ("measured_ms", "predicted_ms", "time_error_pct", "step_ms", "bubble_pct"):
        assert tracked.data.metrics[name] == pytest.approx(metrics[name], rel=1e-5), name
    params = tracked.data.params
    assert (params["schedule"], params["microbatches"], params["phase"]) == (
        "1f1b",
        "4",
        "training",
    )


@pytest.mark.usefixtures("store")
def test_a_stage_that_stops_answering_fails_the_run(folder: Path) -> None:
    done = run(
        folder,
        *PIPELINE,
        *ON_THIS_CPU,
        "mode.stages=2",
        "schedule=gpipe",
        "microbatches=2",
        "execute=pipeline",
        "execute.timeout_s=1e-6",
        "hydra.run.dir=outputs/silent",
    )
    assert done.code == 2
    assert " of 2 " in done.error
    assert "all stages were ended" in done.error
    out = folder / "outputs" / "silent"
    result = result_of(out)
    assert (result["status"], result["error"]) == ("failed", done.error)
    assert result["measured"] is None
    # The plan is not lost with it.
    assert "gpipe: " in done.out
    for name in PLAN_FILES:
        assert (out / name).stat().st_size > 0, name
    (tracked,) = tracked_runs(folder, "tags.kind = 'run'")
    assert tracked.info.status == "FAILED"
    assert "measured_ms" not in tracked.data.metrics


def _run_once(folder: Path, model: str, *arguments: str) -> Done:
    """Run one step of a model of `MORE_MODELS` on torch's engine."""
    (folder / "more.py").write_text(MORE_MODELS)
    return run(
        folder,
        *PIPELINE,
        *ON_THIS_CPU,
        f"model.factory=more:{model}",
        "schedule=gpipe",
        "execute=pipeline",
        "execute.repeats=1",
        "tracking=none",
        f"hydra.run.dir=outputs/{model}",
        *arguments,
    )


def test_gradients_of_a_tied_weight_count(folder: Path) -> None:
    """Its two halves are first summed over microbatches: rounding, where all else is equal."""
    step = ("mode.cut_after=[1]", *AS_RUN, "microbatches=3")
    done = _run_once(folder, "tied", *step)
    assert done.code == 0, done.err
    result = result_of(folder / "outputs" / "tied")
    measured = result["measured"]
    assert 0 < measured["tied_gradient_difference"] < 1e-5
    assert measured["gradient_difference"] == measured["tied_gradient_difference"]
    assert result["metrics"]["gradient_difference"] == measured["gradient_difference"]
    assert "gradients within" in done.out


def test_differing_results_fail_the_run(folder: Path) -> None:
    done = _run_once(folder, "by_chance", "mode.cut_after=[0]", "microbatches=2")
    assert done.code == 2, done.out
    assert "the split model's results differ " in done.error
    assert "leave out random numbers" in done.error
    assert result_of(folder / "outputs" / "by_chance")["status"] == "failed"


def test_a_step_that_recomputes_by_itself_is_planned_and_not_run(folder: Path) -> None:
    done = _run_once(folder, "checkpointed", "mode.cut_after=[0]", "microbatches=2", *AS_RUN)
    assert done.code == 2, done.out
    assert "recompute nothing, but the model calls torch.utils.checkpoint itself" in done.error
    assert "gpipe: " in done.out


def test_what_a_function_keeps_is_in_the_peak_of_a_run(folder: Path) -> None:
    (folder / "more.py").write_text(MORE_MODELS)
    done = run(
        folder,
        *OWN,
        "mode=single",
        "devices=1xcpu",
        "model.factory=more:keeping",
        "model.batch_size=32",
        *AS_RUN,
        "execute=local",
        "execute.repeats=1",
        "tracking=none",
        "hydra.run.dir=outputs/keeping",
    )
    assert done.code == 0, done.err
    metrics = result_of(folder / "outputs" / "keeping")["metrics"]
    # But for the four bytes of the loss, held by the run.
    assert metrics["predicted_peak_gib"] * 2**30 == metrics["measured_peak_gib"] * 2**30 - 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["execute=pipeline"], "use schedule=gpipe or schedule=1f1b"),
        (["schedule=gpip"], "schedule=gpip does not exist; nearest: gpipe"),
        (
            ["mode.cut_after=[7]", SMALL],
            "mode.cut_after names '7', which the model does not have; there are: 0, 0.0, 0.1, 1,",
        ),
    ],
)
def test_a_mistake_is_one_line(folder: Path, arguments: list[str], message: str) -> None:
    done = run(folder, *PIPELINE, *arguments, "tracking=none")
    assert done.code == 2
    assert message in done.error


def test_the_page_s_example_loads_real_weights_onto_a_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    small: dict[str, Any] = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 50}
    torch.manual_seed(0)
    original = GPT2LMHeadModel(GPT2Config(**small))
    original.eval()  # type: ignore[no-untyped-call]
    original.save_pretrained(folder / "gpt2")
    done = run(
        folder,
        "model=gpt2",
        *(f"model.config.{key}={value}" for key, value in small.items()),
        "model.seq_len=8",
        "model.batch_size=1",
        "mode=pipeline",
        "mode.stages=2",
        "devices=2xcpu",
        "execute=local",
        "execute.repeats=1",
        "execute.save_stages=true",
        "tracking=none",
        "hydra.run.dir=outputs/gpt2",
    )
    assert done.code == 0, done.err
    page = (Path(__file__).resolve().parents[3] / "docs" / "execution.md").read_text()
    (block,) = re.findall(r"```python\n# weights.py\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(folder)
    scope: dict[str, Any] = {}
    exec(compile(block, "weights.py", "exec"), scope)
    with torch.no_grad():
        expected = original(torch.zeros(1, 8, dtype=torch.int64)).logits
    assert torch.allclose(scope["values"][0], expected, atol=1e-5)

"""Real pipeline runs, one process per stage, compared with the unsplit model in this process."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.training.joint import joint_capture
from fxpart.core.partitions import partition_by_device
from fxpart.errors import SpecError
from fxpart.execution.forward_devices import forward_devices
from fxpart.execution.pipeline_run import PipelineRun, run_pipeline
from fxpart.execution.real_model import real_model
from fxpart.execution.split.placement import split_by_assignment
from fxpart.execution.stages.chain import Chain, chain_stages, tied_parameters
from fxpart.placement.pipeline import PipelineOptions, pipeline
from fxpart.schedule import EngineStage, engine_peak_bytes, engine_stages
from tests.execution.pipeline_scene import cut_chain, skips, skips_inputs
from tests.sketch import devices, problem

ROUNDING = 1e-6
"""For float32 sums of a few terms, as a share of the largest element."""
GPT2 = ModelSpec(
    "gpt2",
    architecture="GPT2LMHeadModel",
    config={"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 101, "n_positions": 64},
    batch_size=2,
    seq_len=32,
)


@dataclass(frozen=True, eq=False, slots=True)
class Scene:
    """GPT-2 in two stages, for its forward and a training step, and four microbatches."""

    chain: Chain
    microbatches: list[tuple[Tensor, ...]]
    forward: tuple[EngineStage, ...]
    training: tuple[EngineStage, ...]
    result_bytes: int


@pytest.fixture(scope="module")
def gpt2() -> Scene:
    """Return the scene; both graphs are cut at the same position."""
    real = real_model(GPT2)
    step = joint_capture(real.module, real.args, real.kwargs)
    two = devices(10**9, 10**9)
    whole = problem(step.graph, two)
    placed = pipeline(whole, PipelineOptions(stages=2))
    graph = op_graph(step.forward)
    home = forward_devices(placed.device_of, step.exported_names, graph)
    assignment = partition_by_device(graph, home)
    assert assignment.n_partitions == 2
    chain = chain_stages(split_by_assignment(step.forward.module(), graph, assignment))
    (shape,) = {t.shape for t in chain.flat_inputs(real.args, real.kwargs)}
    chance = torch.Generator().manual_seed(3)
    return Scene(
        chain,
        [(torch.randint(0, 101, shape, generator=chance),) for _ in range(4)],
        engine_stages(problem(graph, two), assignment),
        engine_stages(whole, placed),
        int(graph.value_bytes[graph.value_is_output].sum()),
    )


def _is_measured(run: PipelineRun, steps: int, stages: int) -> None:
    assert len(run.runs_s) == steps
    assert 0 < min(run.runs_s) <= run.step_s <= max(run.runs_s)
    assert run.throughput_per_s == pytest.approx(run.n_microbatches / run.step_s)
    assert len(run.stage_peak_bytes) == stages
    assert min(run.stage_peak_bytes) > 0


def test_gpt2_forward(gpt2: Scene) -> None:
    run = run_pipeline(gpt2.chain, gpt2.microbatches, training=False, steps=2)
    _is_measured(run, steps=2, stages=2)
    assert run.max_difference == 0.0
    assert (run.loss, run.gradient_difference, run.tied_gradient_difference) == (None, None, None)
    assert (run.schedule, run.backend, run.threads) == ("gpipe", "gloo", 1)
    predicted = engine_peak_bytes("gpipe", gpt2.forward, 4, training=False)
    assert run.stage_peak_bytes == pytest.approx(predicted, rel=0.02)


def test_gpt2_training(gpt2: Scene) -> None:
    # The embedding is also the weight of the last layer.
    tied = tied_parameters(gpt2.chain)
    assert [len({stage for stage, _ in group}) for group in tied] == [2]
    run = run_pipeline(gpt2.chain, gpt2.microbatches, training=True, schedule="1f1b", steps=1)
    _is_measured(run, steps=1, stages=2)
    assert run.max_difference == run.gradient_difference == 0.0
    assert run.tied_gradient_difference is not None
    assert run.tied_gradient_difference < ROUNDING
    predicted = engine_peak_bytes(
        "1f1b", gpt2.training, 4, training=True, result_bytes=gpt2.result_bytes
    )
    assert run.stage_peak_bytes == pytest.approx(predicted, rel=0.02)
    # GPipe holds all four microbatches.
    all_four = engine_peak_bytes("gpipe", gpt2.training, 4, training=True)
    assert run.stage_peak_bytes[0] < 0.8 * all_four[0]
    assert all(p.grad is None for s in gpt2.chain.stages for p in s.module.parameters())


def test_three_stages_with_skips_masks_and_writes_in_place() -> None:
    chain, microbatches = skips(), skips_inputs(3)
    before = [tuple(t.clone() for t in inputs) for inputs in microbatches]
    run = run_pipeline(chain, microbatches, training=True, schedule="gpipe", steps=1)
    _is_measured(run, steps=1, stages=3)
    assert run.max_difference == run.gradient_difference == 0.0
    assert run.tied_gradient_difference is not None
    assert run.tied_gradient_difference < ROUNDING
    for inputs, old in zip(microbatches, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(inputs, old, strict=True))


class _Loss(nn.Module):
    """Returns its loss after a value that is no real number; one weight is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y.argmax(-1), y.square().sum() + 0.0 * self.idle.bias.detach().sum()


def test_one_stage_whose_first_result_is_no_loss() -> None:
    inputs = [(torch.full((2, 4), float(number)),) for number in range(2)]
    run = run_pipeline(cut_chain(_Loss(), ()), inputs, training=True, steps=1)
    assert run.max_difference == run.gradient_difference == 0.0
    assert run.tied_gradient_difference is None
    _is_measured(run, steps=1, stages=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "1f1"}, "schedule '1f1' cannot be run on torch's engine; nearest: 1f1b"),
        ({"schedule": "1f1b"}, "needs a microbatch for each of 3 stages, there are 2"),
        ({"steps": 0}, "steps=0, threads=1, timeout_s=120.0: each must be positive"),
        ({"threads": 0}, "threads=0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"timeout_s": float("inf")}, "timeout_s=inf"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        run_pipeline(skips(), skips_inputs(2), training=False, **changes)  # type: ignore[arg-type]


def test_microbatches_must_have_equal_shapes() -> None:
    with pytest.raises(SpecError, match="there are no microbatches"):
        run_pipeline(skips(), [], training=False)
    unlike = [*skips_inputs(1), *skips_inputs(1, batch=3)]
    with pytest.raises(SpecError, match="microbatch 1 has other shapes"):
        run_pipeline(skips(), unlike, training=False)
    few = [inputs[:2] for inputs in skips_inputs(2)]
    with pytest.raises(SpecError, match="takes 3 tensors"):
        run_pipeline(skips(), few, training=False)


def test_a_model_without_memory_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(SpecError, match="on the meta device"):
        run_pipeline(cut_chain(model, ("_0",)), [(torch.ones(1, 2),)], training=False)

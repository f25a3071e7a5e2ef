"""Pipelines really run, one process a stage, and held against the unsplit model in this one."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpart.errors import SpecError
from fxpart.execution.pipeline_run import PipelineRun, run_pipeline
from fxpart.execution.real_model import real_model
from fxpart.models.spec import ModelSpec
from fxpart.partitions import partition_by_device
from fxpart.pipeline.chain import Chain, chain_stages
from fxpart.pipeline.one_parameter import tied_parameters
from fxpart.split import split_by_assignment
from tests.execution.pipeline_scene import cut_chain, skips, skips_inputs

ROUNDING = 1e-6
"""Of float32 sums of a handful of terms, as a share of the largest element."""
GPT2 = ModelSpec(
    "gpt2",
    architecture="GPT2LMHeadModel",
    config={"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 101, "n_positions": 64},
    batch_size=2,
    seq_len=32,
)


@pytest.fixture(scope="module")
def gpt2() -> tuple[Chain, list[tuple[Tensor, ...]]]:
    """Return GPT-2 in two stages, cut after half of its operators, and four microbatches."""
    real = real_model(GPT2)
    half = np.arange(real.graph.n_ops) * 2 // real.graph.n_ops
    assignment = partition_by_device(real.graph, half)
    assert assignment.n_partitions == 2
    chain = chain_stages(split_by_assignment(real.program.module(), real.graph, assignment))
    (shape,) = {t.shape for t in chain.flat_inputs(real.args, real.kwargs)}
    chance = torch.Generator().manual_seed(3)
    return chain, [(torch.randint(0, 101, shape, generator=chance),) for _ in range(4)]


def _is_measured(run: PipelineRun, steps: int, stages: int) -> None:
    assert len(run.runs_s) == steps
    assert 0 < min(run.runs_s) <= run.step_s <= max(run.runs_s)
    assert run.throughput_per_s == pytest.approx(run.n_microbatches / run.step_s)
    assert len(run.stage_peak_bytes) == len(run.stage_rss_bytes) == stages
    pairs = zip(run.stage_peak_bytes, run.stage_rss_bytes, strict=True)
    assert all(0 < peak < resident for peak, resident in pairs)


def _weight_bytes(chain: Chain, stage: int) -> int:
    module = chain.stages[stage].module
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


def test_gpt2_forward(gpt2: tuple[Chain, list[tuple[Tensor, ...]]]) -> None:
    chain, microbatches = gpt2
    run = run_pipeline(chain, microbatches, training=False, steps=2)
    _is_measured(run, steps=2, stages=2)
    assert run.max_difference == 0.0
    assert (run.loss, run.gradient_difference, run.tied_gradient_difference) == (None, None, None)
    assert (run.schedule, run.backend, run.threads) == ("gpipe", "gloo", 1)


def test_gpt2_training_under_both_schedules(
    gpt2: tuple[Chain, list[tuple[Tensor, ...]]],
) -> None:
    chain, microbatches = gpt2
    # The embedding is the last layer's weight too.
    assert [len({stage for stage, _ in group}) for group in tied_parameters(chain)] == [2]
    runs = {
        schedule: run_pipeline(chain, microbatches, training=True, schedule=schedule, steps=1)
        for schedule in ("gpipe", "1f1b")
    }
    for run in runs.values():
        _is_measured(run, steps=1, stages=2)
        assert run.max_difference == run.gradient_difference == 0.0
        assert run.tied_gradient_difference is not None
        assert run.tied_gradient_difference < ROUNDING
        for stage, peak in enumerate(run.stage_peak_bytes):
            # Weights and a gradient for each, at least.
            assert peak > 2 * _weight_bytes(chain, stage)
    assert runs["gpipe"].loss == runs["1f1b"].loss
    # All four microbatches are alive in GPipe, one for each stage from here on in 1F1B.
    for gpipe, one in zip(*(run.stage_peak_bytes for run in runs.values()), strict=True):
        assert one < gpipe
    assert all(p.grad is None for s in chain.stages for p in s.module.parameters())


def test_three_stages_with_skips_masks_and_writes_in_place() -> None:
    chain, microbatches = skips(), skips_inputs(3)
    before = [tuple(t.clone() for t in inputs) for inputs in microbatches]
    run = run_pipeline(chain, microbatches, training=True, schedule="1f1b", steps=1)
    _is_measured(run, steps=1, stages=3)
    assert run.max_difference == run.gradient_difference == 0.0
    assert run.tied_gradient_difference is not None
    assert run.tied_gradient_difference < ROUNDING
    for inputs, old in zip(microbatches, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(inputs, old, strict=True))


class _Loss(nn.Module):
    """Returns its loss, a number, after something that is no real number; one weight is unused."""

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
    ("changes", "said"),
    [
        ({"schedule": "1f1"}, "schedule '1f1' cannot be run on torch's engine; nearest: 1f1b"),
        ({"schedule": "1f1b"}, "needs a microbatch for each of 3 stages, there are 2"),
        ({"steps": 0}, "steps=0, threads=1, timeout_s=120.0: each must be positive"),
        ({"threads": 0}, "threads=0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"timeout_s": float("inf")}, "timeout_s=inf"),
    ],
)
def test_settings_that_mean_nothing(changes: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        run_pipeline(skips(), skips_inputs(2), training=False, **changes)  # type: ignore[arg-type]


def test_microbatches_must_be_alike() -> None:
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

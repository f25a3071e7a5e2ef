"""Plans with a symbolic batch and with replicas, from a configuration to their numbers."""

import pytest
import torch
from torch import Tensor, nn

from fxpart.errors import CaptureError
from runner.experiment.batch_report import batch_line
from runner.experiment.experiment import plan
from runner.experiment.headline import headline
from runner.experiment.model_spec import model_spec
from runner.experiment.replicas import replicas_line
from runner.experiment.result import Result
from runner.job.batch_files import sweep_columns
from runner.output.units import format_size
from tests.runner.composed import read

_WIDTH, _LAYERS = 24, 4
_OWN = (
    "model=custom",
    f"model.factory={__name__}:stack",
    "model.name=stack",
    "model.dtype=float32",
    "mode=pipeline",
    "transfer_rate=pcie4",
    "capture.use_cache=false",
    "tracking=none",
)


def stack(batch_size: int, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor]]:
    """Return layers of odd sizes, which an allocator must round, and (B, 24)."""
    layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(_LAYERS)]
    return nn.Sequential(*layers).to(dtype), (torch.zeros(batch_size, _WIDTH, dtype=dtype),)


class _Fixed(nn.Module):
    """A model with a batch size fixed in its code."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(batch, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def fixed(batch_size: int, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor]]:
    """Return a model of a single batch size, and (B, 24)."""
    return _Fixed(batch_size).to(dtype), (torch.zeros(batch_size, _WIDTH, dtype=dtype),)


def _planned(*overrides: str) -> Result:
    config = read(*_OWN, *overrides)
    return plan(config, model_spec(config))


@pytest.mark.parametrize("reserve", ["none", "cuda"])
@pytest.mark.parametrize("phase", ["inference", "training"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_row_of_the_sweep_is_the_run(replicas: int, phase: str, reserve: str) -> None:
    result = _planned(
        f"data_parallel={replicas}",
        f"devices={2 * replicas}x1gb",
        f"reserve={reserve}",
        f"phase={phase}",
        "capture.symbolic=batch",
        "model.batch_size=8",
        "batch_sweep=10",
    )
    assert result.batches is not None
    assert result.evaluation.devices_used == 2
    columns, metrics = sweep_columns(result.batches), headline(result)
    assert columns["batch"] == [replicas * batch for batch in range(1, 11)]
    row = columns["batch"].index(8)
    assert columns["latency_ms"][row] == pytest.approx(metrics["latency_ms"], rel=1e-12)
    examples_per_s = pytest.approx(metrics["examples_per_s"], rel=1e-12)
    assert columns["examples_per_s"][row] == examples_per_s
    for device, use in enumerate(result.evaluation.devices):
        assert columns[f"peak_bytes_device_{device}"][row] == use.peak_bytes
        assert result.batches.smallest_memory_bytes[device] == use.peak_bytes
        # No number here is a multiple of 512 by itself.
        unrounded = int(result.batches.peaks[device].at(batch=8 // replicas))
        assert (use.peak_bytes > unrounded) is (reserve == "cuda")
    assert columns["feasible"][row]
    assert metrics["max_batch_size"] >= 8
    needed = format_size(max(result.batches.smallest_memory_bytes))
    assert f"batch 8 needs {needed}" in batch_line(result.batches)


def test_replicas_cost_only_their_sums() -> None:
    step = ("phase=training", "optimizer=sgd", "reserve=none", "schedule=gpipe", "microbatches=2")
    single = _planned(*step, "devices=2x1gb", "model.batch_size=4")
    doubled = _planned(*step, "devices=4x1gb", "model.batch_size=8", "data_parallel=2")
    assert single.replicas is None
    assert doubled.replicas is not None
    assert doubled.problem.topology.n_devices == 2
    assert [use.weight_bytes for use in doubled.evaluation.devices] == [
        use.weight_bytes for use in single.evaluation.devices
    ]
    cost, metrics = doubled.replicas.cost, headline(doubled)
    # Every weight has one gradient of its own size.
    weights = _LAYERS * 4 * (_WIDTH * _WIDTH + _WIDTH)
    assert cost.reduced_bytes.sum() >= weights
    assert metrics["data_parallel"] == 2.0
    assert metrics["all_reduce_gib"] == cost.reduced_bytes.max() / 2**30
    assert metrics["exposed_all_reduce_ms"] > 0
    assert metrics["exposed_all_reduce_ms"] <= metrics["all_reduce_ms"] * (1 + 1e-9)
    assert doubled.evaluation.latency_s == cost.latency_s > single.evaluation.latency_s
    assert replicas_line(doubled.replicas).startswith("2 replicas of 2 devices; all-reduce of")
    assert single.schedule is not None
    assert doubled.schedule is not None
    assert doubled.schedule.step_s > single.schedule.step_s
    # Copies of gradients in buckets.
    assert max(doubled.schedule.peak_bytes) > max(single.schedule.peak_bytes)


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (("capture.symbolic=batch",), "set capture.symbolic=none"),
        (("data_parallel=2",), "data_parallel=2 needs a symbolic batch, set data_parallel=1"),
        (("data_parallel=2", "capture.symbolic=batch"), "set capture.symbolic=none"),
    ],
)
def test_a_batch_that_cannot_be_symbolic_is_refused(overrides: tuple[str, ...], hint: str) -> None:
    with pytest.raises(CaptureError, match=rf"weights of model stack differ .*; {hint}$"):
        _planned(
            f"model.factory={__name__}:fixed", "devices=4x1gb", "model.batch_size=8", *overrides
        )

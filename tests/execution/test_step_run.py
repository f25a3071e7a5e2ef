"""Training steps in another order than autograd's: results and peaks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.training.joint import JointCapture, joint_capture
from fxpart.core.graph import IntArray, without_python
from fxpart.core.partitions import partition_by_device
from fxpart.core.phases import StepOptions
from fxpart.errors import ExecutionError, SpecError
from fxpart.execution.local import LocalRun
from fxpart.execution.real_model import RealModel
from fxpart.execution.step_run import run_step
from tests.execution.scene import Shifted, predicted_peaks, small

pytestmark = pytest.mark.usefixtures("one_thread")

LATE = StepOptions(backward_order="late_weight_gradients")


def _late(real: RealModel) -> tuple[RealModel, JointCapture]:
    step = joint_capture(real.module, real.args, real.kwargs, LATE)
    return replace(real, program=step.forward, graph=op_graph(step.forward)), step


def _run(
    real: RealModel, step: JointCapture, device_of: IntArray, devices: int
) -> tuple[LocalRun, tuple[int, ...]]:
    """Return the outcome of a step with that placement, by its forward; and the prediction.

    The run is one of the graph, in which neither Python nor autograd holds any value.
    """
    placed = device_of[step.graph.forward_of][step.graph.group]
    run = run_step(real, step, partition_by_device(step.graph, placed), devices, repeats=1)
    return run, predicted_peaks(without_python(step.graph), placed, devices)


def _layers() -> RealModel:
    """Return three layers with weights of 64 bytes; with 8 rows, activations have 128."""
    module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    step = joint_capture(module, (torch.randn(8, 4),))
    return RealModel(module, (torch.randn(8, 4),), {}, step.forward, op_graph(step.forward))


def test_a_step_of_another_module_is_refused() -> None:
    module, inputs = Shifted(4, 4), (torch.randn(2, 4),)
    plain = joint_capture(module, inputs)
    real, step = _late(RealModel(module, inputs, {}, plain.forward, op_graph(plain.forward)))
    with pytest.raises(ExecutionError, match="results differ from the unsplit model's by"):
        _run(real, step, np.zeros(step.graph.n_ops, dtype=np.int64), 1)


def test_a_step_by_hand() -> None:
    real, step = _late(_layers())
    run, predicted = _run(real, step, np.zeros(step.graph.n_ops, dtype=np.int64), 1)
    # See the test of the order itself: both gradients of activations exist before the first of
    # a weight.
    assert run.peak_bytes == predicted == (3 * 64 + 128 + 4 + 2 * 128 + 128 + 64 + 2 * 128,)
    assert run.max_difference == run.gradient_difference == 0.0
    assert run.loss is not None
    assert len(run.runs_s) == 1


@pytest.mark.parametrize("name", ["gpt2", "llama3_70b", "mixtral_8x7b", "resnet50"])
def test_presets_equal_eager_bit_for_bit_and_are_as_predicted(name: str) -> None:
    real, step = _late(small(name))
    device_of = np.minimum(np.arange(step.graph.n_ops), step.graph.first_backward - 1)
    run, predicted = _run(real, step, device_of * 4 // step.graph.first_backward, 4)
    assert run.max_difference == run.gradient_difference == 0.0
    for measured, expected in zip(run.peak_bytes, predicted, strict=True):
        # Values that autograd would keep to the end of a formula are freed at their last reader.
        assert 0.9 * expected <= measured <= expected


def test_unsupported_steps_are_refused() -> None:
    real, step = _late(_layers())
    with pytest.raises(SpecError, match="repeats=0 must be 1 or more"):
        run_step(real, step, partition_by_device(step.graph, step.graph.group * 0), 1, repeats=0)
    elsewhere = replace(real, module=nn.Linear(1, 1, device="meta"))
    with pytest.raises(SpecError, match=r"runs on the CPU only, got meta; set execute\.device=cpu"):
        run_step(elsewhere, step, partition_by_device(step.graph, step.graph.group * 0), 1)


def test_another_result_is_detected() -> None:
    real, step = _late(_layers())
    # The gradients of the first and the last layer under each other's names.
    wrong = replace(step, gradients=dict.fromkeys(reversed(list(step.gradients)), ""))
    with pytest.raises(ExecutionError, match="gradients"):
        run_step(real, wrong, partition_by_device(step.graph, step.graph.group * 0), 1)

"""A backward operator knows its forward operator, and an exported call its parts."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.training.joint import JointCapture, joint_capture
from fxpart.execution.forward_devices import forward_devices
from tests.capture.small_specs import BERT, GPT2, LLAMA, RESNET
from tests.capture.training.joint_scene import Mlp


def _captured(spec: ModelSpec) -> JointCapture:
    built = build_model(spec)
    return joint_capture(built.module, built.args, built.kwargs)


def test_a_small_step_by_hand() -> None:
    joint = joint_capture(Mlp(), (torch.randn(2, 4),))
    graph = joint.graph
    parts = dict(zip(graph.names, joint.exported_names, strict=True))
    partner = {
        graph.names[op]: parts[graph.names[int(graph.forward_of[op])]]
        for op in np.flatnonzero(graph.is_backward).tolist()
    }
    # down is an addmm, whose gradients are two products and a sum; up has one product less.
    assert partner["mm_1"] == partner["mm_2"] == partner["sum_1"] == "linear_1"
    assert partner["threshold_backward"] == "relu"
    assert partner["mm_3"] == "linear"
    assert graph.names[int(graph.forward_of[graph.names.index("ones_like")])] == "mean"
    assert parts["mm"] == "linear"
    assert parts["addmm"] == "linear_1"
    assert parts["mean"] == ""
    assert {parts[graph.names[op]] for op in range(joint.graph.first_backward, graph.n_ops)} == {""}


@pytest.mark.parametrize("spec", [GPT2, LLAMA, RESNET, BERT], ids=lambda spec: spec.name)
def test_partners_share_a_module_and_a_device(spec: ModelSpec) -> None:
    joint = _captured(spec)
    graph = joint.graph
    backward = np.flatnonzero(graph.is_backward)
    assert backward.tolist() == list(range(joint.graph.first_backward, graph.n_ops))
    for op in backward.tolist():
        assert graph.modules[op] == graph.modules[int(graph.forward_of[op])]
    assert np.array_equal(graph.group[graph.forward_of], graph.group)
    # The groups are not merged: a step can still be cut almost anywhere.
    assert np.bincount(graph.group).max() <= 15


@pytest.mark.parametrize("spec", [GPT2, LLAMA, BERT], ids=lambda spec: spec.name)
def test_stages_of_a_step_are_stages_of_its_forward(spec: ModelSpec) -> None:
    joint = _captured(spec)
    graph, forward = joint.graph, op_graph(joint.forward)
    stage = np.minimum(np.arange(graph.n_ops) * 3 // joint.graph.first_backward, 2)
    stage = stage[graph.group]
    devices = forward_devices(stage, joint.exported_names, forward)
    place = dict(zip(joint.exported_names, stage.tolist(), strict=True))
    known = [(place[n], d) for n, d in zip(forward.names, devices, strict=True) if n in place]
    assert len(known) > forward.n_ops // 2
    assert all(planned == device for planned, device in known)
    assert np.array_equal(devices[forward.group], devices)
    # No operator waits for a later stage.
    makers = forward.value_producer[forward.reads]
    readers = np.repeat(np.arange(forward.n_ops), np.diff(forward.read_start))
    inside = makers >= 0
    assert (devices[makers[inside]] <= devices[readers[inside]]).all()


class _Idle(nn.Module):
    """Casts without effect, before and after all computation."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x.to(torch.float32)).to(torch.float32)  # type: ignore[no-any-return]


def test_operators_without_effect_stay_with_their_neighbour() -> None:
    joint = joint_capture(_Idle(), (torch.randn(2, 4),))
    forward = op_graph(joint.forward)
    assert set(forward.names) - set(joint.exported_names)
    devices = np.full(joint.graph.n_ops, 1)
    assert forward_devices(devices, joint.exported_names, forward).tolist() == [1] * forward.n_ops


class _Frozen(nn.Module):
    """A part without gradients, which the export keeps as a region."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(self.gate(x))
        return self.up(x) * gate  # type: ignore[no-any-return]


def test_a_region_is_one_operator_with_the_cost_of_its_calls() -> None:
    joint = joint_capture(_Frozen(), (torch.randn(2, 4),))
    forward = op_graph(joint.forward)
    region = forward.targets.index("wrap_with_set_grad_enabled")
    # 2 x 4 x 4 multiply-adds; linear reads x, weight and bias and writes; sigmoid reads and writes.
    assert forward.flops[region] == 2 * 2 * 4 * 4
    assert forward.moved_bytes[region] == 4 * (8 + 16 + 4 + 8) + 4 * (8 + 8)
    assert [forward.weight_names[w] for w in forward.uses_of(region)] == [
        "gate.weight",
        "gate.bias",
    ]
    parts = [op for op, name in enumerate(joint.exported_names) if name == forward.names[region]]
    assert len(parts) > 1
    assert len(set(joint.graph.group[parts].tolist())) == 1

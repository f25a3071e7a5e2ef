"""Measured operators: how often each is run, the results, and refusals."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.inference.export import export_program
from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.training.joint import joint_capture
from fxpart.errors import CaptureError, SpecError
from fxpart.execution.profiling.api import profile_operators
from tests.capture.small_specs import BERT, GPT2, LLAMA, RESNET

REPEATS = 2
RUNS = REPEATS + 1
"""The first run sets things up."""


class Layers(nn.Module):
    """Equal layers, too large to count as small operators: two signatures."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def _on_meta(count: int) -> nn.Module:
    with torch.device("meta"):
        return Layers(count)


@pytest.mark.parametrize("spec", [GPT2, LLAMA, RESNET, BERT], ids=lambda spec: spec.name)
def test_every_small_model_is_measured(spec: ModelSpec) -> None:
    built = build_model(spec)
    program = export_program(built.module, built.args, built.kwargs)
    graph = op_graph(program)
    profile = profile_operators(program, graph, repeats=1)
    assert profile.seconds.shape == (graph.n_ops,)
    assert np.isfinite(profile.seconds).all()
    assert (profile.seconds > 0).all()
    assert (profile.samples >= 1).all()


@pytest.mark.parametrize("spec", [GPT2, RESNET], ids=lambda spec: spec.name)
def test_a_training_step_is_measured(spec: ModelSpec) -> None:
    built = build_model(spec)
    step = joint_capture(built.module.train(), built.args, built.kwargs)
    profile = profile_operators(step.program, step.graph, repeats=1)
    assert (profile.seconds > 0).all()
    assert len(profile.seconds) == step.graph.n_ops


def test_equal_layers_are_run_only_as_often_as_one_time_needs() -> None:
    x = torch.empty(512, 256, device="meta")
    executed = []
    for count in (1, 4, 12):
        program = export_program(_on_meta(count), (x,))
        graph = op_graph(program)
        profile = profile_operators(program, graph, repeats=REPEATS)
        executed.append(profile.executed)
        # One signature, one time.
        for target in set(graph.targets):
            of_target = [
                time for time, t in zip(profile.seconds, graph.targets, strict=True) if t == target
            ]
            assert len(set(of_target)) == 1
    assert executed == [2 * RUNS] * 3


def test_a_program_on_a_real_device_is_unchanged() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    program = export_program(module, (torch.randn(2, 3, 8, 8),))
    seed = torch.random.get_rng_state()
    profile_operators(program, op_graph(program), repeats=1)
    for name, tensor in program.state_dict.items():
        assert torch.equal(tensor, before[name])
    assert torch.equal(torch.random.get_rng_state(), seed)


def test_weights_that_would_fill_the_memory_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpart.execution.profiling.tensors._MOST_KEPT_BYTES", 0)
    monkeypatch.setattr("fxpart.execution.profiling.tensors._EVICTING_BYTES", 2**20)
    built = build_model(GPT2)
    program = export_program(built.module, built.args, built.kwargs)
    profile = profile_operators(program, op_graph(program), repeats=1)
    assert (profile.seconds > 0).all()


def test_without_a_budget_each_signature_is_run_once() -> None:
    program = export_program(_on_meta(3), (torch.empty(512, 256, device="meta"),))
    profile = profile_operators(program, op_graph(program), repeats=5, budget_s=0.0)
    assert profile.samples.tolist() == [1] * 6
    # Signatures with a time are not run again once the budget is used up.
    assert profile.executed == 2


class Bags(nn.Module):
    """Two tables of different sizes with the same indices."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.few = nn.EmbeddingBag(50, 4), nn.EmbeddingBag(3, 4)

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        result: Tensor = self.many(indices, offsets) * self.few(indices, offsets)
        return result


def test_created_indices_stay_within_tables_also_in_the_backward() -> None:
    step = joint_capture(Bags(), (torch.zeros(8, dtype=torch.int64), torch.tensor([0, 4])))
    assert any("embedding_bag_backward" in target for target in step.graph.targets)
    profile = profile_operators(step.program, step.graph, repeats=1)
    assert (profile.seconds > 0).all()


def test_a_second_model_of_the_same_shapes_needs_no_measurement(tmp_path: Path) -> None:
    x = torch.empty(512, 256, device="meta")
    first, second = (export_program(_on_meta(n), (x,)) for n in (1, 3))
    single = profile_operators(first, op_graph(first), cache_dir=tmp_path, repeats=REPEATS)
    triple = profile_operators(second, op_graph(second), cache_dir=tmp_path, repeats=REPEATS)
    assert (single.executed, triple.executed) == (2 * RUNS, 0)
    assert triple.seconds.tolist() == single.seconds.tolist() * 3
    more = profile_operators(second, op_graph(second), cache_dir=tmp_path, repeats=REPEATS + 1)
    assert more.executed > 0
    assert (more.samples >= REPEATS + 1).all()


def test_another_dtype_or_layout_is_another_signature(tmp_path: Path) -> None:
    x = torch.empty(256, 256, device="meta")
    executed = []
    for another in (x, x.double(), x.T, x):
        program = export_program(_on_meta(1).to(another.dtype), (another,))
        profile = profile_operators(program, op_graph(program), cache_dir=tmp_path, repeats=REPEATS)
        executed.append(profile.executed)
    # Of the two operators only the first reads a transposed input.
    assert executed == [2 * RUNS, 2 * RUNS, RUNS, 0]


@pytest.mark.parametrize(
    ("device", "message"),
    [("cpuu", "is not known"), ("meta", "is not here"), ("cuda:99", "is not here; there is")],
)
def test_a_missing_device_is_refused(device: str, message: str) -> None:
    program = export_program(_on_meta(1), (torch.empty(2, 256, device="meta"),))
    with pytest.raises(SpecError, match=message):
        profile_operators(program, op_graph(program), device=device)


def test_a_graph_of_another_program_and_zero_repeats_are_refused() -> None:
    program = export_program(_on_meta(1), (torch.empty(2, 256, device="meta"),))
    graph = op_graph(program)
    with pytest.raises(SpecError, match="not that of the program"):
        profile_operators(program, replace(graph, names=("a", "b")))
    with pytest.raises(SpecError, match="repeats=0"):
        profile_operators(program, graph, repeats=0)


def test_symbolic_sizes_are_refused() -> None:
    module, batch = Layers(1), torch.export.Dim("batch", min=2)
    program = torch.export.export(module, (torch.randn(4, 256),), dynamic_shapes=({0: batch},))
    static = export_program(module, (torch.randn(4, 256),))
    with pytest.raises(SpecError, match="symbol"):
        profile_operators(program, op_graph(static))


def test_an_operator_missing_on_the_device_is_named() -> None:
    @torch.library.custom_op("fxpart_test::nowhere", mutates_args=())
    def nowhere(x: Tensor) -> Tensor:
        raise ValueError("not here")

    @nowhere.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = nowhere(x)
            return result

    program = export_program(Model(), (torch.empty(2, device="meta"),))
    with pytest.raises(CaptureError, match=r"fxpart_test.nowhere.*not here.*latency=roofline"):
        profile_operators(program, op_graph(program))

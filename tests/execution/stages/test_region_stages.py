"""Models exported with gradients enabled: regions without them, and under autocast, are kept."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from fxpart.capture.calls import REGIONS
from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.training.joint import joint_capture
from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.execution.split.placement import split_by_assignment
from fxpart.execution.stages.chain import chain_stages
from fxpart.execution.stages.stage_files import load_stage, save_stages
from tests.capture.small_specs import LLAMA
from tests.execution.stages.small_models import assert_same, assert_same_gradients
from tests.execution.stages.test_chain import assert_links
from tests.execution.stages.test_exported_chain import real_model


def _cut(graph: OpGraph, stages: int) -> Assignment:
    op = np.arange(graph.n_ops, dtype=np.int64)
    return Assignment(op * stages // graph.n_ops, tuple((s,) for s in range(stages)))


def _regions(module: nn.Module) -> int:
    assert isinstance(module, fx.GraphModule)
    return sum(node.target in REGIONS for node in module.graph.nodes)


@pytest.fixture(scope="module")
def llama() -> tuple[ExportedProgram, OpGraph, dict[str, Tensor]]:
    """Return a small Llama as in a training step: its rotary embedding has no gradients."""
    model, inputs = real_model(LLAMA)
    program = joint_capture(model, (), inputs).forward
    return program, op_graph(program), inputs


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_model_with_a_region_in_one_to_four_stages(
    llama: tuple[ExportedProgram, OpGraph, dict[str, Tensor]], stages: int
) -> None:
    program, graph, inputs = llama
    whole = program.module()
    assert _regions(whole) == 1
    split = split_by_assignment(whole, graph, _cut(graph, stages))
    chain = chain_stages(split)
    assert_links(chain)
    assert sum(_regions(stage.module) for stage in chain.stages) == 1
    for cut in (split, chain):
        output = cut(**inputs)
        assert_same(output, whole(**inputs))
        assert_same_gradients(whole, output, whole(**inputs))


def test_saved_stages_keep_the_region(
    llama: tuple[ExportedProgram, OpGraph, dict[str, Tensor]], tmp_path: Path
) -> None:
    program, graph, inputs = llama
    whole = program.module()
    chain = chain_stages(split_by_assignment(whole, graph, _cut(graph, 2)))
    values = chain.flat_inputs((), inputs)
    save_stages(chain, tmp_path / "stages", values)
    loaded = [load_stage(tmp_path / "stages", index) for index in range(2)]
    assert [_regions(stage.module) for stage in loaded] == [1, 0]
    for stage in loaded:
        values = stage.module(*values)
    output, expected = chain.results(values), whole(**inputs)
    assert_same(output, expected)
    total = sum(value.float().square().mean() for value in output.values())
    torch.autograd.backward(total)
    of_stages = {n: p.grad for stage in loaded for n, p in stage.module.named_parameters()}
    whole.zero_grad()
    torch.autograd.backward(sum(value.float().square().mean() for value in expected.values()))
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        gradient = of_stages[name]
        assert gradient is not None
        assert torch.equal(gradient, parameter.grad), name


class Regions(nn.Module):
    """Several results of a region, a weight in one, autocast, and nested regions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x).relu()
        with torch.no_grad():
            low, high = y.min(dim=0).values, self.second(y).cos()
        with torch.autocast("cpu", torch.bfloat16):
            z = self.second(y + low)
            with torch.no_grad():
                scale = self.first(z)
        return self.first(z.float() * scale.float() + high), low


def test_every_cut_between_regions() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    with torch.enable_grad():
        program = torch.export.export(Regions(), (x,))
    whole, graph = program.module(), op_graph(program)
    assert isinstance(whole, fx.GraphModule)
    assert _regions(whole) >= 2
    expected = whole(x)
    for edge in range(1, graph.n_ops):
        after = (np.arange(graph.n_ops) >= edge).astype(np.int64)
        split = split_by_assignment(whole, graph, Assignment(after, ((0,), (1,))))
        chain = chain_stages(split)
        assert_links(chain)
        for cut in (split, chain):
            output = cut(x)
            assert_same(output, expected)
            assert_same_gradients(whole, output, whole(x))
            assert [result.requires_grad for result in output] == [True, False]

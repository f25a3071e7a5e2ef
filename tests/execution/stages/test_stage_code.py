"""Python code of a stage is generated when the stage first runs, not when stages are chained."""

import copy

import pytest
import torch
from torch import Tensor, fx, nn

from fxpart.execution.stages.chain import Chain, chain_stages
from fxpart.torch_compat.split_module import split_module


def _chain() -> tuple[nn.Module, Chain]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    traced = fx.symbolic_trace(model)
    return model, chain_stages(split_module(traced, None, lambda node: int(node.name == "_2")))


X = torch.tensor([[1.0, -2.0]])


def test_code_is_written_once_when_a_stage_first_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[fx.Graph] = []
    write = fx.Graph.python_code

    def noted(graph: fx.Graph, *args: object, **kwargs: object) -> object:
        written.append(graph)
        return write(graph, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(fx.Graph, "python_code", noted)
    model, chain = _chain()
    stages = [stage.module.graph for stage in chain.stages]
    assert not any(graph in stages for graph in written)
    for _ in range(2):
        assert torch.equal(chain(X), model(X))
    assert [graph for graph in written if graph in stages] == stages


def test_a_stage_that_never_ran_can_be_copied_exported_and_hooked() -> None:
    model, chain = _chain()
    first, second = (stage.module for stage in chain.stages)
    between = model[1](model[0](X)).detach()  # type: ignore[index]
    assert torch.equal(copy.deepcopy(first)(X)[0], between)
    assert torch.equal(torch.export.export(second, (between,)).module()(between)[0], model(X))
    calls: list[Tensor] = []
    first.register_forward_hook(lambda _, __, output: calls.extend(output))
    assert torch.equal(chain(X), model(X))
    assert len(calls) == 1
    assert torch.equal(calls[0], between)

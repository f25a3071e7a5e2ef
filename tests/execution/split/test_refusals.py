"""A graph that cannot be cut is refused in one line."""

import operator

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

from fxpart.errors import CaptureError, SpecError
from fxpart.torch_compat.split_module import split_module


def test_missing_and_unnameable_targets_are_refused() -> None:
    module = symbolic_trace(nn.Sequential(nn.ReLU()))
    with pytest.raises(SpecError, match=r"partition id 1\.5 would name a submodule submod_1\.5"):
        split_module(module, None, lambda _: 1.5)
    graph = Graph()
    graph.output(graph.call_function(operator.neg, (graph.get_attr("weight"),)))
    root = nn.Module()
    root.weight = nn.Parameter(torch.ones(1))
    lacking = GraphModule(root, graph)
    del lacking.weight
    with pytest.raises(CaptureError, match="uses weight, which its GraphModule does not have"):
        split_module(lacking, None, lambda _: 0)


def test_an_attribute_with_the_name_of_a_submodule_is_refused() -> None:
    root = nn.Module()
    root.submod_0 = nn.Parameter(torch.ones(1))
    graph = Graph()
    graph.output(graph.call_function(operator.neg, (graph.get_attr("submod_0"),)))
    module = GraphModule(root, graph)
    with pytest.raises(SpecError, match="fetches submod_0, which is also the name of a submodule"):
        split_module(module, None, lambda _: 0)
    split = split_module(module, None, lambda _: 0, partition_affix="pp")
    assert torch.equal(split(), module())

"""Partitions take the symbols in the shapes of their inputs, as left by torch.compile."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module as torch_split

from fxpart.torch_compat.split_module import split_module
from tests.execution.split.random_graphs import call_nodes


def _compiled(function: Callable[..., Tensor], *args: Tensor) -> GraphModule:
    """Return the graph that torch.compile builds for a function with dynamic sizes."""
    modules: list[GraphModule] = []

    def backend(module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        modules.append(module)
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=True, fullgraph=True)(*args)
    (module,) = modules
    return module


def _function(x: Tensor, y: Tensor) -> Tensor:
    a = x.relu() + y
    b = a.reshape(-1) * 2
    return b.sum() * x.shape[0] + a.mean()


@pytest.fixture(scope="module")
def compiled() -> GraphModule:
    """Return a graph whose inputs contain symbols."""
    return _compiled(_function, torch.randn(5, 3), torch.randn(5, 3))


def _inputs(module: GraphModule, name: str) -> list[str]:
    child = module.get_submodule(name)
    assert isinstance(child, GraphModule)
    return [n.name for n in child.graph.nodes if n.op == "placeholder"]


def test_symbols_are_passed_with_their_tensors(compiled: GraphModule) -> None:
    ops = call_nodes(compiled)
    ids = {op: index // 2 for index, op in enumerate(ops)}
    ours = split_module(compiled, None, ids.__getitem__)
    theirs = torch_split(compiled, compiled, ids.__getitem__)
    assert ours.code == theirs.code
    symbols = [n.name for n in compiled.graph.nodes if isinstance(_example(n), torch.SymInt)]
    assert len(symbols) >= 2
    for name in theirs.meta["partition_names"]:
        assert _inputs(ours, name) == _inputs(theirs, name)
    assert any(set(symbols[:2]) <= set(_inputs(ours, n)) for n in ours.meta["partition_names"])


def _example(node: Node) -> object:
    return node.meta.get("example_value")


def test_a_symbol_created_inside_is_passed_from_there(compiled: GraphModule) -> None:
    # A size that depends on values: its symbol is created by an operator, and is no input.
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    count = graph.call_method("item", (x,))
    zeros = graph.call_function(torch.zeros, (count,))
    graph.output(graph.call_function(torch.neg, (graph.call_function(torch.exp, (zeros,)),)))
    symbol = next(v for n in compiled.graph.nodes if isinstance(v := _example(n), torch.SymInt))
    count.meta["example_value"] = symbol
    for node in graph.nodes:
        if node.name in {"zeros", "exp"}:
            node.meta["example_value"] = torch.empty(symbol, device="meta")
    module = GraphModule(torch.nn.Module(), graph)
    ids = {"item": 0, "zeros": 1, "exp": 1, "neg": 2}
    split = split_module(module, None, lambda n: ids[n.name])
    assert _inputs(split, "submod_2") == ["exp", "item"]
    assert torch.equal(split(torch.tensor(3)), -torch.ones(3))
    # A partition that creates a symbol does not wait for itself.
    numbers = {"item": 1, "zeros": 0, "exp": 1, "neg": 2}
    with pytest.raises(RuntimeError, match="partitions wait for each other"):
        split_module(module, None, lambda n: numbers[n.name])


def test_a_partition_takes_no_symbol_that_it_makes(compiled: GraphModule) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    data = graph.call_function(torch.abs, (x,))
    count = graph.call_method("item", (x,))
    more = graph.call_function(torch.neg, (data,))
    graph.output((graph.call_function(torch.add, (more, count)),))
    symbol = next(v for n in compiled.graph.nodes if isinstance(v := _example(n), torch.SymInt))
    count.meta["example_value"] = symbol
    data.meta["example_value"] = torch.empty(symbol, device="meta")
    module = GraphModule(torch.nn.Module(), graph)
    ids = {"abs_1": 0, "item": 1, "neg": 1, "add": 1}
    split = split_module(module, None, lambda n: ids[n.name])
    assert _inputs(split, "submod_1") == ["x", "abs_1"]
    assert torch.equal(split(torch.tensor(-3))[0], torch.tensor(-6))
    with pytest.raises(RuntimeError, match="cycle exists"):
        torch_split(module, module, lambda n: ids[n.name])


def test_a_symbol_that_nothing_makes_is_left_out(compiled: GraphModule) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.neg, (x,))
    graph.output(graph.call_function(torch.neg, (first,)))
    tensor = next(v for n in compiled.graph.nodes if isinstance(v := _example(n), torch.Tensor))
    x.meta["example_value"] = first.meta["example_value"] = tensor
    module = GraphModule(torch.nn.Module(), graph)
    ids = {"neg": 0, "neg_1": 1}
    split = split_module(module, None, lambda n: ids[n.name])
    assert _inputs(split, "submod_1") == ["neg"]
    with pytest.raises(KeyError):
        torch_split(module, module, lambda n: ids[n.name])

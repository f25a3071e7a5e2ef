"""Graphs captured by torch: by export, with branches, and with dynamic sizes."""

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module as torch_split

from fxpart.torch_compat.split_module import split_module
from tests.execution.split.random_graphs import call_nodes, same


def test_graphs_that_operators_run_go_with_them() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + 1
            out: Tensor = torch.cond(y.sum() > 0, lambda v: v * 2, lambda v: v - 1, (y,))
            return out

    # Not through module(): this test needs a cut of such a graph.
    program = torch.export.export(Branch(), (torch.ones(3),))
    module = program.module(check_guards=False)
    ids = {op: index // 2 for index, op in enumerate(call_nodes(module))}
    names: dict[str, str] = {}
    split = split_module(module, None, ids.__getitem__, names)
    x = torch.ones(3)
    assert torch.equal(split(x), module(x))
    assert torch.equal(split(-5 * x), module(-5 * x))
    assert set(names.values()) == {"true_graph_0", "false_graph_0"}


def test_a_region_whose_graph_is_called_as_a_submodule_is() -> None:
    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            with torch.no_grad():
                z = y.exp()
            out: Tensor = y * z
            return out

    with torch.enable_grad():
        program = torch.export.export(Regions(), (torch.ones(3),))
    module = program.module(check_guards=False)
    ids = {op: index + 1 for index, op in enumerate(call_nodes(module))}
    split = split_module(module, None, ids.__getitem__)
    wrap = torch.ops.higher_order.wrap_with_set_grad_enabled
    region = next(op for op in ids if op.target is wrap)
    assert isinstance(region.args[1], Node)
    assert region.args[1].target == "submod_1"
    holder = split.get_submodule(f"submod_{ids[region]}")
    assert holder.get_submodule("submod_1") is module.get_submodule("submod_1")
    x = torch.randn(3)
    result, expected = split(x), module(x)
    assert torch.equal(result, expected)
    for gradient, expected_gradient in zip(
        torch.autograd.grad(result.sum(), list(split.parameters())),
        torch.autograd.grad(expected.sum(), list(module.parameters())),
        strict=True,
    ):
        assert torch.equal(gradient, expected_gradient)


def test_nested_inputs_and_outputs_of_an_exported_module() -> None:
    class Nested(nn.Module):
        def forward(self, x: dict[str, Tensor], *, y: tuple[Tensor, int]) -> dict[str, object]:
            return {"sum": x["a"] + y[0], "more": [x["b"] * y[1], None]}

    args, kwargs = ({"a": torch.ones(2), "b": torch.ones(3)},), {"y": (torch.ones(2), 4)}
    module = torch.export.export(Nested(), args, kwargs).module(check_guards=False)
    split = split_module(module, None, {op: i for i, op in enumerate(call_nodes(module))}.get)
    assert same(split(*args, **kwargs), module(*args, **kwargs))


def test_dynamic_shapes() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x.reshape(-1, 2) @ y).relu().sum(0) / x.shape[0]

    x, y = torch.randn(4, 4), torch.randn(2, 3)
    module = make_fx(function, tracing_mode="symbolic")(x, y)
    ids = {op: index // 2 for index, op in enumerate(call_nodes(module))}
    ours = split_module(module, module, ids.__getitem__)
    theirs = torch_split(module, module, ids.__getitem__)
    assert ours.code == theirs.code
    other = torch.randn(6, 4)
    assert torch.equal(ours(other, y), module(other, y))


def test_an_exported_dynamic_batch() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers(x).reshape(x.shape[0] * 2)
            return out

    shapes = {"x": {0: torch.export.Dim("batch")}}
    program = torch.export.export(Layers(), (torch.randn(4, 3),), dynamic_shapes=shapes)
    module = program.module(check_guards=False)
    ids = {op: index // 2 for index, op in enumerate(call_nodes(module))}
    ours = split_module(module, None, ids.__getitem__)
    theirs = torch_split(module, module, ids.__getitem__)
    # Torch's result takes and returns flat lists, here of one tensor each.
    assert [n.name for n in ours.graph.nodes] == [n.name for n in theirs.graph.nodes]
    x = torch.randn(7, 3)
    assert torch.equal(ours(x), module(x))
    assert torch.equal(ours(x), theirs(x)[0])

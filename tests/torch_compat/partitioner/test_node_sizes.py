"""Sizes of nodes: torch's where torch is right; also buffers, dtypes, tuples and exports."""

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node, symbolic_trace
from torch.fx.passes import graph_manipulation as theirs

from fxpart import (
    CaptureError,
    get_size_of_all_nodes,
    get_size_of_node,
    get_tensor_meta,
    replace_target_nodes_with,
)
from tests.torch_compat.partitioner.models import random_graph, traced

X = torch.randn(8, 4)


def _nodes(graph_module: GraphModule) -> dict[str, Node]:
    return {node.name: node for node in graph_module.graph.nodes}


def _sizes(model: nn.Module, *inputs: object) -> dict[str, tuple[int, int]]:
    graph_module = traced(model, list(inputs))  # type: ignore[arg-type]
    nodes = _nodes(graph_module).values()
    return {n.name: tuple(n.size_bytes) for n in nodes if n.op != "output"}  # type: ignore[attr-defined]


def test_sizes_equal_those_of_torch() -> None:
    for seed in range(20):
        _, graph_module, inputs = random_graph(seed, 20, embeddings=seed % 2 == 0)
        ours = {n: tuple(x.size_bytes) for n, x in _nodes(graph_module).items() if n != "output"}  # type: ignore[attr-defined]
        theirs.get_size_of_all_nodes(graph_module, inputs)
        nodes = _nodes(graph_module)
        assert ours == {n: tuple(x.size_bytes) for n, x in nodes.items() if n != "output"}  # type: ignore[attr-defined]
        for name, size in ours.items():
            assert tuple(get_size_of_node(graph_module, nodes[name])) == size
            assert get_tensor_meta(nodes[name]) is theirs.get_tensor_meta(nodes[name])


def test_buffers_count() -> None:
    # Weight, bias, running mean and variance: 16 numbers of 4 bytes, and a count of 8 bytes.
    sizes = _sizes(nn.Sequential(nn.BatchNorm1d(4).eval()), X)
    assert sizes["_0"] == (128, 128 + 16 * 4 + 8)


class _Bool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bound = nn.Parameter(torch.zeros(1000))

    def forward(self, x: Tensor) -> Tensor:
        return torch.gt(x, self.bound.sum())


class _Leaf(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def test_parameters_are_priced_at_their_own_dtype() -> None:
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, _Bool) or super().is_leaf_module(m, module_qualified_name)

    model = nn.Sequential(_Bool())
    graph_module = GraphModule(model, Tracer().trace(model))
    get_size_of_all_nodes(graph_module, [X])
    assert tuple(_nodes(graph_module)["_0"].size_bytes) == (32, 32 + 4000)  # type: ignore[attr-defined]


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, _) = self.lstm(x)
        both: Tensor = out + hidden
        return both


def test_a_tuple_is_the_sum_of_its_items_and_an_item_takes_nothing_more() -> None:
    sizes = _sizes(_Lstm(), torch.randn(5, 3, 4))
    weights = 4 * (4 * 2 * 4 + 4 * 2 * 2 + 2 * 4 * 2)
    out, state = 5 * 3 * 2 * 4, 3 * 2 * 4
    assert sizes["lstm"] == (out + 2 * state, out + 2 * state + weights)
    assert sizes["getitem"] == (out, 0)
    assert sizes["getitem_1"] == (2 * state, 0)
    assert sizes["getitem_2"] == (state, 0)
    assert sizes["add"] == (out, out)


class _Shapes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.size(0) * 2, -1)[0]


def test_numbers_have_no_size_and_a_row_of_a_tensor_has_its_bytes() -> None:
    sizes = _sizes(_Shapes(), X)
    assert sizes["size"] == (0, 0)
    assert sizes["mul"] == (0, 0)
    assert sizes["getitem"] == (8, 8)


class _Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        twice: Tensor = self.linear(self.linear(x))
        return twice


def test_a_shared_module_counts_for_each_call() -> None:
    # As in torch: the calls may be on different devices.
    sizes = _sizes(_Shared(), X)
    assert sizes["linear"] == sizes["linear_1"] == (128, 128 + 80)


def test_exported_graphs_need_no_example_run() -> None:
    exported = torch.export.export(_Shared(), (X,)).module()
    get_size_of_all_nodes(exported)
    nodes = _nodes(exported)
    assert tuple(nodes["linear_weight"].size_bytes) == (64, 64)  # type: ignore[attr-defined]
    assert tuple(nodes["linear_1"].size_bytes) == (128, 128)  # type: ignore[attr-defined]
    meta = get_tensor_meta(nodes["linear_1"])
    assert (tuple(meta.shape), meta.dtype, meta.stride) == ((8, 4), torch.float32, (4, 1))


def test_a_symbolic_dimension_has_the_size_of_the_example() -> None:
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(_Shared(), (X,), dynamic_shapes=({0: batch},)).module()
    get_size_of_all_nodes(exported)
    assert tuple(_nodes(exported)["linear_1"].size_bytes) == (128, 128)  # type: ignore[attr-defined]


def test_the_error_without_sizes_names_the_function_to_call() -> None:
    graph_module = symbolic_trace(_Shared())
    with pytest.raises(CaptureError, match=r"x has no size information; call get_size_of_all_n"):
        get_size_of_all_nodes(graph_module)
    with pytest.raises(CaptureError, match=r"x has no tensor metadata, but nothing; call"):
        get_tensor_meta(_nodes(graph_module)["x"])
    lstm = traced(_Lstm(), [torch.randn(5, 3, 4)])
    with pytest.raises(CaptureError, match="lstm has no tensor metadata, but a tuple"):
        get_tensor_meta(_nodes(lstm)["lstm"])


def test_replaced_targets_compute_the_new_thing_under_the_old_names() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) + torch.relu(-x)

    graph_module = symbolic_trace(Two())
    before = [n.name for n in graph_module.graph.nodes]
    arguments = ("call_function", torch.relu, "call_function", torch.sigmoid)
    replace_target_nodes_with(graph_module, *arguments)
    assert torch.equal(graph_module(X), torch.sigmoid(X) + torch.sigmoid(-X))
    assert [n.name for n in graph_module.graph.nodes] == before
    other = symbolic_trace(Two())
    theirs.replace_target_nodes_with(other, *arguments)
    assert other.code == graph_module.code

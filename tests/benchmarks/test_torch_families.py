"""The generators return the stated graphs."""

import pytest
from torch import fx

from benchmarks.torch_families import (
    FAMILIES,
    OPERATORS_PER_BLOCK,
    random_module,
    random_sparse,
)


def _nodes(module: object) -> list[fx.Node]:
    return list(fx.symbolic_trace(module).graph.nodes)  # type: ignore[arg-type]


def _called(nodes: list[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if node.op.startswith("call_")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("blocks", [1, 3])
def test_a_block_has_its_operators(family: str, blocks: int) -> None:
    module, inputs = FAMILIES[family](blocks)
    assert len(_called(_nodes(module))) == blocks * OPERATORS_PER_BLOCK[family]
    assert module(*inputs).shape == inputs[0].shape


def test_a_residual_block_is_a_diamond() -> None:
    nodes = _nodes(FAMILIES["residual"](2)[0])
    joins = [node for node in _called(nodes) if len(node.all_input_nodes) == 2]
    assert len(joins) == 2
    assert nodes[0] in joins[0].all_input_nodes


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ops", [8, 23, 40])
def test_a_random_module_has_the_given_number_of_operators(seed: int, ops: int) -> None:
    module, inputs = random_module(seed, ops)
    traced = fx.symbolic_trace(module)
    assert len(_called(list(traced.graph.nodes))) == ops
    traced(*inputs)


def test_graphs_depend_only_on_the_seed() -> None:
    code = [fx.symbolic_trace(random_module(seed, 20)[0]).code for seed in (5, 5, 6)]
    assert code[0] == code[1]
    assert code[0] != code[2]


def test_random_modules_vary_everything_a_partitioner_looks_at() -> None:
    graphs = [_nodes(random_module(seed, 20)[0]) for seed in range(30)]
    everything = [node for nodes in graphs for node in nodes]
    kinds = {"call_module", "call_function", "call_method", "get_attr"}
    assert kinds <= {node.op for node in everything}
    assert any(node.op == "placeholder" and not node.users for node in everything)
    assert any(node.op == "get_attr" and len(node.users) > 1 for node in everything)
    assert any(node.kwargs and not node.args and node.all_input_nodes for node in everything)
    outputs = [nodes[-1].args[0] for nodes in graphs]
    assert {isinstance(output, tuple) for output in outputs} == {True, False}


def test_every_value_of_a_random_module_is_read_or_returned() -> None:
    for seed in range(20):
        assert all(node.users for node in _called(_nodes(random_module(seed, 20)[0])))


def test_random_sparse_modules_have_tables_and_dense_layers() -> None:
    for seed in range(20):
        module, inputs = random_sparse(seed)
        traced = fx.symbolic_trace(module)
        called = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
        assert sum(name.startswith("tables") for name in called) >= 2
        assert sum(name.startswith("bottom") for name in called) >= 1
        traced(*inputs)

"""In-place writes: a cut model computes the same as the model, or is refused in one line."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Tracer, symbolic_trace
from torch.utils._pytree import tree_leaves

from fxpart.errors import FxpartError
from fxpart.torch_compat.partitioner import (
    Device,
    NodeLatency,
    Partitioner,
    PartitionerConfig,
    PartitionMode,
    get_size_of_all_nodes,
)
from fxpart.torch_compat.partitioner.config import ConfigError
from fxpart.torch_compat.partitioner.inplace import ties_of
from fxpart.torch_compat.partitioner.lowering import lower
from tests.torch_compat.partitioner.inplace_models import (
    MODELS,
    ROWS,
    STANDS_FOR,
    WIDTH,
    Layers,
    RandomWrites,
)

SHARES = (0.35, 0.6, 0.9, 1.0)
CHOSEN = (PartitionMode.size_based, PartitionMode.cost_aware, PartitionMode.kl_based)


def _input() -> Tensor:
    return torch.linspace(-2.0, 2.0, ROWS * WIDTH).view(ROWS, WIDTH)


class _Tracer(Tracer):
    """A tracer that also records operations on buffers and weights."""

    proxy_buffer_attributes = True


def _captured(model: nn.Module, exported: bool) -> GraphModule:
    """Return the graph of `model` with sizes; the state of `model` is unchanged."""
    if exported:
        return torch.export.export(model, (_input(),)).module()
    graph_module = GraphModule(model, _Tracer().trace(model))
    for node in graph_module.graph.nodes:
        node.target = STANDS_FOR.get(node.target, node.target)
    graph_module.recompile()
    state = {name: tensor.clone() for name, tensor in graph_module.state_dict().items()}
    get_size_of_all_nodes(graph_module, [_input()])
    graph_module.load_state_dict(state)
    return graph_module


def _ops(graph_module: GraphModule) -> list[str]:
    get_size_of_all_nodes(graph_module)
    return [op.name for op in lower(graph_module, {}).ops]


def _tied(model: nn.Module, exported: bool = False) -> list[list[str]]:
    """Return the names of the operators that stay together."""
    graph_module = _captured(model, exported)
    get_size_of_all_nodes(graph_module)
    lowered = lower(graph_module, {})
    return [[lowered.ops[op].name for op in tie.ops] for tie in ties_of(graph_module, lowered)]


def _result(module: nn.Module) -> list[Tensor]:
    """Return the outputs on a fresh input, and the input afterwards; the state is restored."""
    x = _input()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with torch.no_grad():
        outputs = [tensor.clone() for tensor in tree_leaves(module(x))]
        for name, tensor in module.state_dict().items():
            tensor.copy_(state[name])
    return [*outputs, x]


def _same(results: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(results) == len(expected) and all(map(torch.equal, results, expected))


def _configs(graph_module: GraphModule) -> list[PartitionerConfig]:
    """Return configurations of all modes: memory for a part to all, one operator per partition."""
    get_size_of_all_nodes(graph_module)
    nodes = [node for node in graph_module.graph.nodes if node.op != "output"]
    total = sum(node.size_bytes.total_size for node in nodes)
    latencies = {node: NodeLatency(1.0, 2.0) for node in nodes}
    configs = [
        PartitionerConfig(
            [Device(f"d{i}", int(share * total), i) for i in range(4)], mode, 1e3, latencies
        )
        for share in SHARES
        for mode in CHOSEN
    ]
    ops = lower(graph_module, {}).ops
    one_per_operator = PartitionerConfig(
        [Device("all", total, 0)],
        PartitionMode.aot_based,
        node_to_partition_mapping={op: index for index, op in enumerate(ops)},
        partition_to_logical_device_mapping={index: [0] for index in range(len(ops))},
    )
    return [*configs, one_per_operator]


def _cut_is_right(model: nn.Module, exported: bool) -> int:
    """Check every configuration, and return how many gave more than one partition."""
    graph_module, several = _captured(model, exported), 0
    refused: list[str] = []
    expected = _result(model)
    assert _same(_result(graph_module), expected)
    configs = _configs(graph_module)
    for config in configs:
        try:
            cut = Partitioner().partition_graph(graph_module, model, config)
        except FxpartError as error:
            refused.append(str(error))
            continue
        assert _same(_result(cut.module_with_submodules), expected), config.mode
        several += len(cut.dag.nodes) > 1
    assert not any("\n" in message for message in refused)
    # If one device holds the model, nothing has to be refused.
    assert len(refused) <= len(configs) - len(CHOSEN)
    return several


@pytest.mark.parametrize("name", MODELS)
def test_a_traced_model_is_cut_correctly_or_refused(name: str) -> None:
    _cut_is_right(Layers(MODELS[name]).eval(), exported=False)


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_is_cut_correctly_or_refused(name: str) -> None:
    _cut_is_right(Layers(MODELS[name]).eval(), exported=True)


def test_random_writes_are_cut_correctly_or_refused() -> None:
    several = sum(
        _cut_is_right(RandomWrites(seed, 12).eval(), exported=False) for seed in range(30)
    )
    assert several > 20


def test_random_writes_in_exported_models_are_cut_correctly_or_refused() -> None:
    assert sum(_cut_is_right(RandomWrites(seed, 9).eval(), exported=True) for seed in range(4)) > 0


@pytest.mark.parametrize(
    ("name", "ties"),
    [
        ("plain", [["a", "add_", "b"]]),
        ("view_of_the_first_half", [["a", "getitem", "add_", "b"]]),
        ("early_reader", [["c", "mul_"]]),
        ("input_is_written", [["a", "add_"], ["add_", "b"]]),
        ("asked_for_its_size", []),
    ],
)
def test_tied_operators(name: str, ties: list[list[str]]) -> None:
    assert _tied(Layers(MODELS[name]).eval()) == ties


class _Residual(nn.Module):
    """Like common residual networks: in-place activations and sums, read through their result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.norm, self.relu = nn.BatchNorm2d(2), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.first(x)))
        y = self.second(x)
        y += x
        return torch.flatten(self.relu(y), 1)


def test_residual_networks_need_no_ties() -> None:
    graph_module = symbolic_trace(_Residual().eval())
    get_size_of_all_nodes(graph_module, [torch.ones(1, 2, 4, 4)])
    assert ties_of(graph_module, lower(graph_module, {})) == []


def test_an_aot_mapping_that_separates_a_write_is_refused() -> None:
    model = Layers(MODELS["plain"]).eval()
    graph_module = _captured(model, exported=False)
    config = _configs(graph_module)[-1]
    with pytest.raises(
        ConfigError,
        match="operators a and add_ are in partitions 0 and 1, but share the tensor a, which is"
        " written into in place; put a, add_, b into one partition",
    ):
        Partitioner().partition_graph(graph_module, model, config)


def test_without_writes_there_are_no_ties() -> None:
    assert _tied(Layers(lambda m, x: m.b(m.a(x).view(-1, WIDTH))).eval()) == []
    assert _ops(_captured(Layers(lambda m, x: m.a(x)).eval(), exported=False)) == ["a"]


class _Weighted(nn.Module):
    """Routing as in a mixture of experts: one item of a tuple is written, the other then read."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.topk(x, 2)
        values, indices = both[0], both[1]
        values = values.div_(values.sum())
        return values, indices + 1


@pytest.mark.parametrize("exported", [False, True])
def test_items_of_a_new_tuple_are_not_tied_by_a_write_into_one(exported: bool) -> None:
    assert _tied(_Weighted(), exported) == []

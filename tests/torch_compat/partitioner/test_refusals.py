"""Every mistake is a RuntimeError with one line that says what to change."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxpart import (
    CaptureError,
    CycleError,
    Device,
    FxpartError,
    InfeasibleError,
    NodeLatency,
    Partitioner,
    PartitionerConfig,
    PartitionMode,
)
from fxpart.torch_compat.partitioner.config import ConfigError
from tests.torch_compat.partitioner.models import traced
from tests.torch_compat.partitioner.parity import config_for

X = torch.randn(8, 4)
"""128 bytes, like the output of every operator below."""


class _Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.sigmoid(torch.relu(x)))


class _Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def _aot(graph_module: GraphModule, ids: list[int], **more: Any) -> PartitionerConfig:  # noqa: ANN401
    ops = [n for n in graph_module.graph.nodes if n.op == "call_function"]
    mapping = dict(zip(ops, ids, strict=False))
    return config_for([1000], PartitionMode.aot_based, node_to_partition_mapping=mapping, **more)


def _unlike_devices(_: GraphModule) -> PartitionerConfig:
    return config_for([400, 300], PartitionMode.sparse_nn)


def _costs(graph_module: GraphModule, mode: PartitionMode, rate: float) -> PartitionerConfig:
    latencies = {n: NodeLatency(1, 1) for n in graph_module.graph.nodes}
    return config_for(
        [300] * 3, mode, transfer_rate_bytes_per_sec=rate, node_to_latency_mapping=latencies
    )


CASES: list[tuple[type[FxpartError], str, Callable[[GraphModule], PartitionerConfig]]] = [
    (ConfigError, "no devices are given; put at least one", lambda g: PartitionerConfig([])),
    (
        ConfigError,
        "devices 'a' and 'b' have the same logical id 3; give each of the 2 devices its own",
        lambda g: PartitionerConfig([Device("a", 9, 3), Device("b", 9, 3)]),
    ),
    (
        ConfigError,
        "device 'a' has -1 bytes of memory",
        lambda g: PartitionerConfig([Device("a", -1, 3)]),
    ),
    (
        InfeasibleError,
        "devices do not have enough memory for the module: it needs 512 bytes, the 2 devices have"
        " 511; give 1 bytes more",
        lambda g: config_for([256, 255]),
    ),
    (
        InfeasibleError,
        "operator relu is too large to fit any device: with what it reads it needs 256 bytes, the"
        " largest device has 255; give a larger device or split the operator",
        lambda g: config_for([255] * 3),
    ),
    (
        InfeasibleError,
        "no valid mapping of partitions to the 2 devices was found: the graph needs 512 bytes held"
        " once",
        lambda g: config_for([300, 300]),
    ),
    (
        InfeasibleError,
        "sparse_nn needs devices with the same memory, as it replicates operators on all: there"
        " are 300 to 400 bytes; use mode size_based",
        _unlike_devices,
    ),
    (
        ConfigError,
        "mode cost_aware needs a positive transfer_rate_bytes_per_sec, got 0",
        lambda g: _costs(g, PartitionMode.cost_aware, 0),
    ),
    (
        ConfigError,
        "transfer_rate_bytes_per_sec is nan; give a positive number of bytes per second",
        lambda g: _costs(g, PartitionMode.kl_based, float("nan")),
    ),
    (
        ConfigError,
        "operator relu has no latency: node_to_latency_mapping holds 0 nodes",
        lambda g: config_for([300] * 3, PartitionMode.kl_based, transfer_rate_bytes_per_sec=1.0),
    ),
    (
        ConfigError,
        "leaves out 1 of 3 operators, such as tanh; give each call node of this graph",
        lambda g: _aot(g, [0, 0]),
    ),
    (
        ConfigError,
        "partition 1 has no device: partition_to_logical_device_mapping has partitions [0]",
        lambda g: _aot(g, [0, 1, 1], partition_to_logical_device_mapping={0: [10]}),
    ),
    (
        ConfigError,
        "partition_to_logical_device_mapping has partitions [0, 1];",
        lambda g: _aot(g, [0, 1, 1], partition_to_logical_device_mapping={0: [10], 1: []}),
    ),
    (
        ConfigError,
        "partition 1 is put on logical device 4, which does not exist; there are: 10",
        lambda g: _aot(g, [0, 1, 1], partition_to_logical_device_mapping={0: [10], 1: [4]}),
    ),
    (
        CycleError,
        "wait for each other's results; move the operators between them into one partition",
        lambda g: _aot(g, [5, 2, 5], partition_to_logical_device_mapping={5: [10], 2: [10]}),
    ),
    (
        ConfigError,
        "there is no mode 'size'; nearest: size_based",
        lambda g: config_for([300] * 3, "size"),  # type: ignore[arg-type]
    ),
]


@pytest.mark.parametrize(("kind", "message", "config"), CASES)
def test_a_wrong_configuration_is_refused_in_one_line(
    kind: type[FxpartError], message: str, config: Callable[[GraphModule], PartitionerConfig]
) -> None:
    model = _Chain()
    graph_module = traced(model, [X])
    partitioner = Partitioner()
    with pytest.raises(kind, match=re.escape(message)) as caught:
        partitioner.partition_graph(graph_module, model, config(graph_module))
    assert isinstance(caught.value, RuntimeError)
    assert "\n" not in str(caught.value)
    assert partitioner.partitions == []


def test_the_partitions_of_a_cycle_are_named() -> None:
    model = _Chain()
    graph_module = traced(model, [X])
    config = _aot(graph_module, [5, 2, 5], partition_to_logical_device_mapping={5: [10], 2: [10]})
    with pytest.raises(CycleError, match="partitions 5 -> 2 -> 5 wait"):
        Partitioner().partition_graph(graph_module, model, config)


def test_nodes_of_another_graph_are_refused() -> None:
    model = _Chain()
    graph_module, other = traced(model, [X]), traced(model, [X])
    ops = [n for g in (graph_module, other) for n in g.graph.nodes if n.op == "call_function"]
    config = config_for(
        [1000],
        PartitionMode.aot_based,
        node_to_partition_mapping=dict.fromkeys(ops, 0),
        partition_to_logical_device_mapping={0: [10]},
    )
    with pytest.raises(ConfigError, match="has 3 nodes of another graph, such as relu"):
        Partitioner().partition_graph(graph_module, model, config)


def test_a_graph_without_operators_is_refused() -> None:
    model = _Identity()
    with pytest.raises(CaptureError, match="no partition: the module has no operators, only 1 in"):
        Partitioner().partition_graph(traced(model, [X]), model, config_for([1000]))


def test_a_graph_without_sizes_is_refused() -> None:
    model = _Chain()
    with pytest.raises(CaptureError, match=r"call get_size_of_all_nodes\(traced, \[inputs\]\)"):
        Partitioner().partition_graph(symbolic_trace(model), model, config_for([1000]))

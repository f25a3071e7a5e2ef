"""All that each mode decides, to be compared between processes (`tests/test_processes.py`)."""

from typing import Any

from torch import nn
from torch.fx import GraphModule

from fxpart import FxpartError, NodeLatency, Partitioner, PartitionerConfig, PartitionMode
from tests.torch_compat.partitioner.models import random_graph
from tests.torch_compat.partitioner.parity import config_for, total_bytes

GRAPHS, OPERATORS = 4, 10


def _said(graph_module: GraphModule, model: nn.Module, config: PartitionerConfig) -> list[str]:
    """Return everything that a run decides, with every collection in its order."""
    partitioner = Partitioner()
    try:
        result = partitioner.partition_graph(graph_module, model, config)
    except FxpartError as error:
        return [f"{type(error).__name__}: {error}"]
    parts: list[Any] = [
        [
            (
                partition.partition_id,
                [node.name for node in partition.nodes],
                partition.used_mem_bytes,
                partition.logical_device_ids,
                [parent.partition_id for parent in partition.parents],
                [child.partition_id for child in partition.children],
                partition.bfs_level,
            )
            for partition in partitioner.partitions
        ],
        [(node.name, index) for node, index in partitioner.node_to_partition.items()],
        [
            (str(node), [str(n) for n in node.input_nodes], [str(n) for n in node.output_nodes])
            for node in result.dag.nodes
        ],
        result.module_with_submodules.code,
    ]
    return [repr(part) for part in parts]


def _config(graph_module: GraphModule, mode: PartitionMode) -> PartitionerConfig:
    """Return four devices of 0.7 of the graph, and the options of the mode."""
    nodes = list(graph_module.graph.nodes)
    ops = [node for node in nodes if node.op not in {"placeholder", "get_attr", "output"}]
    return config_for(
        [int(0.7 * total_bytes(graph_module))] * 4,
        mode,
        transfer_rate_bytes_per_sec=1000.0,
        node_to_latency_mapping={node: NodeLatency(0.1, 0.3) for node in nodes},
        node_to_partition_mapping={node: 2 * at // len(ops) for at, node in enumerate(ops)},
        partition_to_logical_device_mapping={0: [12], 1: [10]},
        saturate_host=True,
    )


def answers() -> dict[str, list[str]]:
    """Return the answer of each mode on a few graphs."""
    decided: dict[str, list[str]] = {}
    for mode in PartitionMode:
        decided[mode.name] = []
        for seed in range(GRAPHS):
            sparse = mode is PartitionMode.sparse_nn
            model, graph_module, _ = random_graph(seed, OPERATORS, sparse)
            decided[mode.name] += _said(graph_module, model, _config(graph_module, mode))
    return decided


def test_every_mode_has_an_answer() -> None:
    # For each graph four collections, or one refusal.
    for mode, decided in answers().items():
        assert len(decided) >= GRAPHS + 3, f"{mode} refuses all graphs"

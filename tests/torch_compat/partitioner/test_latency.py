"""Critical paths: torch's numbers bit for bit, on graphs that torch can and cannot walk."""

import random

import pytest
import torch
from torch.fx import Graph, Node
from torch.fx.experimental import partitioner_utils as theirs

from fxpart import (
    CycleError,
    NodeLatency,
    Partition,
    PartitionLatency,
    get_comm_latency_between,
    get_latency_of_one_partition,
    get_latency_of_partitioned_graph,
    get_partition_to_latency_mapping,
    size_bytes,
)
from fxpart.torch_compat.partitioner import reorganize_partitions
from fxpart.torch_compat.partitioner.config import ConfigError
from tests.torch_compat.partitioner.models import random_graph


def _diamonds(count: int) -> list[Node]:
    """Return the call nodes of a chain of `count` diamonds: 1 + 3 for each."""
    graph = Graph()
    last = graph.call_function(torch.relu, (graph.placeholder("x"),))
    for _ in range(count):
        left = graph.call_function(torch.relu, (last,))
        right = graph.call_function(torch.sigmoid, (last,))
        last = graph.call_function(torch.add, (left, right))
    return [n for n in graph.nodes if n.op == "call_function"]


def _partition(nodes: list[Node], index: int = 0) -> Partition:
    partition = Partition(index)
    for node in nodes:
        node.size_bytes = size_bytes(8, 8)
        for operand in node.all_input_nodes:
            if operand.op == "placeholder":
                operand.size_bytes = size_bytes(8, 8)
        partition.add_node(node)
    return partition


def test_the_longer_side_of_a_diamond_counts() -> None:
    nodes = _diamonds(1)
    seconds = dict(zip(nodes, [(0.0, 1.0), (4.0, 2.0), (0.0, 3.0), (1.0, 0.5)], strict=True))
    latencies = {node: NodeLatency(*pair) for node, pair in seconds.items()}
    latency = get_latency_of_one_partition(_partition(nodes), latencies)
    assert latency == PartitionLatency(5.0, 3.5, 6.0)


def test_ten_thousand_diamonds_and_a_long_chain() -> None:
    nodes = _diamonds(10_000)
    latencies = {node: NodeLatency(0.0, 1.0) for node in nodes}
    latency = get_latency_of_one_partition(_partition(nodes), latencies)
    assert latency.overall_latency_sec == 20_001
    graph = Graph()
    last = graph.placeholder("x")
    for _ in range(30_000):
        last = graph.call_function(torch.relu, (last,))
    chain = [n for n in graph.nodes if n.op == "call_function"]
    latencies = {node: NodeLatency(1.0, 0.0) for node in chain}
    latency = get_latency_of_one_partition(_partition(chain), latencies)
    assert latency == PartitionLatency(30_000, 0, 30_000)


def test_a_long_chain_of_partitions() -> None:
    nodes = _diamonds(700)
    partitions = [_partition([node], i) for i, node in enumerate(nodes)]
    reorganize_partitions(partitions)
    latencies = get_partition_to_latency_mapping(
        partitions, {node: NodeLatency(0.0, 1.0) for node in nodes}
    )
    # 1,401 operators and 1,400 transfers of 8 bytes are on the path.
    assert get_latency_of_partitioned_graph(partitions, latencies, 8.0) == 1401 + 1400


def _cut(seed: int) -> tuple[list[Partition], list[theirs.Partition], dict[Node, NodeLatency]]:
    """Return a random graph cut twice in the same way, and latencies without ties."""
    _, graph_module, _ = random_graph(seed, 18)
    rng = random.Random(seed)
    ops = [n for n in graph_module.graph.nodes if n.op.startswith("call")]
    latencies = {n: NodeLatency(rng.random(), rng.random()) for n in ops}
    ours = [Partition(i) for i in range(5)]
    torchs = [theirs.Partition(i) for i in range(5)]
    for index, op in enumerate(ops):
        part = index * 5 // len(ops)
        ours[part].add_node(op)
        torchs[part].add_node(op)
    reorganize_partitions(ours)
    for our, their in zip(ours, torchs, strict=True):
        our.logical_device_ids = [rng.randrange(3)]
        their.logical_device_ids = list(our.logical_device_ids)
        their.parents = {torchs[p.partition_id] for p in our.parents}
        their.children = {torchs[p.partition_id] for p in our.children}
    return ours, torchs, latencies


def test_latencies_equal_those_of_torch_to_the_last_bit() -> None:
    for seed in range(25):
        ours, torchs, latencies = _cut(seed)
        computed = get_partition_to_latency_mapping(ours, latencies)
        expected = theirs.get_partition_to_latency_mapping(torchs, latencies)  # type: ignore[arg-type]
        assert list(map(tuple, computed.values())) == list(map(tuple, expected.values()))
        rate = 1000.0
        assert get_latency_of_partitioned_graph(
            ours, computed, rate
        ) == theirs.get_latency_of_partitioned_graph(torchs, expected, rate)
        for a in range(5):
            for b in range(5):
                assert get_comm_latency_between(
                    ours[a], ours[b], rate
                ) == theirs.get_comm_latency_between(torchs[a], torchs[b], rate)


def test_what_cannot_be_computed_is_refused() -> None:
    first, second = _diamonds(1)[:2]
    a, b = _partition([first], 0), _partition([second], 1)
    reorganize_partitions([a, b])
    with pytest.raises(ConfigError, match=r"relu_1 has no latency: .* 1 nodes \(nearest: relu\)"):
        get_partition_to_latency_mapping([a, b], {first: NodeLatency(0, 1)})
    with pytest.raises(ConfigError, match=r"is 0\.0, but partition 1 receives .* positive rate"):
        get_comm_latency_between(a, b, 0.0)
    a.logical_device_ids = b.logical_device_ids = [0]
    assert get_comm_latency_between(a, b, 0.0) == 0.0
    a.parents.add(b)
    b.children.add(a)
    with pytest.raises(CycleError, match=r"partitions (0 -> 1 -> 0|1 -> 0 -> 1) wait"):
        get_latency_of_partitioned_graph([a, b], {}, 1.0)

"""cost_aware and kl_based on fx graphs: complete answers that the emitted module follows."""

import random
from collections import Counter
from typing import Any

import pytest
from torch.fx import GraphModule
from torch.fx.experimental import accelerator_partitioner as theirs

from fxpart import (
    InfeasibleError,
    NodeLatency,
    Partitioner,
    PartitionerConfig,
    PartitionMode,
    get_latency_of_partitioned_graph,
    get_partition_to_latency_mapping,
)
from fxpart.torch_compat.partitioner.partitioner import PartitionResult
from tests.torch_compat.partitioner.models import random_graph
from tests.torch_compat.partitioner.parity import config_for, torch_config, total_bytes

RATE = 2000.0
COST_MODES = [PartitionMode.cost_aware, PartitionMode.kl_based]


def _case(
    seed: int, mode: PartitionMode, shares: tuple[float, float] = (0.45, 0.9)
) -> tuple[Any, GraphModule, PartitionerConfig]:
    rng = random.Random(seed)
    model, graph_module, _ = random_graph(seed, 8)
    latencies = {
        n: NodeLatency(rng.random() / 10, rng.random() / 10)
        for n in graph_module.graph.nodes
        if n.op.startswith("call")
    }
    memory = [int(total_bytes(graph_module) * rng.uniform(*shares)) for _ in range(3)]
    return (
        model,
        graph_module,
        config_for(
            memory,
            mode,
            transfer_rate_bytes_per_sec=RATE,
            node_to_latency_mapping=latencies,
        ),
    )


def _cost(partitions: list[Any], config: PartitionerConfig) -> float:
    latencies = get_partition_to_latency_mapping(partitions, config.node_to_latency_mapping)
    return get_latency_of_partitioned_graph(partitions, latencies, RATE)


def _follows(partitioner: Any, result: PartitionResult) -> bool:  # noqa: ANN401 - theirs or ours
    """Return whether each submodule calls exactly the nodes of its partition."""
    for partition in partitioner.partitions:
        submodule: Any = result.module_with_submodules.get_submodule(f"submod_{partition}")
        emitted = Counter(str(n.target) for n in submodule.graph.nodes if n.op.startswith("call"))
        expected = Counter(
            str(n.target).replace(".", "_") if n.op == "call_module" else str(n.target)
            for n in partition.nodes
            if n.op.startswith("call")
        )
        if emitted != expected:
            return False
    return True


@pytest.mark.parametrize("mode", COST_MODES)
def test_every_partition_has_a_device_and_the_module_follows(mode: PartitionMode) -> None:
    several = 0
    for seed in range(25):
        model, graph_module, config = _case(seed, mode)
        partitioner = Partitioner()
        try:
            result = partitioner.partition_graph(graph_module, model, config)
        except InfeasibleError:
            continue
        assert all(p.logical_device_ids for p in partitioner.partitions)
        assert _follows(partitioner, result)
        several += len(partitioner.partitions) > 1
    assert several >= 10


@pytest.mark.parametrize("mode", COST_MODES)
def test_no_answer_is_slower_than_that_of_torch(mode: PartitionMode) -> None:
    compared = 0
    for seed in range(20):
        model, graph_module, config = _case(seed, mode)
        torchs: Any = theirs.Partitioner()
        try:
            torchs.partition_graph(graph_module, model, torch_config(config))
        except RuntimeError:
            continue
        if not all(p.logical_device_ids for p in torchs.partitions):
            continue
        ours = Partitioner()
        ours.partition_graph(graph_module, model, config)
        assert _cost(ours.partitions, config) <= _cost(torchs.partitions, config) * (1 + 1e-9)
        compared += 1
    assert compared >= 10


def test_torch_cuts_by_a_stale_mapping_or_leaves_partitions_without_a_device() -> None:
    wrong = Counter[str]()
    for seed in range(8):
        for mode, shares in zip(COST_MODES, ((0.34, 0.45), (0.45, 0.9)), strict=True):
            model, graph_module, config = _case(seed, mode, shares)
            torchs: Any = theirs.Partitioner()
            try:
                result: Any = torchs.partition_graph(graph_module, model, torch_config(config))
            except RuntimeError:
                continue
            wrong["stale"] += not _follows(torchs, result)
            wrong["no device"] += not all(p.logical_device_ids for p in torchs.partitions)
    assert wrong["stale"] >= 1
    assert wrong["no device"] >= 1

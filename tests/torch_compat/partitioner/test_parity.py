"""The same partitions, bytes, devices and DAG as torch's partitioner, if it has an answer."""

import random
from collections import Counter

import pytest
import torch

from fxpart.torch_compat.partitioner import PartitionMode
from tests.torch_compat.partitioner.models import random_graph
from tests.torch_compat.partitioner.parity import (
    Outcome,
    ask_fxpart,
    ask_torch,
    config_for,
    torch_config,
    total_bytes,
)

SEEDS = 60


def _same(ours: Outcome, theirs: Outcome) -> None:
    assert ours.partitions == theirs.partitions
    assert ours.dag == theirs.dag
    assert ours.code == theirs.code


def _runs_alike(ours: Outcome, graph_module: torch.fx.GraphModule, inputs: list[object]) -> None:
    assert ours.module is not None
    results, expected = ours.module(*inputs), graph_module(*inputs)
    pairs = (
        zip(results, expected, strict=True) if isinstance(results, tuple) else [(results, expected)]
    )
    assert all(torch.equal(a, b) for a, b in pairs)


def _memory(rng: random.Random, total: int, equal: bool) -> list[int]:
    count = rng.randint(2, 5)
    shares = [rng.uniform(0.2, 1.1) for _ in range(count)]
    if equal:
        shares = [rng.uniform(0.25, 1.1)] * count
    return [int(total * share) for share in shares]


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize(
    ("mode", "embeddings"), [(PartitionMode.size_based, False), (PartitionMode.sparse_nn, True)]
)
def test_answers_equal_those_of_torch(
    mode: PartitionMode, embeddings: bool, saturate: bool
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        rng = random.Random(seed)
        model, graph_module, inputs = random_graph(seed, rng.randint(2, 25), embeddings)
        memory = _memory(rng, total_bytes(graph_module), embeddings)
        config = config_for(memory, mode, saturate_host=saturate)
        theirs = ask_torch(graph_module, model, config)
        ours = ask_fxpart(graph_module, model, config)
        if theirs.whole:
            _same(ours, theirs)
            counts["several" if len(ours.partitions) > 1 else "single"] += 1
        elif ours.error is None:
            assert ours.whole
            counts["ours alone"] += 1
        else:
            assert issubclass(ours.error, RuntimeError)
            counts["both refuse"] += 1
        if ours.error is None:
            _runs_alike(ours, graph_module, list(inputs))
    # The comparison is meaningful only if every kind of case occurs.
    assert counts["several"] >= 10
    assert counts["single"] >= 3
    assert counts["both refuse"] >= 3


def test_parents_and_children_equal_those_of_torch() -> None:
    compared = 0
    for seed in range(30):
        model, graph_module, _ = random_graph(seed)
        config = config_for([int(0.4 * total_bytes(graph_module))] * 5)
        theirs = ask_torch(graph_module, model, config)
        if theirs.whole:
            assert ask_fxpart(graph_module, model, config).family == theirs.family
            compared += 1
    assert compared >= 20


def test_an_aot_mapping_is_applied_as_in_torch() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        rng = random.Random(seed)
        model, graph_module, inputs = random_graph(seed)
        ops = [n for n in graph_module.graph.nodes if n.op.startswith("call")]
        cuts = sorted(rng.sample(range(1, len(ops)), 3))
        mapping = {op: sum(i >= cut for cut in cuts) for i, op in enumerate(ops)}
        if seed % 3 == 0:
            mapping = {op: min(rng.randrange(4), i) for i, op in enumerate(ops)}
            # Ids in the order of their first use: torch mistakes others for positions in its list.
            order = list(dict.fromkeys(mapping.values()))
            mapping = {op: order.index(p) for op, p in mapping.items()}
        config = config_for(
            [10, 10],
            PartitionMode.aot_based,
            node_to_partition_mapping=mapping,
            partition_to_logical_device_mapping={p: [10 + p % 2] for p in range(4)},
        )
        theirs = ask_torch(graph_module, model, config)
        ours = ask_fxpart(graph_module, model, config)
        if theirs.error is None:
            _same(ours, theirs)
            _runs_alike(ours, graph_module, list(inputs))
            counts["applied"] += 1
        else:
            assert ours.error is not None
            assert ours.error.__name__ == "CycleError"
            counts["cycle"] += 1
    assert counts["applied"] >= 30
    assert counts["cycle"] >= 5


def test_a_configuration_of_torch_types_is_accepted() -> None:
    model, graph_module, _ = random_graph(3)
    config = config_for([int(0.5 * total_bytes(graph_module))] * 4)
    ours = ask_fxpart(graph_module, model, config)
    assert len(ours.partitions) > 1
    _same(ask_fxpart(graph_module, model, torch_config(config)), ours)

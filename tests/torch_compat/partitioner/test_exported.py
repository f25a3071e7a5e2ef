"""Exported ATen graphs: cut like traced ones, with the same calls and the same results."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpart import (
    InfeasibleError,
    NodeLatency,
    Partitioner,
    PartitionMode,
    get_size_of_all_nodes,
)
from tests.torch_compat.partitioner.models import RandomModel, random_inputs
from tests.torch_compat.partitioner.parity import config_for, total_bytes


class _Nested(nn.Module):
    """Nested inputs and outputs, a buffer that changes, a tuple, an unused input, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.table = nn.Embedding(7, 4)

    def forward(self, x: Tensor, more: dict[str, Any], unused: Tensor) -> dict[str, Any]:
        left, right = torch.split(self.norm(self.linear(x)), 2, -1)
        rows = self.table(more["ids"][0])
        return {"sum": left + right, "pair": (rows * x, [right]), "count": x.shape[0]}


NESTED = (torch.randn(6, 4), {"ids": [torch.tensor([1, 2, 3, 4, 5, 6])]}, torch.randn(3))


def _alike(result: object, expected: object) -> bool:
    leaves, spec = pytree.tree_flatten(result)
    other, wanted = pytree.tree_flatten(expected)
    return spec == wanted and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(leaves, other, strict=True)
    )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_nested_inputs_and_outputs_survive(dynamic: bool, training: bool) -> None:
    batch = torch.export.Dim("batch", min=2)
    shapes = ({0: batch}, {"ids": [{0: batch}]}, None) if dynamic else None
    model = _Nested().train(training)
    exported = torch.export.export(model, NESTED, dynamic_shapes=shapes).module()
    get_size_of_all_nodes(exported)
    memory = [int(0.55 * total_bytes(exported))] * 3
    result = Partitioner().partition_graph(exported, model, config_for(memory))
    assert len(result.dag.nodes) >= 2
    state = {k: v.clone() for k, v in exported.state_dict().items()}
    expected = exported(*NESTED)
    after = {k: v.clone() for k, v in exported.state_dict().items()}
    exported.load_state_dict(state)
    assert _alike(result.module_with_submodules(*NESTED), expected)
    assert all(torch.equal(v, after[k]) for k, v in exported.state_dict().items())
    if dynamic:
        more = (torch.randn(9, 4), {"ids": [torch.arange(9) % 7]}, torch.randn(3))
        assert result.module_with_submodules(*more)["count"] == 9


def test_random_exported_graphs_compute_the_same_in_every_mode() -> None:
    modes = {PartitionMode.size_based: 0, PartitionMode.kl_based: 0, PartitionMode.cost_aware: 0}
    for seed in range(9):
        model = RandomModel(seed, 10, embeddings=True)
        inputs = random_inputs()
        exported = torch.export.export(model, tuple(inputs)).module()
        get_size_of_all_nodes(exported)
        mode = list(modes)[seed % 3]
        latencies = {n: NodeLatency(0.1, 0.2) for n in exported.graph.nodes}
        config = config_for(
            [int(total_bytes(exported) * random.Random(seed).uniform(0.5, 0.9))] * 4,
            mode,
            transfer_rate_bytes_per_sec=1000.0,
            node_to_latency_mapping=latencies,
        )
        try:
            partitioner = Partitioner()
            emitted = partitioner.partition_graph(exported, model, config).module_with_submodules
        except InfeasibleError:
            continue
        assert _alike(emitted(*inputs), exported(*inputs))
        modes[mode] += len(partitioner.partitions) > 1
    assert all(modes.values())


@pytest.mark.parametrize("share", [0.6, 2.0])
def test_the_check_of_the_inputs_stays_and_is_no_operator(share: float) -> None:
    model = _Nested().eval()
    exported = torch.export.export(model, NESTED).module()
    get_size_of_all_nodes(exported)
    before = exported.code
    partitioner = Partitioner()
    config = config_for([int(share * total_bytes(exported))] * 3)
    emitted = partitioner.partition_graph(exported, model, config).module_with_submodules
    assert exported.code == before
    assert (len(partitioner.partitions) == 1) == (share > 1)
    assert "_guards_fn" not in {n.name for p in partitioner.partitions for n in p.nodes}
    calls = [n.target for n in emitted.graph.nodes if n.op == "call_module"]
    assert calls[0] == "_guards_fn"
    with pytest.raises(AssertionError, match="x"):
        emitted(torch.randn(5, 4), *NESTED[1:])


def test_embeddings_of_an_exported_graph_are_spread() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(100, 4, mode="sum") for _ in range(3))
            self.top = nn.Linear(4, 4)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.top(sum(table(ids) for table in self.tables))
            return out

    model, ids = Bags(), torch.randint(0, 100, (2, 3))
    exported = torch.export.export(model, (ids,)).module()
    partitioner = Partitioner()
    config = config_for([2600] * 4, PartitionMode.sparse_nn)
    emitted = partitioner.partition_graph(exported, model, config).module_with_submodules
    assert torch.equal(emitted(ids), exported(ids))
    sparse = [p for p in partitioner.partitions if any("embedding" in n.name for n in p.nodes)]
    assert len(sparse) == 3
    assert sorted(tuple(p.logical_device_ids) for p in sparse) == [(10,), (11,), (12,)]
    dense = [p for p in partitioner.partitions if p not in sparse]
    assert {tuple(p.logical_device_ids) for p in dense} == {(10, 11, 12)}

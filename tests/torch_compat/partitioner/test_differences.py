"""Each deliberate difference from torch 2.13, on the smallest graph that shows it.

`docs/differences.md` lists them; the behaviour of torch is tested too, to keep the table true.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental import accelerator_partitioner as theirs

from fxpart import CycleError, InfeasibleError, Partitioner, PartitionMode
from tests.torch_compat.partitioner.models import traced
from tests.torch_compat.partitioner.parity import ask_fxpart, ask_torch, config_for, torch_config

X = torch.randn(8, 4)
"""128 bytes."""


class _Function(nn.Module):
    """A module that computes a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401 - what the function returns
        return self.function(x)


def _chain(x: Tensor) -> Tensor:
    return torch.tanh(torch.sigmoid(torch.relu(x)))


def _aot(graph_module: GraphModule, ids: list[int], **more: Any) -> Any:  # noqa: ANN401
    ops = [n for n in graph_module.graph.nodes if n.op not in {"placeholder", "output"}]
    mapping = dict(zip(ops, ids, strict=True))
    homes = {p: [10 + p] for p in sorted(set(ids))}
    return config_for(
        [1000, 1000, 1000],
        PartitionMode.aot_based,
        node_to_partition_mapping=mapping,
        partition_to_logical_device_mapping=homes,
        **more,
    )


def test_a_tuple_has_a_size() -> None:
    class Chunks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            both = torch.chunk(x, 2)
            return both[0] + both[1]

    model = Chunks()
    graph_module = traced(model, [X])
    assert ask_torch(graph_module, model, config_for([1000])).error is AttributeError
    assert ask_fxpart(graph_module, model, config_for([1000])).whole


def test_a_number_has_no_size() -> None:
    model = _Function(lambda x: x * x.size(0))
    graph_module = traced(model, [X])
    assert ask_torch(graph_module, model, config_for([1000])).error is RuntimeError
    assert ask_fxpart(graph_module, model, config_for([1000])).whole


def test_an_exact_fit_is_a_fit() -> None:
    # x and relu take 256 bytes of the first device, repeat (512) and relu all of the second; neg
    # reads relu and adds exactly the 128 bytes that the first has left.
    model = _Function(lambda x: ((y := torch.relu(x)).repeat(1, 4), torch.neg(y)))
    graph_module = traced(model, [X])
    config = config_for([384, 640])
    assert ask_torch(graph_module, model, config).error is RuntimeError
    ours = ask_fxpart(graph_module, model, config)
    assert [devices for *_, devices in ours.partitions] == [(10,), (11,), (10,)]


def test_another_order_of_devices_is_tried() -> None:
    # relu takes the first device that holds it, the large one; the wide product needs that one.
    model = _Function(lambda x: torch.relu(x).repeat(1, 4))
    graph_module = traced(model, [X])
    config = config_for([650, 256])
    assert ask_torch(graph_module, model, config).error is RuntimeError
    ours = ask_fxpart(graph_module, model, config)
    assert [devices for *_, devices in ours.partitions] == [(11,), (10,)]


def test_a_first_operator_without_bytes_takes_one_device() -> None:
    class Empty(nn.Module):
        def forward(self, empty: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.relu(empty), torch.neg(torch.relu(x))

    model = Empty()
    graph_module = traced(model, [X[:0], X])
    config = config_for([300, 300, 300])
    torchs, ours = (ask(graph_module, model, config) for ask in (ask_torch, ask_fxpart))
    assert [devices for *_, devices in torchs.partitions] == [(10, 11), (12,)]
    assert [devices for *_, devices in ours.partitions] == [(10,), (11,)]


def test_a_result_that_two_partitions_read_is_one_output() -> None:
    model = _Function(lambda x: torch.add(torch.sigmoid(y := torch.relu(x)), torch.tanh(y)))
    graph_module = traced(model, [X])
    config = _aot(graph_module, [0, 1, 2, 2])
    torchs = theirs.Partitioner().partition_graph(graph_module, model, torch_config(config))
    assert [n.name for n in torchs.dag.nodes[0].output_nodes] == ["submod_1", "submod_2"]
    ours = Partitioner().partition_graph(graph_module, model, config)
    assert [n.name for n in ours.dag.nodes[0].output_nodes] == ["submod_0"]


def test_ids_of_an_aot_mapping_are_names_not_places() -> None:
    model = _Function(_chain)
    graph_module = traced(model, [X])
    config = _aot(graph_module, [1, 0, 0])
    torchs, ours = (ask(graph_module, model, config) for ask in (ask_torch, ask_fxpart))
    assert [(name, devices) for name, *_, devices, _ in torchs.dag] == [
        ("submod_1", (10,)),
        ("submod_0", (11,)),
    ]
    assert [(name, devices) for name, *_, devices, _ in ours.dag] == [
        ("submod_1", (11,)),
        ("submod_0", (10,)),
    ]
    shifted = _aot(graph_module, [2, 0, 0])
    assert ask_torch(graph_module, model, shifted).error is IndexError
    assert ask_fxpart(graph_module, model, shifted).whole


def test_a_circle_is_named_before_anything_is_cut() -> None:
    model = _Function(_chain)
    graph_module = traced(model, [X])
    config = _aot(graph_module, [0, 1, 0])
    partitioner = Partitioner()
    with pytest.raises(CycleError, match="partitions 0 -> 1 -> 0 wait for each other"):
        partitioner.partition_graph(graph_module, model, config)
    assert partitioner.partitions == []


def test_the_caller_keeps_the_lists_of_the_mapping() -> None:
    model = _Function(torch.relu)
    graph_module = traced(model, [X])
    config = _aot(graph_module, [0], saturate_host=True)
    assert ask_fxpart(graph_module, model, config).partitions[0][3] == (10, 11, 12)
    assert config.partition_to_logical_device_mapping == {0: [10]}
    assert ask_torch(graph_module, model, config).whole
    assert config.partition_to_logical_device_mapping == {0: [10, 11, 12]}


def test_the_output_may_be_in_the_mapping() -> None:
    model = _Function(torch.relu)
    graph_module = traced(model, [X])
    nodes = list(graph_module.graph.nodes)
    config = _aot(graph_module, [0])._replace(node_to_partition_mapping=dict.fromkeys(nodes, 0))
    assert ask_torch(graph_module, model, config).error is RuntimeError
    assert ask_fxpart(graph_module, model, config).whole


def test_a_partitioner_can_be_used_again() -> None:
    model = _Function(_chain)
    graph_module = traced(model, [X])
    ours, torchs = Partitioner(), theirs.Partitioner()
    config: Any = config_for([1000])
    for _ in range(2):
        ours.partition_graph(graph_module, model, config)
        torchs.partition_graph(graph_module, model, config)
    assert [p.partition_id for p in ours.partitions] == [0]
    assert [p.partition_id for p in torchs.partitions] == [0, 1]


def test_an_input_may_be_called_like_a_submodule() -> None:
    class Named(nn.Module):
        def forward(self, submod_0: Tensor) -> Tensor:
            return torch.relu(submod_0)

    model = Named()
    graph_module = traced(model, [X])
    assert ask_torch(graph_module, model, config_for([1000])).error is IndexError
    ours = ask_fxpart(graph_module, model, config_for([1000]))
    assert [(name, size) for name, *_, size in ours.dag] == [("submod_1", 256)]


def test_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = _Function(_chain)
    config = config_for([1000, 1000], saturate_host=True)
    assert ask_fxpart(traced(model, [X]), model, config).partitions[0][3] == (10, 11)
    assert capsys.readouterr().out == ""


def test_levels_and_families_are_set_in_every_mode() -> None:
    model = _Function(_chain)
    graph_module = traced(model, [X])
    partitioner = Partitioner()
    partitioner.partition_graph(graph_module, model, _aot(graph_module, [0, 1, 2]))
    first, second, third = partitioner.partitions
    assert [p.bfs_level for p in partitioner.partitions] == [0, 1, 2]
    assert (list(second.parents), list(second.children)) == ([first], [third])


class _Tables(nn.Module):
    def __init__(self, count: int, dense: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10, 4) for _ in range(count))
        self.dense = dense

    def forward(self, ids: Tensor) -> Any:  # noqa: ANN401 - a tensor or several
        rows = [table(ids) for table in self.tables]
        return _chain(sum(rows)) if self.dense else tuple(rows)


IDS = torch.randint(0, 10, (4,))


def test_sparse_nn_needs_no_other_operators() -> None:
    model = _Tables(2, dense=0)
    graph_module = traced(model, [IDS])
    # 160 bytes of weights, 64 of output and 32 of ids for each table.
    config = config_for([256, 256], PartitionMode.sparse_nn)
    assert ask_torch(graph_module, model, config).error is IndexError
    assert [p[3] for p in ask_fxpart(graph_module, model, config).partitions] == [(10,), (11,)]


def test_a_replica_is_named_once() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Embedding(10, 4), nn.Embedding(10, 4)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.second(torch.argmax(self.first(ids * 1), dim=1))
            return out

    # Two tables and two other partitions, at four levels: none can be combined.
    model = Deep()
    graph_module = traced(model, [IDS])
    config = config_for([420] * 4, PartitionMode.sparse_nn, saturate_host=True)
    torchs, ours = (ask(graph_module, model, config) for ask in (ask_torch, ask_fxpart))
    assert torchs.partitions[0][3] == (10, 11, 12, 12, 13, 13)
    homes = [devices for *_, devices in ours.partitions]
    assert homes == [(10, 11, 12, 13), (10, 12), (10, 11, 12, 13), (11, 13)]


def test_sparse_nn_without_embeddings_says_so() -> None:
    model = _Function(_chain)
    graph_module = traced(model, [X])
    config = config_for([400, 400], PartitionMode.sparse_nn)
    assert ask_torch(graph_module, model, config).error is IndexError
    with pytest.raises(InfeasibleError, match="none of the 3 operators is an embedding"):
        Partitioner().partition_graph(graph_module, model, config)


def test_an_operator_beside_an_embedding_is_none() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, 4)
            self.top = nn.Linear(4, 4)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.top(self.table(ids))
            return out

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), Block()

        def forward(self, ids: Tensor) -> Tensor:
            both: Tensor = self.a(ids) + self.b(ids)
            return both

    model = Blocks()
    graph_module = traced(model, [IDS])
    config = config_for([3000, 3000], PartitionMode.sparse_nn)
    torchs, ours = (ask(graph_module, model, config) for ask in (ask_torch, ask_fxpart))
    assert {"a_table", "a_top"} <= next(
        names for _, names, *_ in torchs.partitions if "a_top" in names
    )
    assert {"a_top", "b_top", "add"} in [set(names) for _, names, *_ in ours.partitions]

"""`Partition` updates torch's sums incrementally; sets keep their order."""

import random

import pytest
from torch.fx.experimental import partitioner_utils as theirs

from fxpart import CaptureError, Partition, get_extra_size_of
from fxpart.torch_compat.partitioner.partition import OrderedSet
from tests.torch_compat.partitioner.models import random_graph


def _summed(partition: Partition) -> int:
    return sum(theirs.get_extra_size_of(n, set(partition.nodes)) for n in partition.nodes)


def test_nodes_come_and_go_as_in_torch() -> None:
    for seed in range(25):
        _, graph_module, _ = random_graph(seed, 20)
        ops = [n for n in graph_module.graph.nodes if n.op.startswith("call")]
        rng = random.Random(seed)
        ours, torchs = Partition(0), theirs.Partition(0)
        for _ in range(60):
            op = rng.choice(ops)
            if op in ours.nodes and rng.random() < 0.6:
                ours.remove_node(op)
                torchs.remove_node(op)
            else:
                ours.add_node(op)
                torchs.add_node(op)
            assert set(ours.nodes) == torchs.nodes
            assert ours.used_mem_bytes == torchs.used_mem_bytes


def test_a_direct_change_of_the_nodes_is_seen_by_the_next_sum() -> None:
    _, graph_module, _ = random_graph(3)
    ops = [n for n in graph_module.graph.nodes if n.op.startswith("call")]
    partition = Partition(0)
    partition.add_node(ops[0])
    partition.nodes.add(ops[1])
    partition.add_node(ops[2])
    assert partition.used_mem_bytes == _summed(partition)
    partition.nodes = {ops[3]}
    partition.add_node(ops[4])
    assert partition.used_mem_bytes == _summed(partition)
    partition.nodes = partition.nodes | {ops[5]}
    partition.recalculate_mem_size()
    assert partition.used_mem_bytes == _summed(partition)
    partition.remove_node(ops[6])
    assert partition.used_mem_bytes == _summed(partition)


def test_extra_size_counts_each_operand_once_if_it_is_elsewhere() -> None:
    _, graph_module, _ = random_graph(1, 20)
    nodes = [n for n in graph_module.graph.nodes if n.op != "output"]
    rng = random.Random(1)
    for node in nodes:
        chosen = set(rng.sample(nodes, len(nodes) // 2))
        assert get_extra_size_of(node, chosen) == theirs.get_extra_size_of(node, chosen)


def test_a_node_without_a_size_is_refused() -> None:
    _, graph_module, _ = random_graph(1)
    node = next(n for n in graph_module.graph.nodes if n.op == "call_module")
    del node.size_bytes
    with pytest.raises(CaptureError, match=r"linear_0 has no size_bytes; call get_size_of_all"):
        get_extra_size_of(node, set())


def test_the_set_keeps_its_order_and_behaves_like_a_set() -> None:
    members = OrderedSet("cab")
    assert list(members) == ["c", "a", "b"]
    assert set(members) == {"a", "b", "c"}
    assert OrderedSet("abc") == members
    assert list(members.union("xa", "y")) == ["c", "a", "b", "x", "y"]
    assert list(members.intersection("bxc")) == ["c", "b"]
    assert list(members.difference("a")) == ["c", "b"]
    assert list(members | {"z"}) == ["c", "a", "b", "z"]
    assert members.issubset("abcd")
    assert members.issuperset("ab")
    assert not members.issubset("ab")
    before = members.changes
    members.add("a")
    members.discard("q")
    assert members.changes == before
    members.remove("a")
    members.update("aq")
    assert list(members) == ["c", "b", "a", "q"]
    assert members.changes == before + 3
    assert list(members.copy()) == list(members)
    with pytest.raises(KeyError):
        members.remove("none")

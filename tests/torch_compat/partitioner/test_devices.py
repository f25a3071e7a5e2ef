"""Partitions on devices: torch's best fit, the exact fit, and what remains."""

from typing import Any

import pytest
import torch
from torch.fx import Graph, Node
from torch.fx.experimental import accelerator_partitioner as theirs_mapping
from torch.fx.experimental import partitioner_utils as theirs

from fxpart import (
    Device,
    Partition,
    check_dependency,
    get_device_partition_stats,
    get_device_to_partitions_mapping,
    size_bytes,
)
from fxpart.torch_compat.partitioner import get_bfs_level_partition, reorganize_partitions
from fxpart.torch_compat.partitioner.config import ConfigError
from tests.torch_compat.partitioner.models import random_graph


def _ops(count: int, size: int = 10) -> list[Node]:
    """Return independent operators that read one input of 4 bytes and return `size` bytes."""
    graph = Graph()
    x = graph.placeholder("x")
    x.size_bytes = size_bytes(4, 4)
    ops = [graph.call_function(torch.relu, (x,)) for _ in range(count)]
    for op in ops:
        op.size_bytes = size_bytes(size, size)
    return ops


def _each(ops: list[Node]) -> list[Partition]:
    partitions = [Partition(i) for i in range(len(ops))]
    for partition, op in zip(partitions, ops, strict=True):
        partition.add_node(op)
    return partitions


def _devices(*memory: int) -> list[Device]:
    return [Device(f"d{i}", size, i) for i, size in enumerate(memory)]


def test_an_input_that_two_partitions_share_lies_once_on_a_device() -> None:
    ops, answers = _ops(2), []
    # The input of 4 bytes and two results of 10; with the input for each partition, 28.
    for mapping in (
        theirs_mapping.get_device_to_partitions_mapping,
        get_device_to_partitions_mapping,
    ):
        partitions: list[Any] = list(_each(ops))
        only: list[Any] = list(_devices(26))
        answers.append(mapping(partitions, only))
    assert answers == [False, True]


def test_the_smallest_sufficient_device_is_used() -> None:
    partitions = _each(_ops(2))
    assert get_device_to_partitions_mapping(partitions, _devices(100, 13, 20, 15))
    assert [p.logical_device_ids for p in partitions] == [[3], [2]]


def test_devices_equal_those_of_torch_if_it_finds_some() -> None:
    compared = 0
    for seed in range(30):
        _, graph_module, _ = random_graph(seed)
        ops = [n for n in graph_module.graph.nodes if n.op.startswith("call")]
        ours, torchs = _each(ops), [theirs.Partition(i) for i in range(len(ops))]
        for partition, op in zip(torchs, ops, strict=True):
            partition.add_node(op)
        needed_bytes = sum(p.used_mem_bytes for p in ours)
        memory = [int(needed_bytes * share) for share in (0.2, 0.4, 0.3)]
        mapped = theirs_mapping.get_device_to_partitions_mapping(
            torchs, [theirs.Device("", size, i) for i, size in enumerate(memory)]
        )
        if mapped:
            assert get_device_to_partitions_mapping(ours, _devices(*memory))
            assert [p.logical_device_ids for p in ours] == [p.logical_device_ids for p in torchs]
            compared += 1
    assert compared >= 10


def test_an_exact_fit_is_a_fit() -> None:
    partitions = _each(_ops(1))
    assert get_device_to_partitions_mapping(partitions, _devices(14))
    assert partitions[0].logical_device_ids == [0]


def test_no_room_changes_nothing() -> None:
    partitions = _each(_ops(3))
    assert not get_device_to_partitions_mapping(partitions, _devices(14, 14))
    assert [p.logical_device_ids for p in partitions] == [[], [], []]


def test_partitions_that_have_devices_keep_them() -> None:
    partitions = _each(_ops(3))
    partitions[0].logical_device_ids = [0, 1]
    # Devices 0 and 1 have 1 byte left each, so both others go to device 2.
    assert get_device_to_partitions_mapping(partitions, _devices(15, 15, 40))
    assert [p.logical_device_ids for p in partitions] == [[0, 1], [2], [2]]
    devices = _devices(15, 15, 40)
    placed, free_bytes, unplaced = get_device_partition_stats([*partitions, Partition(9)], devices)
    assert [[p.partition_id for p in placed[d]] for d in devices] == [[0], [0], [1, 2]]
    assert [free_bytes[d] for d in devices] == [1, 1, 12]
    assert [p.partition_id for p in unplaced] == [9]


def test_an_unknown_device_is_refused() -> None:
    partitions = _each(_ops(1))
    partitions[0].logical_device_ids = [7]
    with pytest.raises(
        ConfigError, match="partition 0 is put on logical device 7, which does not exist"
    ):
        get_device_partition_stats(partitions, _devices(100))


def test_cycles_and_levels() -> None:
    a, b, c = (Partition(i) for i in range(3))
    a.children.add(b)
    b.children.add(c)
    assert not any(map(check_dependency, (a, b, c)))
    c.children.add(b)
    assert [check_dependency(p) for p in (a, b, c)] == [False, True, True]
    _, graph_module, _ = random_graph(2)
    ops = [n for n in graph_module.graph.nodes if n.op.startswith("call")]
    partitions = _each(ops)
    reorganize_partitions(partitions)
    get_bfs_level_partition(partitions)
    level = {op: p.bfs_level for op, p in zip(ops, partitions, strict=True)}
    for op in ops:
        before = [level[x] for x in op.all_input_nodes if x in level]
        assert level[op] == max(before, default=-1) + 1

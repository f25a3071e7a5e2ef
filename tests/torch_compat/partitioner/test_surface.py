"""All names of torch are available, or listed here as omitted."""

from types import ModuleType

import pytest
from torch.fx.experimental import accelerator_partitioner, partitioner_utils
from torch.fx.passes import graph_manipulation

import fxpart
from fxpart import Device, Partition, Partitioner, SpecError
from fxpart.torch_compat import partitioner as partitioner_room
from fxpart.torch_compat.partitioner.config import ConfigError
from tests.torch_compat.partitioner.models import random_graph

STEPS_NOT_OFFERED = {
    "aot_based_partition",
    "cost_aware_partition",
    "create_partition",
    "create_single_node_partition",
    "do_partition",
    "dump_dag",
    "find_single_partition",
    "kl_based_partition",
    "saturate_host",
    "size_based_partition",
    "sparse_nn_partition",
}
"""Steps of torch's ``partition_graph``, methods that modify the partitioner."""


def _defined_in(module: ModuleType) -> set[str]:
    """Return the public classes and functions defined by a module."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }


def _methods(owner: type) -> set[str]:
    return {name for name, value in vars(owner).items() if callable(value) and name[0] != "_"}


@pytest.mark.parametrize("module", [accelerator_partitioner, partitioner_utils, graph_manipulation])
def test_every_name_of_torch_is_available(module: ModuleType) -> None:
    names = _defined_in(module)
    assert len(names) >= 5
    assert names - set(fxpart.__all__) == set()
    assert names - set(partitioner_room.__all__) == set()


def test_every_method_of_torch_is_offered_or_named_here() -> None:
    methods = _methods(accelerator_partitioner.Partitioner)
    assert methods - _methods(Partitioner) == STEPS_NOT_OFFERED
    for name in ("Partition", "DAG", "DAGNode"):
        home = partitioner_utils if name == "Partition" else accelerator_partitioner
        assert _methods(getattr(home, name)) <= _methods(getattr(fxpart, name))


def _three() -> list[Partition]:
    """Return a chain of three partitions."""
    graph_module = random_graph(3, 12)[1]
    ops = [n for n in graph_module.graph.nodes if n.op not in {"placeholder", "get_attr", "output"}]
    partitions = [Partition(index) for index in range(3)]
    for at, node in enumerate(ops):
        partitions[3 * at // len(ops)].add_node(node)
    fxpart.reorganize_partitions(partitions)
    return partitions


def test_two_partitions_are_merged_as_in_torch() -> None:
    ours, theirs = _three(), list[partitioner_utils.Partition]()
    for partition in ours:
        twin = partitioner_utils.Partition(partition.partition_id)
        for node in partition.nodes:
            twin.add_node(node)
        theirs.append(twin)
    accelerator_partitioner.reorganize_partitions(theirs)
    fxpart.combine_two_partitions(ours[0], ours[1], ours)
    accelerator_partitioner.combine_two_partitions(theirs[0], theirs[1], theirs)
    assert [p.partition_id for p in ours] == [p.partition_id for p in theirs] == [0, 1]
    assert [set(p.nodes) for p in ours] == [p.nodes for p in theirs]
    assert [p.used_mem_bytes for p in ours] == [p.used_mem_bytes for p in theirs]
    assert [{q.partition_id for q in p.children} for p in ours] == [
        {q.partition_id for q in p.children} for p in theirs
    ]


def test_two_that_are_not_of_the_list_are_not_combined() -> None:
    partitions = _three()
    for other in (partitions[0], Partition(9)):
        with pytest.raises(ConfigError, match=r"0 and \d are not two of the 3 given; take both"):
            fxpart.combine_two_partitions(partitions[0], other, partitions)
    assert [p.partition_id for p in partitions] == [0, 1, 2]
    of_torch = [partitioner_utils.Partition(index) for index in range(3)]
    with pytest.raises(ValueError, match="not in list"):
        accelerator_partitioner.combine_two_partitions(of_torch[0], of_torch[0], of_torch)
    assert len(of_torch) == 3
    assert of_torch[0].partition_id == 1


def test_devices_can_be_removed_from_partitions() -> None:
    partitions = _three()
    partitions[1].logical_device_ids = [4, 5]
    fxpart.reset_partition_device(partitions)
    assert [p.logical_device_ids for p in partitions] == [[], [], []]


def test_devices_by_logical_id() -> None:
    devices = [Device("a", 10, 7), Device("b", 20, 3)]
    assert fxpart.get_logical_id_to_device(devices) == {7: devices[0], 3: devices[1]}
    with pytest.raises(SpecError, match="the same logical id 7"):
        fxpart.get_logical_id_to_device([*devices, Device("c", 5, 7)])
    with pytest.raises(RuntimeError, match="no devices are given"):
        fxpart.get_logical_id_to_device([])

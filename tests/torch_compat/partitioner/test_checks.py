"""Wrong types and values are refused in one line with what was given and what is expected."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental import partitioner_utils as theirs

from fxpart import CaptureError, Device, FxpartError, NodeLatency, PartitionerConfig, PartitionMode
from fxpart.torch_compat.partitioner import (
    Partitioner,
    get_latency_of_one_partition,
    get_size_of_all_nodes,
)
from fxpart.torch_compat.partitioner.checks import check_config, check_devices
from fxpart.torch_compat.partitioner.config import ConfigError
from fxpart.torch_compat.partitioner.partition import Partition

X = torch.ones(2, 4)
GOOD = Device("a", 1000, 0)
INF, NAN = float("inf"), float("nan")


class _Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.relu(x))


def _traced() -> GraphModule:
    graph_module = symbolic_trace(_Chain())
    get_size_of_all_nodes(graph_module, [X])
    return graph_module


def _refused(kind: type[FxpartError], message: str, *args: Any) -> None:  # noqa: ANN401 - any
    partitioner = Partitioner()
    with pytest.raises(kind, match=re.escape(message)) as caught:
        partitioner.partition_graph(*args)
    assert isinstance(caught.value, RuntimeError)
    assert "\n" not in str(caught.value)
    assert partitioner.partitions == []


DEVICES: list[tuple[Any, str]] = [
    (None, "config.devices is None; give a list of Device"),
    ("gpu", "config.devices is 'gpu'; give a list of Device"),
    (GOOD, "give a list of Device"),
    ([None], "config.devices holds None; give Device(name, available_mem_bytes, logical_id)"),
    ([("a", 1, 2)], "config.devices holds ('a', 1, 2) (a tuple)"),
    ([{"name": "a"}], "config.devices holds {'name': 'a'} (a dict)"),
    ([Device(None, 1, 2)], "a device is named None; give a string as name"),  # type: ignore[arg-type]
    ([Device("a", "8", 0)], "device 'a' has '8' as available_mem_bytes; give an int, in bytes"),  # type: ignore[arg-type]
    ([Device("a", 8.5, 0)], "device 'a' has 8.5 (a float) as available_mem_bytes"),  # type: ignore[arg-type]
    ([Device("a", NAN, 0)], "device 'a' has nan (a float) as available_mem_bytes"),  # type: ignore[arg-type]
    ([Device("a", INF, 0)], "device 'a' has inf (a float) as available_mem_bytes"),  # type: ignore[arg-type]
    ([Device("a", True, 0)], "device 'a' has True (a bool) as available_mem_bytes"),
    ([Device("a", 2**63, 0)], "give a number that is at most 9223372036854775807"),
    ([Device("a", -1, 0)], "has -1 bytes of memory; give a number that is not negative"),
    ([Device("a", 8, "0")], "device 'a' has the logical id '0'; give an int"),  # type: ignore[arg-type]
    ([Device("a", 8, 0.0)], "device 'a' has the logical id 0.0 (a float); give an int"),  # type: ignore[arg-type]
    ([GOOD, GOOD], "devices 'a' and 'a' have the same logical id 0; give each of the 2"),
]


@pytest.mark.parametrize(("devices", "message"), DEVICES)
def test_wrong_devices_are_refused(devices: Any, message: str) -> None:  # noqa: ANN401 - any
    _refused(ConfigError, message, _traced(), _Chain(), PartitionerConfig(devices))
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_devices(devices)


FIELDS: list[tuple[str, Any, str]] = [
    ("mode", None, "there is no mode None; there are: aot_based, cost_aware"),
    ("mode", "size_based", "mode is 'size_based'; give PartitionMode.size_based"),
    ("mode", 3, "mode is 3 (an int); give PartitionMode.kl_based"),
    ("mode", "klbased", "there is no mode 'klbased'; nearest: kl_based"),
    ("transfer_rate_bytes_per_sec", None, "transfer_rate_bytes_per_sec is None; give a number"),
    ("transfer_rate_bytes_per_sec", "1e9", "transfer_rate_bytes_per_sec is '1e9'; give a number"),
    ("transfer_rate_bytes_per_sec", -1.0, "is -1.0; give a positive number"),
    ("transfer_rate_bytes_per_sec", NAN, "is nan; give a positive number"),
    ("transfer_rate_bytes_per_sec", INF, "is inf; give a positive number"),
    ("node_to_latency_mapping", None, "node_to_latency_mapping is None; give a dict of nodes"),
    ("node_to_latency_mapping", {"relu": 1}, "node_to_latency_mapping has 'relu' as a key"),
    ("node_to_partition_mapping", [0, 1], "node_to_partition_mapping is [0, 1] (a list); give"),
    ("node_to_partition_mapping", {None: 0}, "node_to_partition_mapping has None as a key"),
    ("partition_to_logical_device_mapping", 0, "partition_to_logical_device_mapping is 0 (an int)"),
    ("partition_to_logical_device_mapping", {0: 0}, "gives partition 0 the devices 0 (an int)"),
    ("partition_to_logical_device_mapping", {0: None}, "gives partition 0 the devices None"),
    ("partition_to_logical_device_mapping", {0: "01"}, "gives partition 0 the devices '01'"),
    ("partition_to_logical_device_mapping", {0: [0.0]}, "gives partition 0 the devices [0.0]"),
    ("partition_to_logical_device_mapping", {"0": [0]}, "has the partition '0'; give an int"),
    (
        "partition_to_logical_device_mapping",
        {0: [0, 0]},
        "gives partition 0 the device 0 more than once; give each logical id once",
    ),
    ("saturate_host", "no", "saturate_host is 'no'; give True or False"),
]


@pytest.mark.parametrize(("field", "value", "message"), FIELDS)
def test_wrong_fields_are_refused(field: str, value: Any, message: str) -> None:  # noqa: ANN401 - any
    config = PartitionerConfig([GOOD])._replace(**{field: value})
    _refused(ConfigError, message, _traced(), _Chain(), config)


@pytest.mark.parametrize(
    ("latency", "message"),
    [
        (None, "operator relu has None as latency; give NodeLatency(mem_latency_sec, comp"),
        (1.0, "operator relu has 1.0 (a float) as latency"),
        (NodeLatency(-1.0, 0.0), "operator relu has -1.0 (a float) as mem_latency_sec"),
        (NodeLatency(0.0, NAN), "operator relu has nan (a float) as computer_latency_sec"),
        (NodeLatency(0.0, INF), "operator relu has inf (a float) as computer_latency_sec"),
        (NodeLatency("1", 0.0), "operator relu has '1' as mem_latency_sec; give a number"),  # type: ignore[arg-type]
    ],
)
def test_wrong_latencies_are_refused(latency: Any, message: str) -> None:  # noqa: ANN401 - any
    graph_module = _traced()
    relu = next(node for node in graph_module.graph.nodes if node.name == "relu")
    config = PartitionerConfig([GOOD], node_to_latency_mapping={relu: latency})
    _refused(ConfigError, message, graph_module, _Chain(), config)
    if latency is not None:
        partition = Partition(0)
        partition.add_node(relu)
        with pytest.raises(ConfigError, match=re.escape(message)):
            get_latency_of_one_partition(partition, {relu: latency})


def test_latencies_that_are_no_mapping_are_refused() -> None:
    partition = Partition(0)
    partition.add_node(next(n for n in _traced().graph.nodes if n.name == "relu"))
    with pytest.raises(ConfigError, match="node_to_latency_mapping is None; give a dict of nodes"):
        get_latency_of_one_partition(partition, None)  # type: ignore[arg-type]


def test_a_latency_of_another_graph_suggests_no_nearest_name() -> None:
    node, other = ({n.name: n for n in _traced().graph.nodes}["relu"] for _ in range(2))
    partition = Partition(0)
    partition.add_node(node)
    with pytest.raises(ConfigError, match="the one of this name is of another graph"):
        get_latency_of_one_partition(partition, {other: NodeLatency(1.0, 1.0)})


@pytest.mark.parametrize("wrong", [None, "0", 0.0, -1, True, [0]])
def test_partition_ids_must_be_integers(wrong: Any) -> None:  # noqa: ANN401 - any
    graph_module = _traced()
    relu = next(node for node in graph_module.graph.nodes if node.name == "relu")
    config = PartitionerConfig([GOOD], node_to_partition_mapping={relu: wrong})
    message = "node_to_partition_mapping gives relu the partition "
    _refused(ConfigError, message, graph_module, _Chain(), config)


@pytest.mark.parametrize("wrong", [None, {}, {"devices": [GOOD]}, [GOOD], "config"])
def test_a_wrong_configuration_type_is_refused(wrong: Any) -> None:  # noqa: ANN401 - any
    message = "; give a PartitionerConfig"
    _refused(ConfigError, message, _traced(), _Chain(), wrong)


def test_a_wrong_module_type_is_refused() -> None:
    config = PartitionerConfig([GOOD])
    _refused(ConfigError, "fx_module is a _Chain; give a GraphModule", _Chain(), _Chain(), config)
    _refused(ConfigError, "torch_module is a NoneType; give the nn.Mod", _traced(), None, config)


def test_a_configuration_of_torch_is_accepted() -> None:
    device = theirs.Device("a", 1000, 7)
    config = theirs.PartitionerConfig([device], theirs.PartitionMode.size_based)
    check_config(config)  # type: ignore[arg-type]
    cut = Partitioner().partition_graph(_traced(), _Chain(), config)  # type: ignore[arg-type]
    assert [node.logical_device_ids for node in cut.dag.nodes] == [[7]]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (X, "args is a Tensor; give a list of example inputs, such as [x]"),
        (3, "args is of type int; give a list of example inputs"),
        ([], "0 example inputs are given, the graph takes 1 (x); give one for each"),
        ([X, X], "2 example inputs are given, the graph takes 1 (x); give one for each"),
        (["x"], "operator relu fails on the example inputs (TypeError: relu()"),
        ([None], "operator relu fails on the example inputs (TypeError: relu()"),
    ],
)
def test_wrong_example_inputs(
    args: Any,  # noqa: ANN401 - any
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(CaptureError, match=re.escape(message)) as caught:
        get_size_of_all_nodes(symbolic_trace(_Chain()), args)
    assert isinstance(caught.value, RuntimeError)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_sizes_of_a_wrong_type_are_refused() -> None:
    with pytest.raises(ConfigError, match="fx_module is a _Chain; give a GraphModule, such as"):
        get_size_of_all_nodes(_Chain(), [X])  # type: ignore[arg-type]


def test_infinite_memory_is_a_valid_number() -> None:
    devices = [Device("a", 2**63 - 1, 0), Device("b", 2**63 - 1, 1)]
    cut = Partitioner().partition_graph(_traced(), _Chain(), PartitionerConfig(devices))
    assert [node.logical_device_ids for node in cut.dag.nodes] == [[0]]
    assert PartitionMode.size_based is PartitionerConfig(devices).mode

"""Check the types and values of a caller's configuration, with one-line errors.

Fields are read by name, so configurations of torch's own types work too.
"""

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from numbers import Integral, Real

from torch import nn
from torch.fx import GraphModule, Node

from fxpart.errors import nearest_names
from fxpart.torch_compat.partitioner.config import (
    ConfigError,
    Device,
    NodeLatency,
    PartitionerConfig,
    PartitionMode,
)

__all__ = [
    "check_config",
    "check_devices",
    "check_graph_module",
    "check_latency",
    "check_modules",
    "shown",
]

_MOST_BYTES = 2**63 - 1
_LEAST_RATE, _MOST_RATE = 1e-6, 1e24
_MOST_S = 1e15
_LONGEST = 60


def shown(value: object) -> str:
    """Return a short one-line form of `value` for a message."""
    text = " ".join(repr(value).split())
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return text if isinstance(value, type(None) | str | Enum) else f"{text} ({_type(value)})"


def _type(value: object) -> str:
    """Return the type of `value` with an article."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _is_whole(value: object) -> bool:
    """Return whether `value` is an integer other than True and False."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """Return whether `value` is a finite real number other than True and False."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    return math.isfinite(value)


def _lacking(value: object, kind: type) -> list[str]:
    """Return the fields of `kind` that `value` lacks."""
    return [name for name in getattr(kind, "_fields", ()) if not hasattr(value, name)]


def _check_device(device: object) -> None:
    """Refuse anything but a device with integer memory and id."""
    if _lacking(device, Device):
        raise ConfigError(
            f"config.devices holds {shown(device)}; give Device(name, available_mem_bytes,"
            " logical_id) for each"
        )
    name = shown(device.name)  # type: ignore[attr-defined]
    memory, logical_id = device.available_mem_bytes, device.logical_id  # type: ignore[attr-defined]
    if not isinstance(device.name, str):  # type: ignore[attr-defined]
        raise ConfigError(f"a device is named {name}; give a string as name")
    if not _is_whole(logical_id):
        raise ConfigError(f"device {name} has the logical id {shown(logical_id)}; give an int")
    if not _is_whole(memory):
        raise ConfigError(
            f"device {name} has {shown(memory)} as available_mem_bytes; give an int, in bytes"
        )
    if not 0 <= memory <= _MOST_BYTES:
        requirement = "not negative" if memory < 0 else f"at most {_MOST_BYTES}"
        raise ConfigError(
            f"device {name} has {memory} bytes of memory; give a number that is {requirement}"
        )


def check_devices(devices: Sequence[Device]) -> None:
    """Refuse anything but a list of one or more devices with distinct logical ids.

    Raises:
        ConfigError: if it is not, naming the fault.

    """
    if not isinstance(devices, Sequence) or isinstance(devices, str) or hasattr(devices, "_fields"):
        raise ConfigError(f"config.devices is {shown(devices)}; give a list of Device")
    if not devices:
        raise ConfigError("no devices are given; put at least one Device into config.devices")
    by_id: dict[int, Device] = {}
    for device in devices:
        _check_device(device)
        if device.logical_id in by_id:
            first_device = by_id[device.logical_id]
            raise ConfigError(
                f"devices {first_device.name!r} and {device.name!r} have the same logical id"
                f" {device.logical_id}; give each of the {len(devices)} devices its own"
            )
        by_id[device.logical_id] = device


def _check_mode(mode: object) -> None:
    """Refuse anything but a mode; given a mode's name or number, the error names the member."""
    if isinstance(mode, Enum) and mode.name in PartitionMode.__members__:
        return
    meant = {**PartitionMode.__members__, **{str(m.value): m for m in PartitionMode}}.get(str(mode))
    if meant is not None and (isinstance(mode, str) or _is_whole(mode)):
        raise ConfigError(f"mode is {shown(mode)}; give PartitionMode.{meant.name}")
    near = nearest_names(str(mode), PartitionMode.__members__)
    raise ConfigError(f"there is no mode {shown(mode)}; {near}; give a member of PartitionMode")


def _check_mapping(mapping: object, field: str, expected: str) -> None:
    """Refuse anything but a mapping."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{field} is {shown(mapping)}; give a dict of {expected}")


def _check_nodes(mapping: Mapping[Node, object], field: str) -> None:
    """Refuse keys that are not nodes."""
    wrong = next((key for key in mapping if not isinstance(key, Node)), None)
    if wrong is not None or None in mapping:
        raise ConfigError(
            f"{field} has {shown(wrong)} as a key; give nodes, from fx_module.graph.nodes"
        )


def check_latency(node: Node, latency: NodeLatency) -> None:
    """Refuse anything but a latency of finite, non-negative numbers.

    Raises:
        ConfigError: if it is not, naming the node and the value.

    """
    if _lacking(latency, NodeLatency):
        raise ConfigError(
            f"operator {node.name} has {shown(latency)} as latency; give"
            " NodeLatency(mem_latency_sec, computer_latency_sec)"
        )
    for field in NodeLatency._fields:
        value = getattr(latency, field)
        if not _is_number(value) or not 0 <= value <= _MOST_S:
            raise ConfigError(
                f"operator {node.name} has {shown(value)} as {field}; give a number of seconds"
                f" from 0 to {_MOST_S:.0e}"
            )


def _check_rate(rate: object) -> None:
    """Refuse a transfer rate that is not a number, or too small or large to divide by."""
    if not isinstance(rate, Real) or isinstance(rate, bool):
        raise ConfigError(
            f"transfer_rate_bytes_per_sec is {shown(rate)}; give a number of bytes per second"
        )
    if rate != 0 and not _LEAST_RATE <= float(rate) <= _MOST_RATE:
        raise ConfigError(
            f"transfer_rate_bytes_per_sec is {rate}; give a positive number of bytes per second,"
            f" {_LEAST_RATE:.0e} to {_MOST_RATE:.0e}"
        )


def _check_logical_ids(partition_id: object, ids: object) -> None:
    """Refuse anything but a list of distinct ids."""
    if not _is_whole(partition_id):
        raise ConfigError(
            "partition_to_logical_device_mapping has the partition"
            f" {shown(partition_id)}; give an int"
        )
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not all(map(_is_whole, ids)):
        raise ConfigError(
            f"partition_to_logical_device_mapping gives partition {partition_id} the devices"
            f" {shown(ids)}; give a list of logical ids"
        )
    twice = next((item for index, item in enumerate(ids) if item in ids[:index]), None)
    if twice is not None:
        raise ConfigError(
            f"partition_to_logical_device_mapping gives partition {partition_id} the device"
            f" {twice} more than once; give each logical id once"
        )


def _check_aot(config: PartitionerConfig) -> None:
    """Refuse mappings of partitions and devices with non-integer values."""
    field, mapping = "node_to_partition_mapping", config.node_to_partition_mapping
    _check_mapping(mapping, field, "nodes and partition ids")
    _check_nodes(mapping, field)
    for node, partition_id in mapping.items():
        if not _is_whole(partition_id) or partition_id < 0:
            raise ConfigError(
                f"{field} gives {node.name} the partition {shown(partition_id)}; give an int that"
                " is not negative"
            )
    devices_of = config.partition_to_logical_device_mapping
    _check_mapping(devices_of, "partition_to_logical_device_mapping", "partition ids and lists")
    for partition_id, ids in devices_of.items():
        _check_logical_ids(partition_id, ids)


def check_config(config: PartitionerConfig) -> None:
    """Refuse a configuration whose fields have wrong types or impossible values.

    Further requirements of a mode are checked by the mode.

    Raises:
        ConfigError: naming the field, its value, and the accepted values.

    """
    if _lacking(config, PartitionerConfig):
        raise ConfigError(f"partitioner_config is {shown(config)}; give a PartitionerConfig")
    check_devices(config.devices)
    _check_mode(config.mode)
    _check_rate(config.transfer_rate_bytes_per_sec)
    field, latencies = "node_to_latency_mapping", config.node_to_latency_mapping
    _check_mapping(latencies, field, "nodes and NodeLatency")
    _check_nodes(latencies, field)
    for node, latency in latencies.items():
        check_latency(node, latency)
    _check_aot(config)
    if not isinstance(config.saturate_host, bool):
        raise ConfigError(f"saturate_host is {shown(config.saturate_host)}; give True or False")


def check_graph_module(fx_module: GraphModule) -> None:
    """Refuse anything but a graph module.

    Raises:
        ConfigError: if it is not, naming its type.

    """
    if not isinstance(fx_module, GraphModule):
        raise ConfigError(
            f"fx_module is {_type(fx_module)}; give a GraphModule, such as"
            " torch.fx.symbolic_trace(model)"
        )


def check_modules(fx_module: GraphModule, torch_module: nn.Module) -> None:
    """Refuse anything but a graph module and a module.

    Raises:
        ConfigError: if one is of another type, naming the type.

    """
    check_graph_module(fx_module)
    if not isinstance(torch_module, nn.Module):
        raise ConfigError(
            f"torch_module is {_type(torch_module)}; give the nn.Module that was traced"
        )

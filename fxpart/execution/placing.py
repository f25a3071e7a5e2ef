"""Puts a split module on devices of this machine: its weights, and the devices that it names."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from fxpart.pipeline.flat_graph import FlatGraph

__all__ = ["name_devices", "partition_weights", "physical_devices"]


def physical_devices(device: torch.device, count: int) -> tuple[torch.device, ...]:
    """Return the device of this machine that each of `count` logical devices is.

    On CUDA, logical devices take turns on those that there are, `device` first; otherwise all are
    `device`.
    """
    if device.type != "cuda":
        return (device,) * count
    there = torch.cuda.device_count()
    first = device.index or 0
    return tuple(torch.device("cuda", (first + number) % there) for number in range(count))


def partition_weights(flat: FlatGraph) -> dict[int, list[Tensor]]:
    """Return the weights, buffers and constants that each partition uses, by its number."""
    found: dict[int, list[Tensor]] = {number: [] for number in range(flat.n_stages)}
    for node in flat.graph.find_nodes(op="get_attr"):
        value = flat.attributes[str(node.target)]
        if isinstance(value, Tensor):
            for number in dict.fromkeys(flat.stage_of.get(user) for user in node.users):
                # A guard has no partition, nor has the result.
                if number in found:
                    found[number].append(value)
    return found


def name_devices(device_of: Mapping[fx.Node, int], physical: Sequence[torch.device]) -> None:
    """Let calls that name the device of the capture, such as ``arange``, name their own.

    Args:
        device_of: logical device of each operator; the arguments of these are changed.
        physical: device of this machine that each logical device is; the capture's comes first.

    """
    for node, logical in device_of.items():
        to, source = physical[logical], physical[0]
        if to == source:
            continue

        def named(leaf: object, source: torch.device = source, to: torch.device = to) -> object:
            # "cuda" without a number is the first of them.
            if isinstance(leaf, torch.device) and leaf.type == source.type:
                return to if (leaf.index or 0) == (source.index or 0) else leaf
            return leaf

        node.args = fx.node.map_aggregate(node.args, named)  # type: ignore[arg-type]
        node.kwargs = fx.node.map_aggregate(node.kwargs, named)  # type: ignore[arg-type]

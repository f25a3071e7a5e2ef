"""Run a split module, each partition on its device, freeing each value after its last use.

A value is copied to another device once, as soon as it is computed, and stays there until its last
use there, matching the memory model of `fxpart.cost`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from fxpart.capture.live_bytes import LiveBytes
from fxpart.execution.backward_devices import BackwardDevices
from fxpart.execution.stages.flat_graph import FlatGraph, flatten

__all__ = ["SplitRun", "partition_weights", "physical_devices", "split_run"]


def physical_devices(device: torch.device, count: int) -> tuple[torch.device, ...]:
    """Return the physical device of each of `count` logical devices.

    On CUDA, logical devices take turns on the GPUs, `device` first; otherwise all are `device`.
    """
    if device.type != "cuda":
        return (device,) * count
    gpus = torch.cuda.device_count()
    first = device.index or 0
    return tuple(torch.device("cuda", (first + number) % gpus) for number in range(count))


def partition_weights(flat: FlatGraph) -> dict[int, list[Tensor]]:
    """Return the weights, buffers and constants used by each partition, by partition number."""
    weights: dict[int, list[Tensor]] = {number: [] for number in range(flat.n_stages)}
    for node in flat.graph.find_nodes(op="get_attr"):
        value = flat.attributes[str(node.target)]
        if isinstance(value, Tensor):
            for number in dict.fromkeys(flat.stage_of.get(user) for user in node.users):
                # Guards and the output have no partition.
                if number in weights:
                    weights[number].append(value)
    return weights


def _name_devices(device_of: Mapping[fx.Node, int], physical: Sequence[torch.device]) -> None:
    """Replace the capture's device in calls that name it, such as ``arange``, by their own device.

    Args:
        device_of: logical device of each operator; operators are modified in place.
        physical: physical device of each logical device; the capture's comes first.

    """
    for node, logical in device_of.items():
        to, source = physical[logical], physical[0]
        if to == source:
            continue

        def renamed(leaf: object, source: torch.device = source, to: torch.device = to) -> object:
            # "cuda" without an index is cuda:0.
            if isinstance(leaf, torch.device) and leaf.type == source.type:
                return to if (leaf.index or 0) == (source.index or 0) else leaf
            return leaf

        node.args = fx.node.map_aggregate(node.args, renamed)  # type: ignore[arg-type]
        node.kwargs = fx.node.map_aggregate(node.kwargs, renamed)  # type: ignore[arg-type]


class _Holding(NamedTuple):
    """A value in one place: at its producer, or as a copy on another device."""

    node: fx.Node
    copy_on: int | None


@dataclass(frozen=True, eq=False, slots=True)
class SplitRun:
    """A split module ready to run: the device of each operator, and the readers of its result."""

    split: fx.GraphModule
    flat: FlatGraph
    """The operators of `split` in execution order."""
    physical: tuple[torch.device, ...]
    """Physical device of each logical device."""
    weights: dict[_Holding, Any]
    """Weights and constants on each device that reads them, where they stay."""
    device_of: dict[fx.Node, int]
    """Logical device of each node; weights and inputs have none."""
    receivers: dict[fx.Node, tuple[int, ...]]
    """Other devices that read a value, in the order of their first reads."""
    last_needed: dict[fx.Node, tuple[_Holding, ...]]
    """Values whose last reader is this node."""
    needed: frozenset[_Holding]
    """All values that any node reads."""

    def inputs_read(self, inputs: Sequence[Any], n_devices: int) -> list[list[Tensor]]:
        """Return the tensors among the model's flat inputs that each logical device reads."""
        nodes = self.flat.graph.find_nodes(op="placeholder")
        pairs = list(zip(nodes, inputs, strict=True))
        return [
            [x for node, x in pairs if isinstance(x, Tensor) and d in self.receivers.get(node, ())]
            for d in range(n_devices)
        ]

    def run(
        self,
        inputs: Iterable[Any],
        counter: LiveBytes | None = None,
        backward: BackwardDevices | None = None,
    ) -> Any:  # noqa: ANN401 - what the model returns
        """Return the results of the module.

        Args:
            inputs: the model's inputs, flattened.
            counter: counts bytes on the computing device. With it, a value read by another logical
                device is copied even if both are the same physical device.
            backward: records the device of each autograd node, so that `counter` can also count a
                backward pass.

        """
        values: dict[_Holding, Any] = {}
        remaining_inputs = iter(inputs)
        for node in self.flat.graph.nodes:
            device = self.device_of.get(node)
            if node.op == "get_attr":
                continue
            if node.op == "placeholder":
                value = next(remaining_inputs)
            else:
                with _computing_on(counter, device):
                    value = self._computed(node, values, backward)
            if node.op == "output":
                return self.split.graph.process_outputs(value)
            if backward is not None and device is not None:
                backward.made(node, value, device, is_sent=node in self.receivers)
            if _Holding(node, None) in self.needed:
                values[_Holding(node, None)] = value
            copies = counter is not None and device is not None
            for receiver in self.receivers.get(node, ()):
                with _computing_on(counter, receiver):
                    values[_Holding(node, receiver)] = _sent(value, self.physical[receiver], copies)
            del value
        raise AssertionError("a graph ends with its output")

    def _computed(
        self, node: fx.Node, values: dict[_Holding, Any], backward: BackwardDevices | None
    ) -> Any:  # noqa: ANN401
        """Return the result of a node, dropping the values whose last reader it is."""

        def read(operand: fx.Node) -> Any:  # noqa: ANN401
            holding = _holding(operand, node, self.device_of)
            return self._read(holding, self.device_of.get(node), values, backward)

        args = fx.node.map_arg(node.args, read)
        kwargs = fx.node.map_arg(node.kwargs, read)
        for holding in self.last_needed.get(node, ()):
            del values[holding]
        if node.op == "output":
            return args[0]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if callable(node.target):
            return node.target(*args, **kwargs)
        return self.flat.attributes[str(node.target)](*args, **kwargs)

    def _read(
        self,
        holding: _Holding,
        reader: int | None,
        values: dict[_Holding, Any],
        backward: BackwardDevices | None,
    ) -> Any:  # noqa: ANN401
        """Return a value as device `reader` reads it."""
        if holding.node.op == "get_attr":
            weight = self.weights[holding]
            return weight if backward is None else backward.lent(weight, holding.copy_on)
        if backward is not None:
            values[holding] = backward.read(holding.node, values[holding], reader)
        return values[holding]


def split_run(
    split: fx.GraphModule,
    device_of_partition: Sequence[int],
    physical: Sequence[torch.device],
) -> SplitRun:
    """Return `split` ready to run, each partition on its logical device.

    Args:
        split: a module returned by `fxpart.split_by_assignment`.
        device_of_partition: logical device of each partition.
        physical: physical device of each logical device; the module is on the first. Weights read
            by others are copied to them; if gradients are recorded, those of the copies flow back
            to the weights.

    """
    flat = flatten(split)
    device_of: dict[fx.Node, int] = {
        node: device_of_partition[number]
        for node, number in flat.stage_of.items()
        if 0 <= number < flat.n_stages
    }
    _name_devices(device_of, physical)
    receivers: dict[fx.Node, list[int]] = defaultdict(list)
    weights: dict[_Holding, None] = {}
    last: dict[_Holding, fx.Node] = {}
    for node in flat.graph.nodes:
        for source in node.all_input_nodes:
            holding = _holding(source, node, device_of)
            if source.op == "get_attr":
                weights[holding] = None
                continue
            last[holding] = node
            if holding.copy_on is not None and holding.copy_on not in receivers[source]:
                receivers[source].append(holding.copy_on)
    last_needed: dict[fx.Node, list[_Holding]] = defaultdict(list)
    for holding, node in last.items():
        last_needed[node].append(holding)
    return SplitRun(
        split,
        flat,
        tuple(physical),
        _put_weights(flat, list(weights), physical),
        device_of,
        {node: tuple(devices) for node, devices in receivers.items()},
        {node: tuple(holdings) for node, holdings in last_needed.items()},
        frozenset(last),
    )


def _put_weights(
    flat: FlatGraph, holdings: Sequence[_Holding], physical: Sequence[torch.device]
) -> dict[_Holding, Any]:
    """Return the weights on the devices that read them; a tied weight is copied once per device."""
    copies: dict[tuple[int, torch.device], Any] = {}
    weights: dict[_Holding, Any] = {}
    for holding in holdings:
        value = flat.attributes[str(holding.node.target)]
        device = physical[holding.copy_on or 0]
        # The module keeps every attribute alive, so no ``id`` is reused.
        key = (id(value), device)
        if key not in copies:
            copies[key] = _sent(value, device, copies=False)
        weights[holding] = copies[key]
    return weights


def _holding(source: fx.Node, reader: fx.Node, device_of: dict[fx.Node, int]) -> _Holding:
    """Return the holding of `source` read by a node."""
    device = device_of.get(reader)
    return _Holding(source, None if device is None or device_of.get(source) == device else device)


def _sent(value: Any, to: torch.device, copies: bool) -> Any:  # noqa: ANN401
    """Return a value on device `to`; with `copies`, always as a new tensor."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.clone() if copies and tensor.device == to else tensor.to(to)

    return tree_map_only(Tensor, moved, value)


def _computing_on(counter: LiveBytes | None, device: int | None) -> AbstractContextManager[None]:
    return nullcontext() if counter is None or device is None else counter.on(device)

"""Runs a split module, each partition on its device, and drops what nobody needs any more.

A value is handed to another device once, as soon as it is made, and is held there until its last
use there: what `fxpart.cost` predicts the memory of.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from fxpart.execution.backward_devices import BackwardDevices
from fxpart.execution.live_bytes import LiveBytes
from fxpart.execution.stages.flat_graph import FlatGraph, flatten

__all__ = ["SplitRun", "name_devices", "partition_weights", "physical_devices", "split_run"]


# Puts a split module on devices of this machine: its weights, and the devices that it names.


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


class _Holding(NamedTuple):
    """A value where it lies: with its maker, or as a copy on another device."""

    node: fx.Node
    copy_on: int | None


@dataclass(frozen=True, eq=False, slots=True)
class SplitRun:
    """A split module ready to be run: which device computes what, and who reads it where."""

    split: fx.GraphModule
    flat: FlatGraph
    """The operators of `split` in one row, in the order in which they run."""
    physical: tuple[torch.device, ...]
    """The device of this machine that each logical device is."""
    weights: dict[_Holding, Any]
    """Weights and constants on each device that reads them; they stay there."""
    device_of: dict[fx.Node, int]
    """Logical device that computes each node; weights and what the caller gives are on none."""
    receivers: dict[fx.Node, tuple[int, ...]]
    """Other devices where a value is read, in the order of their first readers."""
    last_needed: dict[fx.Node, tuple[_Holding, ...]]
    """What a node is the last to need."""
    needed: frozenset[_Holding]
    """All that any node needs."""

    def inputs_read(self, inputs: Sequence[Any], n_devices: int) -> list[list[Tensor]]:
        """Return for each logical device those of the model's flat inputs that it reads."""
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
        """Return what the module returns.

        Args:
            inputs: the model's inputs, flattened.
            counter: told on which device is being computed. With it, a value that another logical
                device reads is copied even where both are one device of this machine.
            backward: told what autograd recorded on which device, so that `counter` can be told of
                a backward too.

        """
        held: dict[_Holding, Any] = {}
        given = iter(inputs)
        for node in self.flat.graph.nodes:
            device = self.device_of.get(node)
            if node.op == "get_attr":
                continue
            if node.op == "placeholder":
                value = next(given)
            else:
                with _computing_on(counter, device):
                    value = self._called(node, held, backward)
            if node.op == "output":
                return self.split.graph.process_outputs(value)
            if backward is not None and device is not None:
                backward.made(node, value, device, is_sent=node in self.receivers)
            if _Holding(node, None) in self.needed:
                held[_Holding(node, None)] = value
            copies = counter is not None and device is not None
            for other in self.receivers.get(node, ()):
                with _computing_on(counter, other):
                    held[_Holding(node, other)] = _brought(value, self.physical[other], copies)
            del value
        raise AssertionError("a graph ends with its output")

    def _called(
        self, node: fx.Node, held: dict[_Holding, Any], backward: BackwardDevices | None
    ) -> Any:  # noqa: ANN401
        """Return the result of a node; drop what it is the last to need."""

        def found(argument: fx.Node) -> Any:  # noqa: ANN401
            holding = _holding(argument, node, self.device_of)
            return self._read(holding, self.device_of.get(node), held, backward)

        args = fx.node.map_arg(node.args, found)
        kwargs = fx.node.map_arg(node.kwargs, found)
        for holding in self.last_needed.get(node, ()):
            del held[holding]
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
        held: dict[_Holding, Any],
        backward: BackwardDevices | None,
    ) -> Any:  # noqa: ANN401
        """Return what is held, as device `reader` gets it."""
        if holding.node.op == "get_attr":
            weight = self.weights[holding]
            return weight if backward is None else backward.lent(weight, holding.copy_on)
        if backward is not None:
            held[holding] = backward.read(holding.node, held[holding], reader)
        return held[holding]


def split_run(
    split: fx.GraphModule,
    device_of_partition: Sequence[int],
    physical: Sequence[torch.device],
) -> SplitRun:
    """Return the run in which each partition is computed by its logical device.

    Args:
        split: as `fxpart.split_by_assignment` returns it.
        device_of_partition: logical device of each partition.
        physical: the device of this machine that each logical device is; the module lies on the
            first. Weights that others read are copied to them; where gradients are recorded, those
            of the copies go back to the weights.

    """
    flat = flatten(split)
    device_of: dict[fx.Node, int] = {
        node: device_of_partition[number]
        for node, number in flat.stage_of.items()
        if 0 <= number < flat.n_stages
    }
    name_devices(device_of, physical)
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
    """Return weights where they are read; a tied one is copied once to each device."""
    copies: dict[tuple[int, torch.device], Any] = {}
    for holding in holdings:
        value = flat.attributes[str(holding.node.target)]
        to = physical[holding.copy_on or 0]
        # The module keeps every attribute alive, so that the numbers of objects are their own.
        key = (id(value), to)
        if key not in copies:
            copies[key] = _brought(value, to, copies=False)

    def put(holding: _Holding) -> Any:  # noqa: ANN401
        value = flat.attributes[str(holding.node.target)]
        return copies[id(value), physical[holding.copy_on or 0]]

    return {holding: put(holding) for holding in holdings}


def _holding(source: fx.Node, reader: fx.Node, device_of: dict[fx.Node, int]) -> _Holding:
    """Return which of the holdings of `source` a node reads."""
    here = device_of.get(reader)
    return _Holding(source, None if here is None or device_of.get(source) == here else here)


def _brought(value: Any, to: torch.device, copies: bool) -> Any:  # noqa: ANN401
    """Return a value on device `to`, as a new tensor if `copies`."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.clone() if copies and tensor.device == to else tensor.to(to)

    return tree_map_only(Tensor, moved, value)


def _computing_on(counter: LiveBytes | None, device: int | None) -> AbstractContextManager[None]:
    return nullcontext() if counter is None or device is None else counter.on(device)

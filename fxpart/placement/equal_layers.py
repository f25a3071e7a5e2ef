"""`equal_layers`: as many of a model's numbered layers on each device, as people cut by hand."""

from dataclasses import dataclass

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.module_paths import block_of
from fxpart.core.partitions import partition_by_device
from fxpart.cost.problem import Problem
from fxpart.errors import NotApplicableError, SpecError
from fxpart.placement.aot_based import refuse_overfull

__all__ = ["EqualLayersOptions", "equal_layers"]


@dataclass(frozen=True)
class EqualLayersOptions:
    """How many stages of equal layers a device has."""

    interleave: int = 1
    """Stages on each device: with c, stages 0, D, 2 D, ... of c D are on device 0, as the virtual
    stages of Megatron-LM are."""

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if self.interleave < 1:
            raise SpecError(f"mode.interleave must be at least 1, got {self.interleave}")


def equal_layers(problem: Problem, options: EqualLayersOptions | None = None) -> Assignment:
    """Return equal numbers of layers on all devices, in the order of both.

    With ``interleave`` the layers of each device are as many stages, which go round the devices.

    Layers are the modules of the longest of the outermost numbered lists, such as
    ``model.layers.0`` and so on; of a model without such a list, its operators. What comes before
    the first layer is on the first device, what comes after the last on the last. Times and sizes
    are not looked at.

    Raises:
        NotApplicableError: for fewer layers than stages on all devices, where a device has several.
        InfeasibleError: when a device has too little memory for its layers.

    """
    each = (options or EqualLayersOptions()).interleave
    graph, devices = problem.graph, problem.topology.n_devices
    layer_of, count = _layers(graph)
    if each > 1 and count < each * devices:
        raise NotApplicableError(
            f"mode.interleave={each} on {devices} devices makes {each * devices} stages, the model"
            f" has {count} layers; take mode.interleave={max(1, count // devices)}"
        )
    of_device = [_shares(size, each) for size in _shares(count, devices).tolist()]
    of_stage = np.stack(of_device, axis=1).ravel()
    of_layer = np.repeat(np.arange(each * devices) % devices, of_stage)
    placed = of_layer[layer_of][graph.forward_of]
    device_of = np.asarray(placed[graph.group], dtype=np.int64)
    cut = partition_by_device(graph, device_of)
    refuse_overfull(problem, cut, "equal_layers")
    return cut


def _shares(count: int, parts: int) -> IntArray:
    """Return how many of `count` each part has: as many, or one more in the first parts."""
    ends = -(-np.arange(parts + 1, dtype=np.int64) * count // parts)
    return np.diff(ends)


def _layers(graph: OpGraph) -> tuple[IntArray, int]:
    """Return the layer that each operator is in, or comes after, and how many there are."""
    lists: dict[str, dict[int, int]] = {}
    layers = [block_of(path).rpartition(".") for path in graph.modules]
    for prefix, _, number in layers:
        if number:
            numbered = lists.setdefault(prefix, {})
            numbered.setdefault(int(number), len(numbered))
    if not lists or max(map(len, lists.values())) < 2:
        return np.arange(graph.n_ops, dtype=np.int64), graph.n_ops
    longest = max(lists, key=lambda prefix: len(lists[prefix]))
    rank = {number: place for place, number in enumerate(sorted(lists[longest]))}
    layer_of, latest = np.zeros(graph.n_ops, dtype=np.int64), 0
    for op, (prefix, _, number) in enumerate(layers):
        if number and prefix == longest:
            latest = rank[int(number)]
        layer_of[op] = latest
    return layer_of, len(rank)

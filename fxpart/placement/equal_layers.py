"""`equal_layers`: equal numbers of a model's layers on each device, as one would split by hand."""

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
    """Options of `equal_layers`."""

    interleave: int = 1
    """Stages per device: with c, stages 0, D, 2 D, ... of c D are on device 0, like Megatron-LM's
    virtual stages."""

    def __post_init__(self) -> None:
        """Check that there is at least one stage per device."""
        if self.interleave < 1:
            raise SpecError(f"mode.interleave must be at least 1, got {self.interleave}")


def equal_layers(problem: Problem, options: EqualLayersOptions | None = None) -> Assignment:
    """Place equal numbers of layers on all devices, in order.

    With ``interleave`` the layers of each device form that many stages, assigned round-robin.

    Layers are the modules of the longest outermost numbered list (``model.layers.0`` and so on); in
    a model without such a list, they are its operators. Everything before the first layer is on the
    first device, everything after the last on the last. Times and sizes are ignored.

    Raises:
        NotApplicableError: if devices have several stages, and there are fewer layers than stages.
        InfeasibleError: if a device has too little memory for its layers.

    """
    interleave = (options or EqualLayersOptions()).interleave
    graph, devices = problem.graph, problem.topology.n_devices
    layer_of, count = _layers(graph)
    if interleave > 1 and count < interleave * devices:
        raise NotApplicableError(
            f"mode.interleave={interleave} on {devices} devices makes {interleave * devices}"
            f" stages, but the model has {count} layers; use mode.interleave="
            f"{max(1, count // devices)}"
        )
    of_device = [_shares(size, interleave) for size in _shares(count, devices).tolist()]
    of_stage = np.stack(of_device, axis=1).ravel()
    of_layer = np.repeat(np.arange(interleave * devices) % devices, of_stage)
    placed = of_layer[layer_of][graph.forward_of]
    device_of = np.asarray(placed[graph.group], dtype=np.int64)
    cut = partition_by_device(graph, device_of)
    refuse_overfull(problem, cut, "equal_layers")
    return cut


def _shares(count: int, parts: int) -> IntArray:
    """Divide `count` evenly over `parts`; the first parts may have one more."""
    ends = -(-np.arange(parts + 1, dtype=np.int64) * count // parts)
    return np.diff(ends)


def _layers(graph: OpGraph) -> tuple[IntArray, int]:
    """Return the layer of each operator (the latest one outside of layers), and their number."""
    lists: dict[str, dict[int, int]] = {}
    layers = [block_of(path).rpartition(".") for path in graph.modules]
    for prefix, _, number in layers:
        if number:
            numbered = lists.setdefault(prefix, {})
            numbered.setdefault(int(number), len(numbered))
    if not lists or max(map(len, lists.values())) < 2:
        return np.arange(graph.n_ops, dtype=np.int64), graph.n_ops
    longest = max(lists, key=lambda prefix: len(lists[prefix]))
    rank = {number: position for position, number in enumerate(sorted(lists[longest]))}
    layer_of, latest = np.zeros(graph.n_ops, dtype=np.int64), 0
    for op, (prefix, _, number) in enumerate(layers):
        if number and prefix == longest:
            latest = rank[int(number)]
        layer_of[op] = latest
    return layer_of, len(rank)

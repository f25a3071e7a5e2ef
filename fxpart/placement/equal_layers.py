"""`equal_layers`: as many of a model's numbered layers on each device, as people cut by hand."""

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.module_paths import block_of
from fxpart.core.partitions import partition_by_device
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.problem import Problem
from fxpart.placement.options import NoOptions
from fxpart.placement.size_based import size_based

__all__ = ["equal_layers"]


def equal_layers(problem: Problem, _: NoOptions | None = None) -> Assignment:
    """Return equal numbers of layers on all devices, in the order of both.

    Layers are the modules of the longest of the outermost numbered lists, such as
    ``model.layers.0`` and so on; of a model without such a list, its operators. What comes before
    the first layer is on the first device, what comes after the last on the last. Times and sizes
    are not looked at; where the layers do not fit so, what is returned is that of `size_based`.

    Raises:
        InfeasibleError: when `size_based` finds no placement either.

    """
    graph, devices = problem.graph, problem.topology.n_devices
    layer_of, count = _layers(graph)
    of_layer = np.arange(count) * devices // count
    placed = of_layer[layer_of][graph.forward_of]
    device_of = np.asarray(placed[graph.group], dtype=np.int64)
    if (peak_bytes(problem.memory, device_of, devices) > problem.topology.memory_bytes).any():
        return size_based(problem)
    return partition_by_device(graph, device_of)


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

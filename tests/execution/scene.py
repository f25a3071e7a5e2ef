"""Real models of the small presets, built once, and placements to try on them."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray, OpGraph, without_python
from fxpart.core.partitions import partition_by_device
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables
from fxpart.execution.real_model import RealModel, real_model
from tests.execution.small_presets import SMALL_PRESETS


class Shifted(nn.Linear):
    """Computes something else in eager mode than during export."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + float(not torch.compiler.is_exporting())


@cache
def small(name: str) -> RealModel:
    """Return the small version of a preset with weights, whose values are freed as in a graph."""
    real = real_model(SMALL_PRESETS[name])
    return replace(real, graph=without_python(real.graph))


def predicted_peaks(graph: OpGraph, device_of: IntArray, devices: int) -> tuple[int, ...]:
    """Return the peak of each device by the cost model."""
    return tuple(peak_bytes(memory_tables(graph), device_of, devices).tolist())


def in_a_row(graph: OpGraph, devices: int) -> Assignment:
    """Return equal numbers of operators in graph order on each device."""
    return grouped(graph, np.arange(graph.n_ops) * devices // graph.n_ops)


def at_random(graph: OpGraph, devices: int, seed: int) -> Assignment:
    """Return operators on random devices, with groups kept together."""
    return grouped(graph, np.random.default_rng(seed).integers(0, devices, graph.n_ops))


def grouped(graph: OpGraph, device_of: IntArray) -> Assignment:
    """Return the devices, with that of the first operator for each group."""
    return partition_by_device(graph, device_of.astype(np.int64)[graph.group])


def same_bits(result: Any, expected: Any) -> bool:  # noqa: ANN401 - results of any model
    """Return whether two results are bit-identical, including signs of zero and NaN."""
    leaves, expected_leaves = tree_leaves(result), tree_leaves(expected)
    return len(leaves) == len(expected_leaves) and all(map(_same_leaf, leaves, expected_leaves))


def _same_leaf(a: object, b: object) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a == b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # As bytes: integer views do not exist for every dtype and stride.
    raw = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return torch.equal(raw[0], raw[1])

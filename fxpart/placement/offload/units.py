"""`Unit`: what of a model is offloaded at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.module_paths import block_of, owner

__all__ = ["HOSTED", "RESIDENT", "STREAMED", "Unit", "units_of"]

RESIDENT, STREAMED, HOSTED = 0, 1, 2
"""What becomes of a unit: its weights stay on a device, are copied there, or used on the host."""

_DEPTHS = 3
"""Times that a unit is divided into the modules in it, at most."""


@dataclass(frozen=True, eq=False, slots=True)
class Unit:
    """What is offloaded at once: a block of the model, or a module beside the blocks.

    An operator that must stay with another is of that one's unit.
    """

    path: str
    weights: IntArray
    """Storages that no operator outside uses."""
    ops: IntArray
    """All operators of the module, whole groups of them."""
    weight_bytes: int
    largest_bytes: int
    """Weights of the largest module in it that holds some itself."""


def units_of(graph: OpGraph, most_bytes: int) -> tuple[Unit, ...]:
    """Return what may be offloaded, in graph order.

    Blocks of more than `most_bytes` are divided. Weights that several units share stay resident.
    """
    path_of = [block_of(module) or module for module in graph.modules]
    for _ in range(_DEPTHS):
        units = _units(graph, path_of)
        large = {unit.path for unit in units if unit.weight_bytes > most_bytes}
        if not large:
            break
        path_of = [
            _one_deeper(path, module) if path in large else path
            for path, module in zip(path_of, graph.modules, strict=True)
        ]
    return _units(graph, path_of)


def _one_deeper(path: str, module: str) -> str:
    return ".".join(module.split(".")[: len(path.split(".")) + 1]) if path else module


def _units(graph: OpGraph, path_of: Sequence[str]) -> tuple[Unit, ...]:
    number = {path: index for index, path in enumerate(dict.fromkeys(path_of))}
    unit_of_op = np.array([number[path] for path in path_of], dtype=np.int64)[graph.group]
    users = unit_of_op[graph.users]
    least = np.full(len(graph.weight_names), len(number), dtype=np.int64)
    most = np.full(len(graph.weight_names), -1, dtype=np.int64)
    np.minimum.at(least, graph.uses, users)
    np.maximum.at(most, graph.uses, users)
    units = []
    for path, index in number.items():
        weights = np.flatnonzero((least == index) & (most == index)).astype(np.int64)
        if len(weights):
            of_module: dict[str, int] = {}
            for weight in weights.tolist():
                module = owner(graph.weight_names[weight])
                of_module[module] = of_module.get(module, 0) + int(graph.weight_bytes[weight])
            size, ops = sum(of_module.values()), np.flatnonzero(unit_of_op == index)
            units.append(Unit(path, weights, ops, size, max(of_module.values())))
    return tuple(sorted(units, key=lambda unit: int(unit.ops[0])))

"""Which blocks of a training step are computed again for their backward, within a budget of memory.

To compute again for the least time what frees enough bytes is a knapsack problem. Blocks are taken
by time for a byte until the step fits; the same order, its last block in part, is the optimum of
the linear program, which no choice is below. Dantzig: Discrete-variable extremum problems.
Operations Research 5(2), 1957, doi:10.1287/opre.5.2.266.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import numpy as np

from fxpart.core.graph import FloatArray, OpGraph, storage_roots
from fxpart.core.module_paths import covering

__all__ = ["BlockCost", "block_costs", "chosen_blocks", "least_again_s"]

_ALIKE = 1.1
"""Blocks that differ less than by so much in their time for a byte are equal."""


@dataclass(frozen=True, slots=True)
class BlockCost:
    """What it takes, and frees, to compute a block again."""

    name: str
    again_s: float
    freed_bytes: int
    """What its forward keeps for the backward, if it is not computed again."""

    @property
    def s_per_byte(self) -> float:
        """The time for each byte that is freed."""
        return self.again_s / self.freed_bytes if self.freed_bytes else float("inf")


def block_costs(
    paths: Sequence[str],
    kept: tuple[OpGraph, FloatArray],
    again: tuple[OpGraph, FloatArray],
) -> list[BlockCost]:
    """Return what it takes, and frees, to compute each block of a step again.

    Args:
        paths: of the blocks, none within another.
        kept: the step that keeps everything, and the time of each of its operators.
        again: the step that computes all blocks again, likewise.

    """
    known = frozenset(paths)
    before_s, after_s = (_seconds(*step, known) for step in (kept, again))
    before, after = (_saved_bytes(step[0], known) for step in (kept, again))
    return [
        BlockCost(
            path,
            max(0.0, after_s.get(path, 0.0) - before_s.get(path, 0.0)),
            max(0, before.get(path, 0) - after.get(path, 0)),
        )
        for path in paths
    ]


def _seconds(graph: OpGraph, op_s: FloatArray, paths: Container[str]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for module, is_update, taken_s in zip(
        graph.modules, graph.is_update.tolist(), op_s.tolist(), strict=True
    ):
        if not is_update and (path := covering(module, paths)):
            seconds[path] = seconds.get(path, 0.0) + taken_s
    return seconds


def _saved_bytes(graph: OpGraph, paths: Container[str]) -> dict[str, int]:
    """Return the bytes that the forward of each block makes and the backward reads."""
    root = storage_roots(graph)
    last = np.zeros(graph.n_values, dtype=np.int64)
    np.maximum.at(last, root[graph.reads], graph.readers)
    maker = graph.value_producer
    crosses = (maker >= 0) & (maker < graph.first_backward) & (last >= graph.first_backward)
    saved: dict[str, int] = {}
    for value in np.flatnonzero(crosses & (root == np.arange(graph.n_values))).tolist():
        if path := covering(graph.modules[maker[value]], paths):
            saved[path] = saved.get(path, 0) + int(graph.value_alloc_bytes[value])
    return saved


def chosen_blocks(
    blocks: Sequence[BlockCost], fits: Callable[[Sequence[str]], bool]
) -> tuple[str, ...]:
    """Return the blocks to compute again, in the order of the model: few, of least time for a byte.

    Args:
        blocks: all that can be.
        fits: whether a step that computes these again fits; it does with all of them.

    """
    order = [block.name for block in _by_time_per_byte(blocks)]
    too_few, enough = 0, len(order)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if fits(order[:middle]):
            enough = middle
        else:
            too_few = middle
    taken = set(order[:enough])
    return tuple(block.name for block in blocks if block.name in taken)


def _by_time_per_byte(blocks: Sequence[BlockCost]) -> list[BlockCost]:
    """Return the blocks in the order in which they are taken; of nearly equal ones earlier first.

    When the backward begins all is kept, and its first blocks, the model's last, are made again
    right then: those free the least of the peak.
    """
    order: list[BlockCost] = []
    alike: list[BlockCost] = []
    position = {block.name: number for number, block in enumerate(blocks)}
    for block in sorted(blocks, key=lambda block: block.s_per_byte):
        if alike and block.s_per_byte > _ALIKE * alike[0].s_per_byte:
            order += sorted(alike, key=lambda block: position[block.name])
            alike = []
        alike.append(block)
    return order + sorted(alike, key=lambda block: position[block.name])


def least_again_s(blocks: Sequence[BlockCost], missing_bytes: int) -> float:
    """Return the time that no choice of blocks that frees `missing_bytes` is below.

    Infinite where all of them do not free as much.
    """
    least_s, left = 0.0, missing_bytes
    for block in sorted(blocks, key=lambda block: block.s_per_byte):
        if left <= 0:
            return least_s
        if block.freed_bytes:
            least_s += block.again_s * min(1.0, left / block.freed_bytes)
        left -= block.freed_bytes
    return least_s if left <= 0 else float("inf")

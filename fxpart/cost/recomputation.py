"""Choose the blocks of a training step to recompute in the backward, within a memory budget.

Freeing enough bytes in the least time is a knapsack problem. Blocks are taken in order of time per
byte until the step fits. The same order with a fractional last block is the optimum of the linear
relaxation, a lower bound. Dantzig: Discrete-variable extremum problems. Operations Research 5(2),
1957, doi:10.1287/opre.5.2.266.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import numpy as np

from fxpart.core.graph import FloatArray, OpGraph, storage_roots
from fxpart.core.module_paths import covering

__all__ = ["BlockCost", "block_costs", "chosen_blocks", "least_again_s"]

_ALIKE = 1.1
"""Factor within which times per byte count as equal."""


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Cost and gain of recomputing a block."""

    name: str
    again_s: float
    freed_bytes: int
    """Activations that its forward saves for the backward unless it is recomputed."""

    @property
    def s_per_byte(self) -> float:
        """Time per freed byte."""
        return self.again_s / self.freed_bytes if self.freed_bytes else float("inf")


def block_costs(
    paths: Sequence[str],
    saved: tuple[OpGraph, FloatArray],
    recomputed: tuple[OpGraph, FloatArray],
) -> list[BlockCost]:
    """Return the cost and gain of recomputing each block of a step.

    Args:
        paths: paths of the blocks, none inside another.
        saved: the step without recomputation, and the time of each of its operators.
        recomputed: the step that recomputes all blocks, likewise.

    """
    known = frozenset(paths)
    before_s, after_s = (_seconds(*step, known) for step in (saved, recomputed))
    before, after = (_saved_bytes(step[0], known) for step in (saved, recomputed))
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
    """Return the bytes produced by the forward of each block and read by the backward."""
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
    """Return the blocks to recompute, in model order: the fewest by time per byte that suffice.

    Args:
        blocks: all candidates.
        fits: whether a step that recomputes the given blocks fits; it must with all of them.

    """
    order = [block.name for block in _by_time_per_byte(blocks)]
    too_few, enough = 0, len(order)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if fits(order[:middle]):
            enough = middle
        else:
            too_few = middle
    chosen = set(order[:enough])
    return tuple(block.name for block in blocks if block.name in chosen)


def _by_time_per_byte(blocks: Sequence[BlockCost]) -> list[BlockCost]:
    """Return the blocks in the order in which they are taken; near ties go to earlier blocks.

    When the backward begins everything is live, and the model's last blocks are recomputed right
    then, so these reduce the peak least.
    """
    order: list[BlockCost] = []
    near_ties: list[BlockCost] = []
    position = {block.name: number for number, block in enumerate(blocks)}
    for block in sorted(blocks, key=lambda block: block.s_per_byte):
        if near_ties and block.s_per_byte > _ALIKE * near_ties[0].s_per_byte:
            order += sorted(near_ties, key=lambda block: position[block.name])
            near_ties = []
        near_ties.append(block)
    return order + sorted(near_ties, key=lambda block: position[block.name])


def least_again_s(blocks: Sequence[BlockCost], missing_bytes: int) -> float:
    """Return a lower bound of the time to free `missing_bytes` by recomputing blocks.

    Infinite if all of them together free less.
    """
    least_s, remaining_bytes = 0.0, missing_bytes
    for block in sorted(blocks, key=lambda block: block.s_per_byte):
        if remaining_bytes <= 0:
            return least_s
        if block.freed_bytes:
            least_s += block.again_s * min(1.0, remaining_bytes / block.freed_bytes)
        remaining_bytes -= block.freed_bytes
    return least_s if remaining_bytes <= 0 else float("inf")

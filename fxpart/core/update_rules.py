"""State, temporaries and memory traffic of a weight update, by optimizer and implementation.

The numbers follow torch.optim (as of torch 2.13) from the second step on, without amsgrad,
nesterov, maximize, or weight decay added to the gradient.
"""

from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray

__all__ = [
    "FUSED",
    "MASTER_ITEMSIZE",
    "PASSES",
    "Sizes",
    "UpdateRule",
    "cast_moved_bytes",
    "moved_bytes",
    "scratch_bytes",
    "state_tensors",
]

MASTER_ITEMSIZE = 4
"""Bytes per element of a float32 master weight."""
_STEP_BYTES = 4
"""Size of Adam's float32 step counter of each weight. Unless fused or capturable it is in host
memory, but it is counted with the weight regardless."""


class UpdateRule(NamedTuple):
    """One optimizer's state and traffic, in elements per element of a weight."""

    states: int
    """Number of state tensors as large as the weight."""
    counts_steps: bool
    """Whether there is a step counter as well."""
    gradient_moves: int
    """Number of reads of the gradient."""
    weight_moves: int
    """Number of reads and writes of the weight."""
    state_moves: int
    """Reads and writes of all states together."""
    scratch_moves: int = 0
    """Reads and writes of temporaries."""

    @property
    def has_scratch(self) -> bool:
        """Whether temporaries as large as a state are allocated."""
        return self.scratch_moves > 0


PASSES: dict[str, UpdateRule] = {
    # One pass: the gradient is added to the weight.
    "sgd": UpdateRule(0, False, 1, 2, 0),
    # Scale the buffer, add the gradient to it, add the buffer to the weight.
    "momentum": UpdateRule(1, False, 1, 2, 5),
    # Lerp the first moment towards the gradient; scale the second and add the square; take its
    # root, scale it, add epsilon; add the quotient of the first moment and that to the weight.
    "adam": UpdateRule(2, True, 2, 2, 8, 6),
    # The same, after scaling the weight by its decay.
    "adamw": UpdateRule(2, True, 2, 4, 8, 6),
}
"""Rules of ``for_loop`` and ``foreach`` by name: every operation is a pass over memory."""

FUSED: dict[str, UpdateRule] = {
    "sgd": UpdateRule(0, False, 1, 2, 0),
    "momentum": UpdateRule(1, False, 1, 2, 2),
    "adam": UpdateRule(2, True, 1, 2, 4),
    "adamw": UpdateRule(2, True, 1, 2, 4),
}
"""Rules of ``fused`` by name: one pass reads everything once and writes weight and states once."""


class Sizes(NamedTuple):
    """The updated weights, in order. Length G each."""

    numbers: IntArray
    """Number of elements."""
    itemsize: IntArray
    """Bytes per element of the weight and its gradient."""
    state_itemsize: IntArray
    """Bytes per element of a state."""
    has_master: IntArray
    """1 if a float32 master copy is updated and then written back to the weight, else 0."""


def state_tensors(rule: UpdateRule, sizes: Sizes) -> list[IntArray]:
    """Return the bytes of each tensor of a weight's state: moments, master copy, step counter.

    Length G each.
    """
    tensor_bytes = [sizes.numbers * sizes.state_itemsize] * rule.states
    if sizes.has_master.any():
        tensor_bytes.append(sizes.numbers * sizes.has_master * MASTER_ITEMSIZE)
    if rule.counts_steps:
        tensor_bytes.append(np.full(len(sizes.numbers), _STEP_BYTES, dtype=np.int64))
    return tensor_bytes


def scratch_bytes(rule: UpdateRule, sizes: Sizes, *, at_once: bool) -> IntArray:
    """Return the bytes of each update's temporaries. Length G.

    For Adam this is the divisor of the update, as large as a state. With `at_once` those of all
    weights are live together. Otherwise each is made in two steps and freed when that of the next
    weight is made, so an update holds two plus the one of the previous weight.
    """
    tensor_bytes = sizes.numbers * sizes.state_itemsize * rule.has_scratch
    if at_once:
        return tensor_bytes
    scratch: IntArray = 2 * tensor_bytes
    scratch[1:] += tensor_bytes[:-1]
    return scratch


def moved_bytes(rule: UpdateRule, sizes: Sizes) -> IntArray:
    """Return the bytes that each update reads and writes. Length G."""
    updated_itemsize = np.where(sizes.has_master > 0, MASTER_ITEMSIZE, sizes.itemsize)
    bytes_per_element = (rule.gradient_moves + rule.weight_moves) * updated_itemsize
    bytes_per_element += (rule.state_moves + rule.scratch_moves) * sizes.state_itemsize
    # The master copy is read, and the weight written.
    bytes_per_element += sizes.has_master * (MASTER_ITEMSIZE + sizes.itemsize)
    moved: IntArray = sizes.numbers * bytes_per_element
    return moved


def cast_moved_bytes(sizes: Sizes) -> IntArray:
    """Return the bytes moved by casting each gradient to float32. Length G."""
    moved: IntArray = sizes.numbers * (sizes.itemsize + MASTER_ITEMSIZE)
    return moved

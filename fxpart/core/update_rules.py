"""What one update of a weight keeps, allocates and moves, by optimizer and implementation.

Read off what torch.optim does (as of torch 2.13) from the second step on, without amsgrad,
nesterov, maximize, and weight decay that is added to the gradient.
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
"""Bytes of one number of a float32 copy of a weight."""
_STEP_BYTES = 4
"""Of the float32 number of steps that Adam keeps for each weight. Where neither fused nor
capturable, it lies in the host's memory; it is counted where the weight lies all the same."""


class UpdateRule(NamedTuple):
    """One optimizer, in numbers for each number of a weight."""

    states: int
    """Tensors as large as the weight that are kept."""
    counts_steps: bool
    """Whether a number of steps is kept beside them."""
    gradient_moves: int
    """How often the gradient is read."""
    weight_moves: int
    """How often the weight is read or written."""
    state_moves: int
    """The same of all its states together."""
    scratch_moves: int = 0
    """The same of tensors that are made and given back."""

    @property
    def has_scratch(self) -> bool:
        """Whether tensors as large as a state are made and given back."""
        return self.scratch_moves > 0


PASSES: dict[str, UpdateRule] = {
    # One pass: the gradient is added to the weight.
    "sgd": UpdateRule(0, False, 1, 2, 0),
    # The buffer shrinks, the gradient is added to it, and it to the weight.
    "momentum": UpdateRule(1, False, 1, 2, 5),
    # The first moment moves to the gradient; the second shrinks and the square is added; its root,
    # that scaled, that plus epsilon; the weight moves by the first moment over it.
    "adam": UpdateRule(2, True, 2, 2, 8, 6),
    # The same, after the weight has shrunk by its decay.
    "adamw": UpdateRule(2, True, 2, 4, 8, 6),
}
"""By name, where every operation is a pass over memory: of one weight, or of all in a list."""

FUSED: dict[str, UpdateRule] = {
    "sgd": UpdateRule(0, False, 1, 2, 0),
    "momentum": UpdateRule(1, False, 1, 2, 2),
    "adam": UpdateRule(2, True, 1, 2, 4),
    "adamw": UpdateRule(2, True, 1, 2, 4),
}
"""By name, where one pass does it all: everything is read once, weight and states written once."""


class Sizes(NamedTuple):
    """The weights that are updated, in order. Length G each."""

    numbers: IntArray
    """How many numbers each has."""
    itemsize: IntArray
    """Bytes of a number of the weight, and of its gradient."""
    state_itemsize: IntArray
    """Bytes of a number of a state."""
    has_master: IntArray
    """1 where a float32 copy of the weight is updated and then written to it, else 0."""


def state_tensors(rule: UpdateRule, sizes: Sizes) -> list[IntArray]:
    """Return the bytes of each tensor kept for a weight: states, copy, count of steps.

    Length G each.
    """
    tensor_bytes = [sizes.numbers * sizes.state_itemsize] * rule.states
    if sizes.has_master.any():
        tensor_bytes.append(sizes.numbers * sizes.has_master * MASTER_ITEMSIZE)
    if rule.counts_steps:
        tensor_bytes.append(np.full(len(sizes.numbers), _STEP_BYTES, dtype=np.int64))
    return tensor_bytes


def scratch_bytes(rule: UpdateRule, sizes: Sizes, *, at_once: bool) -> IntArray:
    """Return what each update allocates and gives back. Length G.

    Of Adam, the divisor of the update, a tensor as large as a state. With `at_once` those of all
    weights are there together. Else each is made in two steps, and given back when that of the next
    weight is made: an update holds two, and that of the weight before it.
    """
    each = sizes.numbers * sizes.state_itemsize * rule.has_scratch
    if at_once:
        return each
    scratch: IntArray = 2 * each
    scratch[1:] += each[:-1]
    return scratch


def moved_bytes(rule: UpdateRule, sizes: Sizes) -> IntArray:
    """Return what each update reads and writes. Length G."""
    updated = np.where(sizes.has_master > 0, MASTER_ITEMSIZE, sizes.itemsize)
    each = (rule.gradient_moves + rule.weight_moves) * updated
    each += (rule.state_moves + rule.scratch_moves) * sizes.state_itemsize
    # The copy is read, and the weight written.
    each += sizes.has_master * (MASTER_ITEMSIZE + sizes.itemsize)
    moved: IntArray = sizes.numbers * each
    return moved


def cast_moved_bytes(sizes: Sizes) -> IntArray:
    """Return what casting each gradient to float32 reads and writes. Length G."""
    moved: IntArray = sizes.numbers * (sizes.itemsize + MASTER_ITEMSIZE)
    return moved

"""Outcomes of runs (results, loss and gradients), and the agreement of two of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fxpart.capture.training.loss import training_loss
from fxpart.execution.difference import (
    gradient_share,
    loss_share,
    max_difference,
    nan_elements,
    refuse_more,
    result_share,
    rounding,
)
from fxpart.execution.real_model import RealModel
from fxpart.execution.stage_shell import mutated_inputs

__all__ = ["Outcome", "agreement", "step_outcome", "trained_parameters", "undoable"]


@dataclass(frozen=True, eq=False, slots=True)
class Outcome:
    """Results of a forward, or loss and gradients of a training step."""

    results: Any
    """Detached results of the model; None if a training step dropped them."""
    loss: Tensor | None
    """None without training."""
    gradients: Mapping[str, Tensor] | None
    """By parameter, omitting those the loss does not depend on. None without training."""

    @property
    def nan_elements(self) -> int:
        """Number of NaN in the results, the loss and the gradients."""
        return nan_elements((self.results, self.loss, list((self.gradients or {}).values())))


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, each once under its first name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def step_outcome(
    forward: Callable[[], Any],
    parameters: Mapping[str, nn.Parameter],
    *,
    keep_results: bool = False,
    loss_of: Callable[[Sequence[Tensor]], Tensor] = training_loss,
) -> Outcome:
    """Return the outcome of a training step: `forward`, loss, and gradients of `parameters`.

    Leaves the ``grad`` of every parameter unchanged.

    Args:
        forward: returns the model's results, which are dropped before the backward.
        parameters: the parameters to differentiate.
        keep_results: whether to keep the results, detached.
        loss_of: returns the loss of the flattened results.

    Raises:
        SpecError: if no result can have a loss.

    """
    with torch.enable_grad():
        results = forward()
        loss = loss_of([leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)])
        detached_results = tree_map_only(Tensor, Tensor.detach, results) if keep_results else None
        del results
        # Not `backward`, which would accumulate into the ``grad`` of the caller's weights.
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    pairs = zip(parameters, gradients, strict=True)
    return Outcome(detached_results, loss.detach(), {name: g for name, g in pairs if g is not None})


def agreement(outcome: Outcome, reference: Outcome) -> tuple[float, float | None]:
    """Return the differences of results and loss, and of gradients, from the unsplit model's.

    Results dropped by `outcome` are not compared. Gradients are compared by `gradient_share`; None
    without training.

    Raises:
        ExecutionError: if either difference exceeds what reordering sums may cause.

    """
    with_results = outcome.results is not None or reference.loss is None
    computed = (outcome.results, outcome.loss) if with_results else outcome.loss
    expected = (reference.results, reference.loss) if with_results else reference.loss
    difference = max_difference(computed, expected)
    results = reference.results if with_results else None
    share = result_share(outcome.results, results) if with_results else 0.0
    if reference.loss is not None and outcome.loss is not None:
        of_loss = loss_share(float(outcome.loss), float(reference.loss), tree_leaves(results))
        share = max(share, of_loss)
    elif math.isinf(difference):
        share = difference  # one of the two has a loss
    refuse_more("results", share, rounding(expected))
    if reference.gradients is None:
        return difference, None
    share = gradient_share(outcome.gradients or {}, reference.gradients)
    allowed = rounding(list(reference.gradients.values()))
    refuse_more("gradients", share, allowed)
    return difference, share


def undoable(
    real: RealModel, whole: fx.GraphModule, run: Callable[[], Outcome]
) -> tuple[Outcome, Callable[[], None]]:
    """Return the outcome of a run of the module, and a function that undoes the writes of runs.

    Runs write into inputs, such as a cache, and into buffers. Only tensors that this run changed
    are saved, since later runs change the same ones; a buffer made by ``expand`` cannot be written.
    """
    inputs = tree_leaves((real.args, real.kwargs))
    tensors = [*(inputs[position] for position in mutated_inputs(whole)), *real.module.buffers()]
    shared = {id(tensor) for tensor in tensors}
    # The program shares the module's buffers, except for a few of its own.
    private = [buffer for buffer in whole.buffers() if id(buffer) not in shared]
    # Copied to the host, where they do not count in a GPU's peak.
    snapshots = [(tensor, tensor.to("cpu", copy=True)) for tensor in (*tensors, *private)]
    outcome = run()
    written = [
        (tensor, values)
        for tensor, values in snapshots
        if id(tensor) not in shared or not _is_same(tensor, values)
    ]
    del snapshots

    def restore() -> None:
        for tensor, values in written:
            tensor.copy_(values)

    return outcome, restore


def _is_same(tensor: Tensor, values: Tensor) -> bool:
    with suppress(NotImplementedError):  # raised for sparse tensors, which count as written
        return torch.equal(tensor.cpu(), values)
    return False

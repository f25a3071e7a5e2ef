"""What one run of a model gives: its results or, of a training step, loss and gradients too."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fxpart.execution.difference import (
    gradient_share,
    largest_magnitude,
    max_difference,
    refuse_more,
    rounding,
)
from fxpart.execution.training_loss import training_loss

__all__ = ["Outcome", "agreement", "forward_outcome", "step_outcome", "trained_parameters"]


@dataclass(frozen=True, eq=False, slots=True)
class Outcome:
    """Results of a forward; of a training step its loss and gradients."""

    results: Any
    """What the model returns, detached; None when a training step did not keep them."""
    loss: Tensor | None
    """None without training."""
    gradients: Mapping[str, Tensor] | None
    """By parameter; one that the loss does not depend on is not there. None without training."""


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a step has gradients of, each once, by its first name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def forward_outcome(forward: Callable[[], Any]) -> Outcome:
    """Return what `forward` returns; the mode of autograd is the caller's."""
    return Outcome(forward(), None, None)


def step_outcome(
    forward: Callable[[], Any],
    parameters: Mapping[str, nn.Parameter],
    *,
    keep_results: bool = False,
    loss_of: Callable[[Sequence[Tensor]], Tensor] = training_loss,
) -> Outcome:
    """Return a training step: `forward`, loss, and gradients of `parameters`.

    The ``grad`` of every parameter stays as it is.

    Args:
        forward: returns the model's results; they are dropped before the backward.
        parameters: what gradients are taken of.
        keep_results: keep them, detached.
        loss_of: returns the loss of the results, flat.

    Raises:
        SpecError: when the model returns nothing to take a loss of.

    """
    with torch.enable_grad():
        results = forward()
        loss = loss_of([leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)])
        kept = tree_map_only(Tensor, Tensor.detach, results) if keep_results else None
        del results
        # Not `backward`, which would add to the gradients that the caller's weights have.
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    pairs = zip(parameters, found, strict=True)
    return Outcome(kept, loss.detach(), {name: g for name, g in pairs if g is not None})


def agreement(mine: Outcome, reference: Outcome) -> tuple[float, float | None]:
    """Return how far results and loss, and gradients, of a split model are from the unsplit one's.

    Results that `mine` did not keep are not compared. Gradients: see `gradient_share`; None without
    training.

    Raises:
        ExecutionError: when either is more than sums in another order may be apart.

    """
    whole = mine.results is not None or reference.loss is None
    got = (mine.results, mine.loss) if whole else mine.loss
    wanted = (reference.results, reference.loss) if whole else reference.loss
    differs = max_difference(got, wanted)
    refuse_more("results", differs, rounding(wanted) * largest_magnitude(wanted))
    if reference.gradients is None:
        return differs, None
    share = gradient_share(mine.gradients or {}, reference.gradients)
    refuse_more(
        "gradients",
        share,
        rounding(list(reference.gradients.values())),
        " of their largest element",
    )
    return differs, share

"""How far what the stages of a pipeline computed is from what the unsplit model computes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fxpart.execution.difference import (
    gradient_share,
    largest_magnitude,
    max_difference,
    refuse_more,
    rounding,
)
from fxpart.execution.pipeline_job import gradient_key, output_key
from fxpart.execution.unsplit_reference import Reference
from fxpart.pipeline.one_parameter import tied_parameters

if TYPE_CHECKING:
    from fxpart.pipeline.chain import Chain

__all__ = [
    "gradient_differences",
    "loss_difference",
    "output_difference",
    "refuse_other_results",
]


def output_difference(computed: Mapping[str, Tensor], expected: Reference) -> float:
    """Return the largest difference of any result; see `max_difference`.

    Args:
        computed: what the last stage wrote, on the CPU.
        expected: of the same microbatches.

    """
    there = [
        tuple(computed[output_key(m, i)] for i in range(len(results)))
        for m, results in enumerate(expected.outputs)
    ]
    return max_difference(there, [tuple(t.cpu() for t in results) for results in expected.outputs])


def loss_difference(losses: Sequence[float], expected: Reference) -> float:
    """Return the largest difference of any microbatch's loss; see `max_difference`."""
    # As tensors: of plain numbers, it is only asked whether they are equal.
    return max_difference(
        torch.tensor(losses, dtype=torch.float64),
        torch.tensor(expected.losses, dtype=torch.float64),
    )


def gradient_differences(
    chain: "Chain", computed: Sequence[Mapping[str, Tensor]], expected: Reference
) -> tuple[float, float | None]:
    """Return how far gradients are off: of weights of one stage, and of those that several have.

    See `gradient_share`. A gradient that only one of both has is held against zeros: a stage adds
    up what other stages have of a weight, also where it has none itself.

    Args:
        chain: the stages.
        computed: what each stage wrote, on the CPU.
        expected: of the same microbatches.

    Returns:
        Of the second, None where no weight that is in several stages has a gradient.

    """
    shared = {
        name
        for group in tied_parameters(chain)
        if len({stage for stage, _ in group}) > 1
        for name in group
    }
    # Of weights that are in several stages, or not: gradients found, and wanted.
    kinds: dict[bool, tuple[dict[str, Tensor], dict[str, Tensor]]]
    kinds = {False: ({}, {}), True: ({}, {})}
    for stage in chain.stages:
        for name, parameter in stage.module.named_parameters(remove_duplicate=False):
            at = (stage.index, name)
            found = computed[stage.index].get(gradient_key(name))
            wanted = expected.gradients.get(at)
            present = wanted if found is None else found
            if present is None or not parameter.requires_grad:
                continue
            zeros = torch.zeros_like(present.to_dense(), device="cpu")
            all_found, all_wanted = kinds[at in shared]
            all_found[f"{stage.index}.{name}"] = zeros if found is None else found
            all_wanted[f"{stage.index}.{name}"] = zeros if wanted is None else wanted.cpu()
    tied = gradient_share(*kinds[True]) if kinds[True][0] else None
    return gradient_share(*kinds[False]), tied


def refuse_other_results(
    results_apart: float, gradients_apart: float | None, expected: Reference
) -> None:
    """Refuse what is further from the unsplit model than sums in another order may be.

    Args:
        results_apart: largest difference of a result, or of the loss of a training step: that is
            one of the results, or the mean of one, and so no larger.
        gradients_apart: largest difference of a gradient, as a share of its largest element; None
            without training.
        expected: of the same microbatches.

    Raises:
        ExecutionError: when results, loss or gradients are too far apart.

    """
    wanted = expected.outputs
    refuse_more("results", results_apart, rounding(wanted) * largest_magnitude(wanted))
    if gradients_apart is not None:
        allowed = rounding(list(expected.gradients.values()))
        refuse_more("gradients", gradients_apart, allowed, " of their largest element")

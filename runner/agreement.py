"""Whether the stages of a pipeline computed what the unsplit model does."""

from typing import TYPE_CHECKING

from fxpart.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fxpart.pipeline.chain import Chain

__all__ = ["refuse_other_results"]


def refuse_other_results(
    chain: "Chain",
    microbatches: "Sequence[tuple[Tensor, ...]]",
    results_apart: float,
    gradients_apart: float | None,
    *,
    threads: int,
) -> None:
    """Refuse what is further from the unsplit model than sums in another order may be.

    The rule is that of `fxpart.execution.outcome.agreement`.

    Args:
        chain: the stages, in this process.
        microbatches: that were run, for each the inputs of stage 0.
        results_apart: largest difference of a result, or of the loss of a training step.
        gradients_apart: largest difference of a gradient, as a share of its largest element; None
            without training.
        threads: that torch computes with.

    Raises:
        ExecutionError: when results, loss or gradients are too far apart.

    """
    from fxpart.execution.difference import largest_magnitude, rounding
    from fxpart.execution.unsplit_reference import reference

    if results_apart > 0:
        # How large the results are is asked for only where they are not equal: it takes a pass
        # forward. A loss is one of the results, or the mean of one: no larger.
        wanted = reference(chain, microbatches, training=False, threads=threads).outputs
        _refuse("results", results_apart, rounding(wanted) * largest_magnitude(wanted))
    if gradients_apart:
        weights = [weight for stage in chain.stages for weight in stage.module.parameters()]
        _refuse("gradients", gradients_apart, rounding(weights), " of their largest element")


def _refuse(what: str, apart: float, allowed: float, of: str = "") -> None:
    if apart > allowed:
        raise ExecutionError(
            f"the pipeline's {what} are {apart:.3g}{of} from the unsplit model's, more than the"
            f" {allowed:.3g} of rounding; a call that depends on chance or on what ran before it"
            " cannot be split: take it out of the model"
        )

"""The most that a device of a pipeline holds at any time of a step."""

from collections.abc import Sequence

from fxpart.schedule.costs import StageCost
from fxpart.schedule.orders import Action

__all__ = ["row_peak_bytes"]


def row_peak_bytes(costs: Sequence[StageCost], row: Sequence[Action], microbatches: int) -> int:
    """Return the most that a device holds while it runs the actions of `row`, then its updates.

    `costs` are of all stages of the pipeline.
    """
    mine = dict.fromkeys(action.stage for action in row)
    held = sum(costs[s].weight_bytes + microbatches * costs[s].input_bytes for s in mine)
    peak, has_gradient = held, set[int]()
    for kind, _, stage in row:
        cost = costs[stage]
        if kind == "F":
            peak = max(peak, held + cost.forward_peak_bytes)
            held += cost.saved_bytes + cost.output_bytes
            continue
        # What the micro-batch saved is part of the backward's peak.
        held -= cost.saved_bytes
        if stage in has_gradient:
            peak = max(peak, held + cost.backward_peak_bytes)
        else:
            peak = max(peak, held + cost.first_backward_peak_bytes)
            held += cost.gradient_bytes
            has_gradient.add(stage)
    for stage in mine:
        peak = max(peak, held + costs[stage].update_peak_bytes)
        held += costs[stage].update_kept_bytes
    return peak

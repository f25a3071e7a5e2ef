"""Which devices a pipeline is on, and what each of them runs in a step."""

from collections.abc import Sequence

from fxpart.errors import SpecError
from fxpart.schedule.costs import PipelineCosts, StageLink
from fxpart.schedule.orders import Action, ordered_actions

__all__ = ["device_rows"]


def device_rows(
    name: str, costs: PipelineCosts, microbatches: int
) -> tuple[tuple[int, ...], tuple[tuple[Action, ...], ...]]:
    """Return the devices in the order of their first stages, and what each runs, in order.

    Raises:
        SpecError: for a schedule, stages, links or micro-batches that do not go together.

    """
    homes = [stage.device for stage in costs.stages]
    devices = tuple(dict.fromkeys(homes))
    _refuse_other_than_turns(homes, devices)
    for link in costs.links:
        _refuse_astray(link, len(homes))
    chunks = len(homes) // len(devices)
    rows = ordered_actions(name, len(devices), chunks, microbatches, training=costs.training)
    return devices, rows


def _refuse_other_than_turns(homes: Sequence[int], devices: Sequence[int]) -> None:
    if not homes:
        raise SpecError("a schedule needs stages, got none; place the model with mode=pipeline")
    taken = [devices[stage % len(devices)] for stage in range(len(homes))]
    if homes != taken or len(homes) % len(devices):
        shown = ", ".join(map(str, homes[:12])) + (", ..." if homes[12:] else "")
        raise SpecError(
            f"a schedule needs stages that go over the {len(devices)} devices in turn, equally many"
            f" on each; they are on devices {shown}; place the model with mode=pipeline"
        )


def _refuse_astray(link: StageLink, stages: int) -> None:
    there = min(link.source, link.target) >= 0 and max(link.source, link.target) < stages
    forward = link.kind == "F" and link.source < link.target
    backward = link.kind == "B" and link.source > link.target
    if not there or not (forward or backward):
        raise SpecError(
            f"a link of kind {link.kind} from stage {link.source} to {link.target} of"
            f" {stages} leads nowhere; F goes to a later stage, B to an earlier one"
        )

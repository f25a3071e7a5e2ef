"""Inputs that every simulation refuses: stages that are no pipeline, and a deadlocked order."""

from collections.abc import Sequence

from fxpart.schedule import Action, PipelineCosts, StageCost, StageLink

NO_PIPELINES: list[tuple[list[int], list[StageLink], str]] = [
    ([], [], "needs stages, got none"),
    ([0, 1, 1], [], "in turn, with the same number on each; they are on devices 0, 1, 1"),
    ([0, 1, 0], [], "they are on devices 0, 1, 0"),
    ([0, 1], [StageLink("F", 1, 0, 1, 1.0)], "kind F from stage 1 to 0 of 2 leads nowhere"),
    ([0, 1], [StageLink("B", 0, 1, 1, 1.0)], "kind B from stage 0 to 1"),
    ([0, 1], [StageLink("F", 1, 2, 1, 1.0)], "kind F from stage 1 to 2 of 2"),
    ([0, 1], [StageLink("W", 0, 1, 1, 1.0)], "kind W"),
]
"""Devices of the stages, links, and the error message."""


def no_pipeline(homes: Sequence[int], links: Sequence[StageLink]) -> PipelineCosts:
    """Return the costs of one of `NO_PIPELINES`, with a second for each stage."""
    stages = tuple(StageCost(device, 1.0) for device in homes)
    return PipelineCosts(stages, tuple(links), training=False)


def stuck_order(device: int, devices: int, chunks: int, microbatches: int) -> list[Action]:
    """Return the first device's forward, and on all others a backward before the forward.

    With two devices and one micro-batch, one of the four actions runs: F0, the forward of stage 0.
    """
    assert (chunks, microbatches) == (1, 1)
    kinds = "FB" if device == 0 else "BF"
    return [Action(kind, 0, device) for kind in kinds]

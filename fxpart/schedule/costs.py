"""What one micro-batch costs each stage of a pipeline, and what passes between stages."""

import math
from dataclasses import dataclass, replace

from fxpart.errors import SpecError
from fxpart.schedule.stage_shards import Gathered, StageShards, stage_needs

__all__ = ["PipelineCosts", "StageCost", "StageLink"]


def _refuse_no_time(what: str, time_s: float) -> None:
    if not 0 <= time_s < math.inf:
        raise SpecError(f"{what} must be finite and at least 0, got {time_s}")


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage. Bytes are of one micro-batch where nothing else is said."""

    device: int
    """Logical id of the device that the stage is on."""
    forward_s: float
    backward_s: float = 0.0
    weight_bytes: int = 0
    """Of the weights that no earlier stage on the device uses too, and of what an optimizer keeps
    for them; there for the whole step."""
    gradient_bytes: int = 0
    """Of the gradients that the step hands on, made by the first backward; those of later ones are
    added to them."""
    input_bytes: int = 0
    """Of the model's inputs that the stage reads; those of all micro-batches are there for the
    whole step."""
    output_bytes: int = 0
    """Of the model's results that the forward makes; they stay to the end of the step."""
    saved_bytes: int = 0
    """Alive from the forward of a micro-batch to its backward, results and inputs not counted."""
    forward_peak_bytes: int = 0
    """The most alive at once during the forward: what it saves and its results counted, weights
    and inputs not."""
    backward_peak_bytes: int = 0
    """The most alive at once during a backward: what was saved counted, weights, inputs and
    `gradient_bytes` not; a gradient counts until it is added to what there is."""
    first_backward_peak_bytes: int = 0
    """The same for the first micro-batch, whose gradients stay."""
    update_s: float = 0.0
    """Of the updates of its weights, once a step."""
    update_peak_bytes: int = 0
    """The most that those make at once, beside what the step holds at its end."""
    update_kept_bytes: int = 0
    """The part of it that stays until all updates of the device are done."""
    within_s: float = 0.0
    """Of sums over replicas inside the model: while they go on, the device waits in its forward."""
    reduce_s: float = 0.0
    """Of sums over replicas of its gradients and results, once a step, before the updates of its
    device, which waits for them."""
    shards: StageShards | None = None
    """Where replicas share its weights; `weight_bytes` then has their shards instead."""

    def __post_init__(self) -> None:
        """Refuse times that are none."""
        for name in ("forward_s", "backward_s", "update_s", "within_s", "reduce_s"):
            _refuse_no_time(f"{name} of a stage on device {self.device}", getattr(self, name))

    def without_collectives(self) -> "StageCost":
        """Return the same where collectives of weights and gradients take no time."""
        if self.shards is None:
            return self
        shards = self.shards.without_collectives()
        reduce_s = self.reduce_s - self.shards.reduce_s + shards.reduce_s
        return replace(self, shards=shards, reduce_s=max(0.0, reduce_s))

    def seconds(self, kind: str, gathered: Gathered = Gathered.NOTHING) -> float:
        """Return the time of its forward, `kind` ``F``, waiting included, or backward, ``B``."""
        needs = stage_needs(self, gathered)
        if kind == "F":
            return self.forward_s + self.within_s + needs.forward_wait_s
        return self.backward_s + needs.backward_wait_s

    def computing_s(self, kind: str) -> float:
        """Return the same without the time in which the device waits."""
        return self.forward_s if kind == "F" else self.backward_s


@dataclass(frozen=True, slots=True)
class StageLink:
    """What one stage sends another for each micro-batch when its forward, or backward, is done."""

    kind: str
    """``F`` or ``B``: after which of the two it is sent, and which of the two waits for it."""
    source: int
    """Stage that sends. Of a forward it is before `target`, of a backward behind it."""
    target: int
    """Stage that receives, on another device."""
    sent_bytes: int
    seconds: float
    """How long it occupies the link between the two devices."""

    def __post_init__(self) -> None:
        """Refuse a time that is none."""
        _refuse_no_time(f"seconds of a link from {self.source} to {self.target}", self.seconds)


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """A pipeline: its stages in order, and what they send each other."""

    stages: tuple[StageCost, ...]
    links: tuple[StageLink, ...]
    training: bool
    """Whether a step has a backward."""

"""Costs of one microbatch in each stage of a pipeline, and transfers between stages."""

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
    """Costs of one stage, per microbatch unless stated otherwise."""

    device: int
    """Logical id of the device that the stage is on."""
    forward_s: float
    backward_s: float = 0.0
    weight_bytes: int = 0
    """Weights not used by an earlier stage on the device, and their optimizer state; resident for
    the whole step."""
    gradient_bytes: int = 0
    """Gradients that the step returns, allocated by the first backward; later ones are accumulated
    into them."""
    input_bytes: int = 0
    """Model inputs read by the stage; those of all microbatches are resident for the whole step."""
    output_bytes: int = 0
    """Model results produced by the forward; they live to the end of the step."""
    saved_bytes: int = 0
    """Saved activations, live from the forward of a microbatch to its backward, without results and
    inputs."""
    forward_peak_bytes: int = 0
    """Peak during the forward, including saved activations and results but not weights and
    inputs."""
    backward_peak_bytes: int = 0
    """Peak during a backward, including saved activations but not weights, inputs and
    `gradient_bytes`; a gradient counts until it is accumulated."""
    first_backward_peak_bytes: int = 0
    """Peak during the backward of the first microbatch, whose gradients stay live."""
    update_s: float = 0.0
    """Time of its weight updates, once per step."""
    update_peak_bytes: int = 0
    """Peak of the updates' temporaries, on top of what is live at the end of the step."""
    update_kept_bytes: int = 0
    """The part of `update_peak_bytes` that lives until all updates of the device are done."""
    within_s: float = 0.0
    """Time of all-reduces over replicas inside the model, during which the device stalls in its
    forward."""
    reduce_s: float = 0.0
    """Time of all-reduces over replicas of its gradients and results, once per step, before the
    updates of the device, which wait for them."""
    shards: StageShards | None = None
    """Costs of weights sharded over replicas, if any; `weight_bytes` then counts only shards."""

    def __post_init__(self) -> None:
        """Check that times are finite and not negative."""
        for name in ("forward_s", "backward_s", "update_s", "within_s", "reduce_s"):
            _refuse_no_time(f"{name} of a stage on device {self.device}", getattr(self, name))

    def without_collectives(self) -> "StageCost":
        """Return these costs with free collectives of weights and gradients."""
        if self.shards is None:
            return self
        shards = self.shards.without_collectives()
        reduce_s = self.reduce_s - self.shards.reduce_s + shards.reduce_s
        return replace(self, shards=shards, reduce_s=max(0.0, reduce_s))

    def seconds(self, kind: str, gathered: Gathered = Gathered.NOTHING) -> float:
        """Return the time of its forward (`kind` ``F``) or backward (``B``), including stalls."""
        needs = stage_needs(self, gathered)
        if kind == "F":
            return self.forward_s + self.within_s + needs.forward_wait_s
        return self.backward_s + needs.backward_wait_s

    def computing_s(self, kind: str) -> float:
        """Return the compute time of its forward (`kind` ``F``) or backward (``B``)."""
        return self.forward_s if kind == "F" else self.backward_s


@dataclass(frozen=True, slots=True)
class StageLink:
    """A transfer between stages after each forward, or backward, of a microbatch."""

    kind: str
    """``F`` or ``B``: the kind of action that sends it, and that waits for it."""
    source: int
    """Sending stage, before `target` in a forward and after it in a backward."""
    target: int
    """Receiving stage, on another device."""
    sent_bytes: int
    seconds: float
    """Time for which it occupies the link between the two devices."""

    def __post_init__(self) -> None:
        """Check that the time is finite and not negative."""
        _refuse_no_time(f"seconds of a link from {self.source} to {self.target}", self.seconds)


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """A pipeline: its stages in order, and the transfers between them."""

    stages: tuple[StageCost, ...]
    links: tuple[StageLink, ...]
    training: bool
    """Whether a step has a backward."""

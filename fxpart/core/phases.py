"""What of a model's life is captured: one pass forward, or a training step, and how that is run."""

from dataclasses import dataclass

from fxpart.errors import SpecError, nearest_names

__all__ = ["CHECKPOINTING", "PHASES", "StepOptions", "check_phase"]

PHASES = ("inference", "training")
"""``inference``: one pass forward. ``training``: forward, loss and backward of a step."""

CHECKPOINTING = ("none", "block")
"""What a training step computes again instead of keeping. ``none``: nothing. ``block``: what is
made inside each repeated block of the model, such as a transformer's layers."""


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How a training step is run, where that changes what it computes and keeps.

    Raises:
        SpecError: for a way of checkpointing that does not exist.

    """

    checkpointing: str = "none"
    """One of `CHECKPOINTING`."""
    fused_attention: bool = True
    """Whether attention that has dropout is one fused call that keeps no probabilities, as
    accelerators run it. Else it is the products, and the masks, that a CPU runs and keeps."""
    fused_dropout: bool = True
    """Whether other dropout is one call that keeps a byte for each element, as accelerators run it.
    Else it is the several calls that a CPU runs, which keep a number of the element's dtype."""

    def __post_init__(self) -> None:
        """Refuse a name that is not in `CHECKPOINTING`."""
        if self.checkpointing not in CHECKPOINTING:
            raise SpecError(
                f"checkpointing={self.checkpointing} does not exist;"
                f" {nearest_names(self.checkpointing, CHECKPOINTING)}"
            )


def check_phase(phase: str, level: str = "operator") -> None:
    """Raise `SpecError` for a phase that does not exist, or that `level` cannot capture."""
    if phase not in PHASES:
        raise SpecError(f"phase={phase} does not exist; {nearest_names(phase, PHASES)}")
    if phase == "training" and level != "operator":
        raise SpecError(
            f"phase=training is captured operator by operator, got capture.level={level};"
            " use capture.level=operator"
        )

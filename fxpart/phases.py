"""What of a model's life is captured: one pass forward, or a training step."""

from fxpart.errors import SpecError, nearest_names

__all__ = ["PHASES", "check_phase"]

PHASES = ("inference", "training")
"""``inference``: one pass forward. ``training``: forward, loss and backward of a step."""


def check_phase(phase: str, level: str = "operator") -> None:
    """Raise `SpecError` for a phase that does not exist, or that `level` cannot capture."""
    if phase not in PHASES:
        raise SpecError(f"phase={phase} does not exist; {nearest_names(phase, PHASES)}")
    if phase == "training" and level != "operator":
        raise SpecError(
            f"phase=training is captured operator by operator, got capture.level={level};"
            " use capture.level=operator"
        )

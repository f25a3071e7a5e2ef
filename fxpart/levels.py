"""How finely a model is captured. Without torch, so that a choice is checked before it loads."""

from fxpart.errors import SpecError, nearest_names

__all__ = ["LEVELS", "check_level"]

LEVELS = ("operator", "module")
"""``operator``: `torch.export`, any model. ``module``: `torch.fx.symbolic_trace`, plain ones."""


def check_level(level: str) -> None:
    """Raise `SpecError` for a level that does not exist."""
    if level not in LEVELS:
        raise SpecError(f"capture.level={level} does not exist; {nearest_names(level, LEVELS)}")

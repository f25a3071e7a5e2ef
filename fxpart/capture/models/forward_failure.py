"""What to change if the forward of a transformers model fails, by its error and configuration."""

import re
from typing import Any

from fxpart.sharding.tensor_plan import text_config

__all__ = ["change_for"]

_OVERFLOW = "Storage size calculation overflowed"
_CHOICE = re.compile(r"k not in range for dimension|argument 'k' must be int")
"""Errors of ``topk``, with which a router chooses experts."""
_STRIDE = re.compile(r"stride along \d+ dim to be multiple of 16 bytes, got (\d+)")
"""The error of torch's grouped matrix product, with a stride in elements."""
_EXPERTS = "experts"
_COUNTS = re.compile(rf"{_EXPERTS}($|_per_tok)|^n_group$|^(moe_)?top_?k(_group)?$")
"""Settings that count experts or groups of them, all or the chosen ones."""
_GROUPED_BYTES = 16
"""torch's grouped matrix product takes rows of a multiple of this many bytes."""


def change_for(model: Any, error: BaseException) -> str:  # noqa: ANN401 - untyped upstream
    """Return the likely cause of `error`, raised in the forward of `model`, and what to change.

    Empty if it is not known.
    """
    message = str(error)
    if _OVERFLOW in message:
        return "a tensor would have more bytes than torch can count; set a smaller model.batch_size"
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return ""
    settings = vars(text_config(config))
    if _CHOICE.search(message):
        return _more_than_there_are(settings)
    stride = _STRIDE.search(message)
    return _uneven_rows(model, settings, int(stride[1])) if stride else ""


def _more_than_there_are(settings: dict[str, Any]) -> str:
    counts = {
        name: value
        for name, value in settings.items()
        if _COUNTS.search(name) and (value is None or type(value) is int)
    }
    if not any(_EXPERTS in name for name in counts):
        return ""
    shown = ", ".join(f"{k}={'null' if v is None else v}" for k, v in counts.items())
    return (
        f"it may choose more experts than there are, or a number that is not set: {shown}; set"
        " them as model.config.NAME"
    )


def _uneven_rows(model: Any, settings: dict[str, Any], elements: int) -> str:  # noqa: ANN401
    """Return what rows a grouped product takes, and the setting to change if only one can be."""
    itemsize = next((p.dtype.itemsize for p in model.parameters()), 1)
    multiple = max(1, _GROUPED_BYTES // itemsize)
    larger = -(-elements // multiple) * multiple
    names = [n for n, value in settings.items() if type(value) is int and value == elements]
    change = f"; set model.config.{names[0]}={larger}" if len(names) == 1 else ""
    return f"torch's grouped product takes rows of a multiple of {_GROUPED_BYTES} bytes{change}"

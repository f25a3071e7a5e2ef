"""The tensor-parallel plan of a model: how each of its modules is split.

Transformers models define one (``model.tp_plan``) in the terms of that library: styles such as
``colwise`` and ``rowwise`` by module path, with ``*`` for layer numbers. `EXTRA_PLANS` adds to it.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from fxpart.core.tensor_groups import refused_count
from fxpart.errors import NotApplicableError, nearest_degrees
from fxpart.sharding.extra_plans import EXTRA_PLANS

__all__ = ["check_heads", "styles_of", "tensor_plan", "text_config"]

_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def tensor_plan(module: nn.Module) -> dict[str, str]:
    """Return the style of each module and parameter in the plan of `module`, by path.

    Raises:
        NotApplicableError: if the model has no plan.

    """
    stated = getattr(module, "tp_plan", None)
    if not isinstance(stated, dict) or not stated:
        raise NotApplicableError(
            f"tensor_parallel needs a plan of the layers to split, but {type(module).__name__} has "
            "none (tp_plan); choose another model, or leave out tensor_parallel"
        )
    extra = EXTRA_PLANS.get(type(module).__name__, {})
    more = {f"model.layers.*.{path}": style for path, style in extra.items()}
    return styles_of(module, {**stated, **more})


def styles_of(module: nn.Module, stated: Mapping[str, str]) -> dict[str, str]:
    """Expand a plan with ``*`` for layer numbers to the paths of `module`."""
    paths = [*(name for name, _ in module.named_modules())]
    paths += [name for name, _ in module.named_parameters(remove_duplicate=False)]
    wild = {path: _LAYER.sub("*", path) for path in paths if path}
    return {path: stated[generic] for path, generic in wild.items() if generic in stated}


def text_config(config: Any) -> Any:  # noqa: ANN401 - untyped upstream
    """Return the text part of a transformers `config`, or all of it if it has none or several."""
    try:
        return config.get_text_config() if hasattr(config, "get_text_config") else config
    except ValueError:
        return config


def check_heads(module: nn.Module, degree: int, *, copies_keys: bool) -> None:
    """Raise `NotApplicableError` if `degree` does not divide the number of attention heads.

    With `copies_keys` it may be a multiple of the heads of keys and values. A model whose
    configuration lacks these fields passes; its layers are checked one by one.
    """
    text = text_config(getattr(module, "config", None))
    heads, keys = (
        {f"model.config.{name}={n}": n} if isinstance(n := getattr(text, name, None), int) else {}
        for name in ("num_attention_heads", "num_key_value_heads")
    )
    counts, copied = (heads, keys) if copies_keys else (heads | keys, {})
    if requirement := refused_count(degree, counts, copied):
        raise NotApplicableError(
            f"tensor_parallel={degree} must {requirement};"
            f" use {nearest_degrees(degree, counts.values(), copied.values())}"
        )

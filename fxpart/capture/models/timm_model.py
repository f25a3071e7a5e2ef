"""Build models of timm (huggingface/pytorch-image-models) by name."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpart.errors import SpecError, nearest_names, one_line

__all__ = ["timm_model"]


def timm_model(
    batch_size: int,
    dtype: torch.dtype,
    *,
    architecture: str,
    config: Mapping[str, object] | None = None,
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a model without pretrained weights, and a batch of images of its native size.

    Args:
        batch_size: number of images.
        dtype: dtype of weights and images.
        architecture: one of ``timm.list_models()``, such as ``resnet50``.
        config: further arguments of ``timm.create_model``, such as ``img_size``.

    Raises:
        SpecError: if timm is not installed, has no such model, or does not accept `config`.

    """
    try:
        import timm
    except ImportError as error:
        raise SpecError(
            f"model.architecture={architecture} needs timm, which cannot be imported:"
            f" {one_line(error)}; pip install 'fxpart[timm]'"
        ) from error
    if not timm.is_model(architecture):
        near = nearest_names(architecture, timm.list_models())
        raise SpecError(f"timm has no model {architecture}; {near}")
    settings: dict[str, Any] = dict(config or {})
    try:
        module = timm.create_model(architecture, pretrained=False, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise SpecError(
            f"timm cannot make {architecture} with {settings}: {one_line(error)}; set model.config"
            " to what timm.create_model takes"
        ) from error
    channels, height, width = module.default_cfg["input_size"]
    size = settings.get("img_size", (height, width))
    height, width = (size, size) if isinstance(size, int) else size
    channels = settings.get("in_chans", channels)
    return module.to(dtype), (torch.zeros(batch_size, channels, height, width, dtype=dtype),)

"""Image generators of diffusers by their classes: one denoising step, as a pipeline calls it."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxpart.errors import SpecError, nearest_names, one_line

__all__ = ["diffusers_model"]

_PIXELS_PER_LATENT = 8
"""Pixels along one side of a latent, in the autoencoders of these models."""
_PACKED = 2
"""Latents along one side of a token."""


def diffusers_model(
    batch_size: int,
    dtype: torch.dtype,
    *,
    architecture: str,
    config: Mapping[str, object] | None = None,
    seq_len: int = 512,
) -> tuple[nn.Module, tuple[()], dict[str, Any]]:
    """Return a denoiser without its weights, and the inputs of one step.

    Args:
        batch_size: number of images; twice as many with classifier-free guidance.
        dtype: dtype of weights, latents and encoded prompts.
        architecture: a class such as ``FluxTransformer2DModel`` or ``SD3Transformer2DModel``.
        config: arguments of the class, and ``image_size``, the side of an image in pixels; 1024
            if left out.
        seq_len: number of tokens in a prompt.

    Raises:
        SpecError: if diffusers is not installed, its class is not one of those known here, or does
            not take `config`.

    """
    settings: dict[str, Any] = dict(config or {})
    image_size = settings.pop("image_size", 1024)
    step = _PIXELS_PER_LATENT * _PACKED
    if not isinstance(image_size, int) or image_size < step or image_size % step:
        raise SpecError(
            f"model.config.image_size={image_size} must be a positive multiple of {step} pixels"
        )
    # The method `to` of diffusers would give advice on checkpoints.
    module = nn.Module.to(_denoiser(architecture, settings), dtype)
    sizes = _Sizes(batch_size, image_size // _PIXELS_PER_LATENT, seq_len, dtype)
    return module, (), {**_INPUTS[architecture](module.config, sizes), "return_dict": False}


def _denoiser(architecture: str, settings: Mapping[str, Any]) -> nn.Module:
    try:
        import diffusers
    except ImportError as error:
        raise SpecError(
            f"model.architecture={architecture} needs diffusers, which cannot be imported:"
            f" {one_line(error)}; pip install 'fxpart[diffusers]'"
        ) from error
    if architecture not in _INPUTS:
        raise SpecError(
            f"the inputs of diffusers' {architecture} are not known;"
            f" {nearest_names(architecture, _INPUTS)}; for any other class, return the model and"
            " its inputs from a function: model=custom model.factory=package.module:function"
        )
    cls: type[nn.Module] = getattr(diffusers, architecture)
    known = inspect.signature(cls.__init__).parameters.keys() - {"self"}
    for key in settings:
        if key not in known:
            near = nearest_names(key, [*known, "image_size"])
            raise SpecError(f"model.config.{key} is not a setting of {architecture}; {near}")
    try:
        return cls(**settings)
    except Exception as error:
        raise SpecError(
            f"diffusers cannot make {architecture} with {settings}: {one_line(error)}"
        ) from error


class _Sizes(NamedTuple):
    """The sizes of a step."""

    batch: int
    side: int
    """Latents along one side of an image."""
    text_len: int
    dtype: torch.dtype

    def zeros(self, *shape: int) -> Tensor:
        """Return a tensor with a batch dimension before `shape`."""
        return torch.zeros(self.batch, *shape, dtype=self.dtype)


def _flux_inputs(config: Any, sizes: _Sizes) -> dict[str, object]:  # noqa: ANN401 - untyped upstream
    tokens = (sizes.side // _PACKED) ** 2
    inputs: dict[str, object] = {
        "hidden_states": sizes.zeros(tokens, config.in_channels),
        "encoder_hidden_states": sizes.zeros(sizes.text_len, config.joint_attention_dim),
        "pooled_projections": sizes.zeros(config.pooled_projection_dim),
        "timestep": sizes.zeros(),
        # Positions are common to all images.
        "img_ids": torch.zeros(tokens, 3, dtype=sizes.dtype),
        "txt_ids": torch.zeros(sizes.text_len, 3, dtype=sizes.dtype),
    }
    return {**inputs, "guidance": sizes.zeros()} if config.guidance_embeds else inputs


def _sd3_inputs(config: Any, sizes: _Sizes) -> dict[str, object]:  # noqa: ANN401
    return {
        "hidden_states": sizes.zeros(config.in_channels, sizes.side, sizes.side),
        "encoder_hidden_states": sizes.zeros(sizes.text_len, config.joint_attention_dim),
        "pooled_projections": sizes.zeros(config.pooled_projection_dim),
        "timestep": sizes.zeros(),
    }


def _unet_inputs(config: Any, sizes: _Sizes) -> dict[str, object]:  # noqa: ANN401
    inputs: dict[str, object] = {
        "sample": sizes.zeros(config.in_channels, sizes.side, sizes.side),
        "timestep": sizes.zeros(),
        "encoder_hidden_states": sizes.zeros(sizes.text_len, config.cross_attention_dim),
    }
    if config.addition_embed_type != "text_time":
        return inputs
    # SDXL: a pooled prompt, and six sizes of the image.
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    conditions = {"text_embeds": sizes.zeros(pooled), "time_ids": sizes.zeros(6)}
    return {**inputs, "added_cond_kwargs": conditions}


_INPUTS: dict[str, Callable[[Any, _Sizes], dict[str, object]]] = {
    "FluxTransformer2DModel": _flux_inputs,
    "SD3Transformer2DModel": _sd3_inputs,
    "UNet2DConditionModel": _unet_inputs,
}
"""Functions that return the inputs of a step, by class."""

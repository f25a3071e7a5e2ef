"""Denoisers of diffusers by their classes, such as ``FluxTransformer2DModel``."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpart.errors import SpecError, nearest_names, one_line

__all__ = ["diffusers_model"]

_DENOISERS = ("Transformer2DModel", "UNet2DConditionModel")
"""Ends of the names of classes that take the latents of an image."""
_PIXELS_PER_LATENT = 8
"""Pixels of an image along one side of a latent, of the autoencoders of these models."""
_PACKED = 2
"""Latents along one side of a token, where a pipeline packs them before it calls the model."""
_TEXT_WIDTHS = ("joint_attention_dim", "cross_attention_dim", "caption_channels")
"""Keys of a configuration for the width of an encoded prompt."""


def diffusers_model(
    batch_size: int,
    dtype: torch.dtype,
    *,
    architecture: str,
    config: Mapping[str, object] | None = None,
    seq_len: int = 512,
) -> tuple[nn.Module, tuple[()], dict[str, Any]]:
    """Return a denoiser without its weights, and what a pipeline calls it with in one step.

    Args:
        batch_size: images; twice as many with classifier-free guidance.
        dtype: of weights, latents and encoded prompts.
        architecture: a class such as ``FluxTransformer2DModel`` or ``SD3Transformer2DModel``.
        config: arguments of the class, and ``image_size``, the side of an image in pixels; 1024
            if left out.
        seq_len: tokens of a prompt.

    Raises:
        SpecError: if diffusers is not installed, has no such denoiser, does not take `config`, or
            the denoiser takes other inputs.

    """
    cls = _denoiser(architecture)
    settings: dict[str, Any] = dict(config or {})
    image_size = settings.pop("image_size", 1024)
    step = _PIXELS_PER_LATENT * _PACKED
    if not isinstance(image_size, int) or image_size < step or image_size % step:
        raise SpecError(
            f"model.config.image_size={image_size} must be a positive multiple of {step} pixels"
        )
    known = inspect.signature(cls.__init__).parameters.keys() - {"self"}
    for key in settings:
        if key not in known:
            near = nearest_names(key, [*known, "image_size"])
            raise SpecError(f"model.config.{key} is not a setting of {architecture}; {near}")
    try:
        module: nn.Module = cls(**settings)
    except Exception as error:
        raise SpecError(
            f"diffusers cannot make {architecture} with {settings}: {one_line(error)}"
        ) from error
    # Not by the method of diffusers, which advises on checkpoints.
    module = nn.Module.to(module, dtype)
    return module, (), _inputs(module, batch_size, dtype, image_size, seq_len)


def _denoiser(architecture: str) -> type[Any]:
    try:
        import diffusers
    except ImportError as error:
        raise SpecError(
            f"model.architecture={architecture} needs diffusers, which cannot be imported:"
            f" {one_line(error)}; pip install 'fxpart[diffusers]'"
        ) from error
    names = [name for name in dir(diffusers) if name.endswith(_DENOISERS)]
    if architecture not in names:
        near = nearest_names(architecture, names)
        raise SpecError(f"diffusers has no denoiser of images {architecture}; {near}")
    cls: type[Any] = getattr(diffusers, architecture)
    return cls


def _inputs(
    module: Any,  # noqa: ANN401 - untyped upstream
    batch: int,
    dtype: torch.dtype,
    image_size: int,
    text_len: int,
) -> dict[str, Any]:
    """Return the inputs that `module` takes, by name.

    Raises:
        SpecError: for a required input of another name.

    """
    config, parameters = module.config, inspect.signature(module.forward).parameters
    side = image_size // _PIXELS_PER_LATENT
    n_tokens = (side // _PACKED) ** 2
    is_packed = "img_ids" in parameters
    latents = (n_tokens, config.in_channels) if is_packed else (config.in_channels, side, side)
    width = next((w for key in _TEXT_WIDTHS if (w := getattr(config, key, None))), 0)
    made: dict[str, Callable[[], object]] = {
        "hidden_states": lambda: torch.zeros(batch, *latents, dtype=dtype),
        "sample": lambda: torch.zeros(batch, *latents, dtype=dtype),
        "encoder_hidden_states": lambda: torch.zeros(batch, text_len, width, dtype=dtype),
        "pooled_projections": lambda: torch.zeros(batch, config.pooled_projection_dim, dtype=dtype),
        "timestep": lambda: torch.zeros(batch, dtype=dtype),
        "img_ids": lambda: torch.zeros(n_tokens, 3, dtype=dtype),
        "txt_ids": lambda: torch.zeros(text_len, 3, dtype=dtype),
        "guidance": lambda: torch.zeros(batch, dtype=dtype),
        "added_cond_kwargs": lambda: _of_sdxl(config, batch, dtype),
    }
    is_left_out = {
        "guidance": not getattr(config, "guidance_embeds", False),
        "added_cond_kwargs": getattr(config, "addition_embed_type", None) != "text_time",
    }
    inputs: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name in made and not is_left_out.get(name, False):
            inputs[name] = made[name]()
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            raise SpecError(
                f"{type(module).__name__} needs {name}, which is not known here; return the model"
                " and its inputs from a function of yours: model=custom model.factory=..."
            )
    if "return_dict" in parameters:
        inputs["return_dict"] = False
    return inputs


def _of_sdxl(config: Any, batch: int, dtype: torch.dtype) -> dict[str, Tensor]:  # noqa: ANN401
    """Return the pooled prompt of SDXL, and the sizes of the image, of which there are six."""
    text = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return {
        "text_embeds": torch.zeros(batch, text, dtype=dtype),
        "time_ids": torch.zeros(batch, 6, dtype=dtype),
    }

"""Create example inputs of a transformers model on meta, with its names, shapes and dtypes."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpart.capture.models.image_grids import GRIDS, has_row_per_image
from fxpart.capture.models.image_shapes import hidden_patches
from fxpart.capture.models.input_shapes import (
    ANY_DATA,
    HIDDEN_PATCHES,
    ROWS_MASK,
    input_shape,
    is_tokens,
    positions,
)
from fxpart.capture.models.labels import drawn_labels, label_inputs
from fxpart.capture.models.shape_request import PLACEHOLDERS, Request, Shape
from fxpart.errors import SpecError
from fxpart.sharding.tensor_plan import text_config

__all__ = ["drawn_inputs", "example_inputs", "ordinary_inputs", "positions"]

# The input of each modality in transformers' `input_modalities`.
_MODALITIES = {
    "text": ("input_ids",),
    "image": ("pixel_values",),
    "video": ("pixel_values_videos", "pixel_values"),
    "audio": ("input_features", "input_values"),
}
# With one of these, images or recordings are cut into pieces whose number depends on values: for
# `visual_bbox`, on the boxes of the text beside them.
_PIECES = (
    "aspect_ratio_ids",
    "cu_seqlens",
    "grid_thw",
    "image_grid_hw",
    "image_grids",
    "image_grid_thw",
    "image_position_ids",
    "image_sizes",
    "num_local_patches",
    "pixel_attention_mask",
    "pixel_position_ids",
    "spatial_shapes",
    "visual_bbox",
)
# Inputs that models require although they have a default.
_NEEDED = (
    "actions",
    "high_res_pixel_values",
    "image_embeds_position_mask",
    "returns_to_go",
    "timesteps",
    "visual_feats",
    "visual_pos",
)
_NEEDED_WITH = {
    "attention_mask": ("encoder_attention_type", "relative_bias_args"),
    "bbox": ("dim_bbox", "relative_bias_args"),
    "decoder_input_values": ("max_text_positions",),
    "future_time_features": ("lags_sequence",),
    "future_values": ("lags_sequence",),
    "input_features": ("speech_config",),
}
"""Inputs required although they have a default, if the configuration has one of the settings."""


def _parameters(model: Any) -> dict[str, inspect.Parameter]:  # noqa: ANN401 - untyped upstream
    """Return the named parameters of the model's ``forward``."""
    signature = inspect.signature(model.forward)
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: p for name, p in signature.parameters.items() if p.kind not in several}


def _main_inputs(model: Any) -> list[str]:  # noqa: ANN401
    main = model.main_input_name
    return [main] if isinstance(main, str) else list(main)


def _needed(model: Any) -> Iterator[str]:  # noqa: ANN401
    """Yield the inputs to call `model` with: those it requires, and one for each modality.

    A model that inserts images into its text at placeholders also runs without them. It gets images
    if they are one tensor; numbers of pieces and grids would be values, and a graph has only
    shapes.
    """
    parameters = _parameters(model)
    yield from (name for name in _main_inputs(model) if name in parameters)
    needed = (n for n, p in parameters.items() if p.default is inspect.Parameter.empty)
    yield from (name for name in needed if name not in GRIDS)  # bound to the model instead
    yield from (name for name in _NEEDED if name in parameters)
    for name, settings in _NEEDED_WITH.items():
        if name in parameters and any(hasattr(model.config, key) for key in settings):
            yield name
    if "decoder_input_ids" in parameters:
        yield "decoder_input_ids"
    if has_row_per_image(model):
        yield from ("pixel_values", ROWS_MASK)
    modalities = getattr(model, "input_modalities", ())
    has_pieces = any(name in parameters for name in _PIECES)
    if isinstance(modalities, str) or has_pieces or ANY_DATA in _main_inputs(model):
        return
    has_placeholders = any(hasattr(model.config, name) for name in PLACEHOLDERS)
    for modality in modalities:
        if has_placeholders and modality not in ("text", "image"):
            continue
        yield from [name for name in _MODALITIES.get(modality, ()) if name in parameters][:1]


def example_inputs(
    model: Any,  # noqa: ANN401 - transformers' classes are untyped
    batch_size: int,
    seq_len: int | None,
    dtype: torch.dtype,
    *,
    labels: bool = False,
) -> dict[str, Tensor]:
    """Return the keyword inputs of transformers model `model`, on the meta device.

    These are its main input, parameters of its ``forward`` without default, ``decoder_input_ids``,
    and an input for each of its modalities. With batch size B and length S:

    - ``input_ids`` and other tokens (B, S) int64;
    - ``pixel_values`` (B, channels, height, width), 224 pixels unless the model fixes the size; for
      videos (B, frames, channels, height, width);
    - ``input_features`` (B, mel bins, 2 * max_source_positions) or (B, frames, mel bins), a log-mel
      spectrogram;
    - ``input_values`` (B, S) raw audio, 10 s at 16 kHz by default, or (B, frames, mel bins);
    - other inputs as documented, with the sizes of the configuration
      (`fxpart.capture.models.input_shapes`).

    With `labels`, also the labels of the model's loss, if it has one
    (`fxpart.capture.models.labels`). Real-valued inputs have `dtype`. Without `seq_len`, sequences
    are as long as the model allows, at most 512 tokens.

    Raises:
        SpecError: if the model has too few positions for `seq_len` or does not use it, or requires
            an input of unknown shape.

    """
    request = Request(model, batch_size, seq_len)
    shapes = {name: input_shape(name, request) for name in dict.fromkeys(_needed(model))}
    if not shapes:
        raise SpecError(
            f"{type(model).__name__} has no required input; give a factory that returns the model "
            "and its inputs"
        )
    if seq_len is not None and not any(shape.uses_seq_len for shape in shapes.values()):
        main, shape = next(iter(shapes.items()))
        raise SpecError(
            f"{type(model).__name__} takes {main} of shape {shape.sizes}, which has no"
            f" sequence length, got seq_len={seq_len}; set model.seq_len=null"
        )
    inputs = {
        name: torch.empty(shape.sizes, dtype=_dtype(shape, dtype), device="meta")
        for name, shape in shapes.items()
    }
    return inputs | (label_inputs(model, inputs, dtype) if labels else {})


def _dtype(shape: Shape, real: torch.dtype) -> torch.dtype:
    return torch.bool if shape.is_mask else real if shape.is_real else torch.int64


def drawn_inputs(
    model: Any,  # noqa: ANN401 - transformers' classes are untyped
    inputs: Mapping[str, Tensor],
    device: torch.device,
) -> dict[str, Tensor]:
    """Return tensors like `inputs` on `device`, drawn from torch's generators.

    Real numbers are normally distributed; tokens are uniform over the rows of the model's
    embedding, labels over the classes. No position is masked from attention; of the patches of a
    video to fill in, as many are hidden as in pre-training.

    Args:
        model: a transformers model.
        inputs: its inputs by name, of which only shapes and dtypes are read.
        device: device of the result.

    Raises:
        SpecError: if the model takes tokens and does not state the size of its vocabulary.

    """
    labels = drawn_labels(model, inputs, device)
    drawn = {
        name: labels[name]
        if name in labels
        else torch.ones_like(like, device=device)
        if name.endswith("attention_mask")
        else hidden_patches(like, device)
        if name == HIDDEN_PATCHES
        else torch.randn(like.shape, dtype=like.dtype, device=device)
        if like.is_floating_point()
        else torch.randint(_values(model, name), like.shape, dtype=like.dtype, device=device)
        for name, like in inputs.items()
    }
    return {
        name: _with_separators(model, name, value) if is_tokens(name) else value
        for name, value in drawn.items()
    }


def ordinary_inputs(
    model: Any,  # noqa: ANN401
    inputs: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return typical values on the CPU for the integer tensors among `inputs`.

    All tokens are the same ordinary one, except the special tokens that a head looks for; masks of
    patches hide the usual share.
    """
    return {
        name: _with_separators(model, name, torch.full(like.shape, _ORDINARY, dtype=like.dtype))
        if is_tokens(name)
        else hidden_patches(like)
        if name == HIDDEN_PATCHES
        else torch.zeros(like.shape, dtype=like.dtype)
        for name, like in inputs.items()
        if not like.is_floating_point()
    }


_ORDINARY = 7
"""A token that is not special in any configuration's defaults."""


def _with_separators(model: Any, name: str, tokens: Tensor) -> Tensor:  # noqa: ANN401
    """Return `tokens` with the ones heads look for: ends, separators, a question's place."""
    config = text_config(model.config)
    if name != "input_ids":
        return tokens
    length, kind = tokens.shape[-1], type(model).__name__
    end, separator = (getattr(config, f"{which}_token_id", None) for which in ("eos", "sep"))
    question = getattr(config, "question_token_id", None)
    if kind.endswith("ForSequenceClassification") and config.is_encoder_decoder and end is not None:
        tokens[..., -1] = end
    if kind.endswith("ForQuestionAnswering") and separator is not None:
        for place in (length // 4, length // 4 + 1, length - 1):
            tokens[..., place] = separator
    if question is not None:
        tokens[..., length // 4] = question
    return tokens


def _values(model: Any, name: str) -> int:  # noqa: ANN401
    """Return the number of different values of the integer input `name`."""
    return _vocabulary(model, name) if is_tokens(name) else 1


def _vocabulary(model: Any, name: str) -> int:  # noqa: ANN401
    """Return the size of the model's vocabulary for input `name`."""
    part = model.get_decoder() if name.startswith("decoder_") else model
    for owner in (part, model):
        try:
            table = owner.get_input_embeddings()
        except (AttributeError, NotImplementedError):  # from transformers: no single table
            continue
        if isinstance(table, nn.Embedding):
            return table.num_embeddings
    config = text_config(model.config)
    # A model that hashes its tokens, such as CANINE, takes more than it has buckets.
    stated = getattr(config, "vocab_size", None) or getattr(config, "num_hash_buckets", None)
    if not isinstance(stated, int) or stated < 1:
        raise SpecError(
            f"{type(model).__name__} takes {name}, but does not say how many tokens it knows; give"
            " a factory that returns the model and its inputs"
        )
    return stated

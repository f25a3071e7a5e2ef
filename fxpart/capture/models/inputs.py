"""Example inputs of a transformers model: the right names, shapes and dtypes, on meta."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpart.errors import SpecError

__all__ = ["drawn_inputs", "example_inputs", "positions"]


_DEFAULT_SEQ_LEN = 512
_DEFAULT_IMAGE_SIZE = 224
_DEFAULT_AUDIO_SAMPLES = 160_000
"""Ten seconds at 16 kHz, the rate that speech models are trained at."""

# What transformers calls a table with one row for each position of a text.
_POSITION_TABLES = ("embed_positions", "position_embedding", "position_embeddings", "wpe")


def _rows(table: nn.Embedding) -> int:
    """Return how many positions `table` has rows for; some reserve rows for the padding."""
    reserved = getattr(table, "offset", 0)
    # RoBERTa counts positions from padding_idx + 1; sinusoidal subclasses do not.
    if type(table) is nn.Embedding and table.padding_idx is not None:
        reserved = table.padding_idx + 1
    return table.num_embeddings - int(reserved)


def positions(model: nn.Module, within: str = "") -> int | None:
    """Return the longest text that the model's tables of positions allow, None without tables.

    Only tables whose path contains `within` count. A rotary or relative encoding has no table.
    """
    lengths = [
        _rows(module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and path.rpartition(".")[2] in _POSITION_TABLES
        and within in path
    ]
    return min(lengths, default=None)


def _tokens(name: str, seq_len: int | None, model: Any, within: str = "") -> int:  # noqa: ANN401
    """Return the length of a text input: `seq_len`, or a usual one that fits the model."""
    table = positions(model, within)
    if seq_len is None:
        stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        # XLNet states -1 for "any".
        usable = [length for length in (table, stated) if length is not None and length > 0]
        return min([*usable, _DEFAULT_SEQ_LEN])
    if table is not None and seq_len > table:
        raise SpecError(
            f"seq_len={seq_len} is more than the {table} positions that"
            f" {type(model).__name__} has for {name}; set model.seq_len to {table} or less"
        )
    return seq_len


def _height_and_width(config: Any) -> tuple[int, int]:  # noqa: ANN401
    size = getattr(config, "image_size", None) or _DEFAULT_IMAGE_SIZE
    if isinstance(size, Sequence):
        return int(size[0]), int(size[1])
    return int(size), int(size)


def _pixel_shape(config: Any) -> tuple[int, ...]:  # noqa: ANN401
    return (getattr(config, "num_channels", 3), *_height_and_width(config))


def _feature_shape(model: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return (mel bins, frames) of a log-mel spectrogram, the convolution halving the frames."""
    config = model.config
    if not hasattr(config, "num_mel_bins") or not hasattr(config, "max_source_positions"):
        raise SpecError(
            f"{type(model).__name__} takes input_features in a layout that is not known here;"
            " give a factory that returns the model and its inputs"
        )
    return config.num_mel_bins, 2 * config.max_source_positions


def _audio_shape(config: Any, seq_len: int | None) -> tuple[tuple[int, ...], bool]:  # noqa: ANN401
    """Return the shape of raw audio, or of a spectrogram, whose length the configuration fixes."""
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return (config.max_length, config.num_mel_bins), False
    samples = seq_len or _DEFAULT_AUDIO_SAMPLES
    channels = getattr(config, "audio_channels", None)
    return ((samples,) if channels is None else (channels, samples)), True


def _main_input(model: Any, seq_len: int | None) -> tuple[tuple[int, ...], bool]:  # noqa: ANN401
    """Return the shape of one example of the main input, and whether seq_len decided it."""
    match model.main_input_name:
        case "input_ids":
            return (_tokens("input_ids", seq_len, model),), True
        case "pixel_values":
            return _pixel_shape(model.config), False
        case "input_features":
            return _feature_shape(model), False
        case "input_values":
            return _audio_shape(model.config, seq_len)
        case other:
            raise SpecError(
                f"{type(model).__name__} takes {other}, whose shape is not known here;"
                " give a factory that returns the model and its inputs"
            )


def example_inputs(
    model: Any,  # noqa: ANN401 - transformers' classes are untyped
    batch_size: int,
    seq_len: int | None,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the keyword inputs of transformers model `model`, on the meta device.

    By the model's main input, with batch B and length S:

    - ``input_ids`` (B, S) int64;
    - ``pixel_values`` (B, channels, height, width), 224 pixels where the model takes any;
    - ``input_features`` (B, mel bins, 2 * max_source_positions), a log-mel spectrogram;
    - ``input_values`` (B, S) raw audio, 10 s at 16 kHz by default, or (B, frames, mel bins);
    - and ``decoder_input_ids`` (B, S) int64 where the model has an encoder and a decoder.

    Real-valued inputs have `dtype`. Without `seq_len`, texts are as long as the model allows, at
    most 512 tokens.

    Raises:
        SpecError: for a `seq_len` that the model has no positions for or no use for, and for a
            model whose inputs are of another kind.

    """
    shape, uses_seq_len = _main_input(model, seq_len)
    main: str = model.main_input_name
    kind = torch.int64 if main == "input_ids" else dtype
    inputs = {main: torch.empty(batch_size, *shape, dtype=kind, device="meta")}
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        within = "" if main == "input_ids" else "decoder"
        length = _tokens("decoder_input_ids", seq_len, model, within)
        ids = torch.empty(batch_size, length, dtype=torch.int64, device="meta")
        inputs["decoder_input_ids"], uses_seq_len = ids, True
    if seq_len is not None and not uses_seq_len:
        raise SpecError(
            f"{type(model).__name__} takes {main} of shape {(batch_size, *shape)}, which has no"
            f" sequence length, got seq_len={seq_len}; set model.seq_len=null"
        )
    return inputs


def drawn_inputs(
    model: Any,  # noqa: ANN401 - transformers' classes are untyped
    inputs: Mapping[str, Tensor],
    device: torch.device,
) -> dict[str, Tensor]:
    """Return tensors like `inputs` on `device`, drawn from torch's generators.

    Real numbers are normally distributed; tokens are any that the model's embedding has a row for.

    Args:
        model: a model of transformers.
        inputs: by name, what it is called with; only shapes and dtypes count.
        device: where the result lies.

    Raises:
        SpecError: for tokens of a model that does not say how many it knows.

    """
    return {
        name: torch.randn(like.shape, dtype=like.dtype, device=device)
        if like.is_floating_point()
        else torch.randint(_vocabulary(model, name), like.shape, dtype=like.dtype, device=device)
        for name, like in inputs.items()
    }


def _vocabulary(model: Any, name: str) -> int:  # noqa: ANN401
    """Return how many different tokens the model takes as input `name`."""
    part = model.get_decoder() if name.startswith("decoder_") else model
    for owner in (part, model):
        try:
            table = owner.get_input_embeddings()
        # Where a model has no one table of tokens, transformers raises this.
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(table, nn.Embedding):
            return table.num_embeddings
    stated = getattr(model.config.get_text_config(), "vocab_size", None)
    if not isinstance(stated, int) or stated < 1:
        raise SpecError(
            f"{type(model).__name__} takes {name}, but does not say how many tokens it knows; give"
            " a factory that returns the model and its inputs"
        )
    return stated

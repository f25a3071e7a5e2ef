"""Infer the shape of each input of a transformers model from its name and the configuration.

There are rules for names that many architectures share, such as ``pixel_values``; sizes come from
the configuration, or from that of a part (``vision_config``, ``audio_config``). For other names the
shape is read from the documentation of ``forward``, if the configuration has all its sizes.
"""

import re

from torch import nn

from fxpart.capture.models.audio_shapes import (
    DEFAULT_CODES,
    audio_shape,
    channels_shape,
    feature_mask_shape,
    feature_shape,
)
from fxpart.capture.models.image_grids import has_grid, has_row_per_image, patch_sizes
from fxpart.capture.models.image_shapes import (
    flattened_shape,
    hidden_patches_shape,
    high_res_shape,
    pixel_shape,
    pixels,
)
from fxpart.capture.models.shape_request import (
    AUDIO,
    IMAGE,
    MEL_BINS,
    TEXT,
    Request,
    Shape,
    documented_shape,
    is_one_of,
    part_setting,
    unknown,
)
from fxpart.capture.models.spec import DEFAULT_SEQ_LEN
from fxpart.errors import SpecError
from fxpart.sharding.tensor_plan import text_config

__all__ = ["ANY_DATA", "HIDDEN_PATCHES", "ROWS_MASK", "input_shape", "is_tokens", "positions"]
HIDDEN_PATCHES = "bool_masked_pos"
"""The mask of the patches that a model pre-trained on videos must fill in."""
ROWS_MASK = "pixel_attention_mask"
"""The mask of the patches of images that are given as one row of patches each."""
ANY_DATA = "inputs"
"""The input of a model that takes all modalities under one name."""
_REGIONS = 36
"""Detected objects per image for LXMERT, as used by its authors."""
_CHOICES = 2
"""Choices of a multiple-choice model."""

# Names in transformers of tables with one row per position.
_POSITION_TABLES = ("embed_positions", "position_embedding", "position_embeddings", "wpe")
_NO_TEXT = (*IMAGE, *AUDIO, "visual.")
"""Parts of the paths of modules that read no text."""
_TEXT_LENGTHS = ("max_text_len", "max_text_positions")


def is_tokens(name: str) -> bool:
    """Return whether an input of that name contains token ids."""
    return name.endswith("input_ids") or name == "task_inputs"


def _rows(table: nn.Embedding) -> int:
    """Return the number of positions of `table`; some tables reserve rows for the padding."""
    reserved = getattr(table, "offset", 0)
    # RoBERTa counts positions from padding_idx + 1; sinusoidal subclasses do not.
    if type(table) is nn.Embedding and table.padding_idx is not None:
        reserved = table.padding_idx + 1
    # ProphetNet clamps positions to the last row, and its decoder looks one token further.
    elif hasattr(table, "max_length") and table.padding_idx is not None:
        reserved = table.padding_idx + 2
    return table.num_embeddings - int(reserved)


def positions(model: nn.Module, within: str = "") -> int | None:
    """Return the longest text that the model's position tables allow, or None without tables.

    Only tables whose path contains `within`, and no name of a part for images or sound, count. A
    rotary or relative encoding has no table.
    """
    lengths = [
        _rows(module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and path.rpartition(".")[2] in _POSITION_TABLES
        and within in path
        and not any(part in path for part in _NO_TEXT)
    ]
    return min(lengths, default=None)


def _tokens(name: str, request: Request) -> int:
    """Return the length of a token input: `seq_len`, or a default that fits the model."""
    model, seq_len = request.model, request.seq_len
    has_decoder = name.startswith("decoder_") and model.main_input_name != "input_ids"
    table = positions(model, "decoder" if has_decoder else "")
    if seq_len is None:
        stated = [getattr(text_config(model.config), "max_position_embeddings", None)]
        if not name.startswith("decoder_"):
            stated += [getattr(model.config, key, None) for key in _TEXT_LENGTHS]
        # XLNet states -1 for unlimited.
        usable = [length for length in (table, *stated) if type(length) is int and length > 0]
        return min([*usable, DEFAULT_SEQ_LEN])
    if table is not None and seq_len > table:
        raise SpecError(
            f"seq_len={seq_len} is more than the {table} positions that"
            f" {type(model).__name__} has for {name}; set model.seq_len to {table} or less"
        )
    return seq_len


def _token_shape(name: str, request: Request) -> Shape:
    choices = (_CHOICES,) if is_one_of(request, "MULTIPLE_CHOICE") else ()
    rows = request.batch_size
    books = getattr(getattr(request.model.config, "decoder", None), "num_codebooks", None)
    after: tuple[int, ...] = ()
    if documented_shape(name, request.model)[:1] == ["batch_size * num_codebooks"]:
        books = part_setting(request.model.config, ("num_codebooks",), TEXT)
        channels = part_setting(request.model.config, ("num_channels",), TEXT)
        rows *= books if type(books) is int else 1
        after = (channels,) if books is None and type(channels) is int else ()  # Dia's last
    elif name.startswith("decoder_") and type(books) is int:
        rows *= books  # MusicGen: a row for each code book
    sizes = (rows, *choices, _tokens(name, request), *after, *_text_and_codes(request))
    return Shape(sizes, is_real=False, uses_seq_len=True)


def _text_and_codes(request: Request) -> tuple[int, ...]:
    """Return the number of tokens at each position if it has a text token and audio codes."""
    books = getattr(request.model.config, "num_codebooks", None)
    for name, offsets in request.model.named_buffers():
        if name.endswith("audio_tokens_offsets") and books and len(offsets) == books + 1:
            return (len(offsets),)
    return ()


def _embedded_shape(name: str, request: Request) -> Shape:
    width = part_setting(request.model.config, ("hidden_size", "d_model"), TEXT)
    if type(width) is not int:
        raise unknown(name, request)
    return Shape((request.batch_size, _tokens(name, request), width), uses_seq_len=True)


def _box_shape(name: str, request: Request) -> Shape:
    """Return the shape of the boxes of the tokens on their page: two corners each."""
    return Shape((request.batch_size, _tokens(name, request), 4), uses_seq_len=True)


def _any_shape(name: str, request: Request) -> Shape:
    """Return the shape for a model of any modality, such as Perceiver, by its task.

    An image classifier gets images, any other model a sequence.
    """
    if is_one_of(request, "IMAGE_CLASSIFICATION"):
        return Shape((request.batch_size, *pixels(request)))
    encoder = getattr(request.model, "encoder", None)
    if getattr(encoder, "main_input_name", None) == "input_values":
        return audio_shape(name, request)
    width = getattr(request.model.config, "d_model", None)
    if getattr(request.model, "input_preprocessor", width) is None and type(width) is int:
        return Shape((request.batch_size, _tokens(name, request), width), uses_seq_len=True)
    return _token_shape(name, request)


_RULES = {
    ANY_DATA: _any_shape,
    "bbox": _box_shape,
    HIDDEN_PATCHES: hidden_patches_shape,
    "inputs_embeds": _embedded_shape,
    "flattened_patches": flattened_shape,
    "high_res_pixel_values": high_res_shape,
    "pixel_values": pixel_shape,
    "pixel_values_videos": pixel_shape,
    "prompt_pixel_values": pixel_shape,
    "prompt_masks": pixel_shape,
    "hidden_states": channels_shape,
    "input_features": feature_shape,
    "input_features_mask": feature_mask_shape,
    "input_values": audio_shape,
}
"""Rules for inputs that many architectures have, by name."""

# Names of sizes in documentation, and the corresponding settings.
_DOCUMENTED = {
    "num_input_channels": ("num_input_channels",),
    "feature_dim": MEL_BINS,
    "num_mel_bins": MEL_BINS,
    "num_frames": ("num_frames",),
    "height": ("image_size",),
    "width": ("image_size",),
}
_USUAL = {"num_visual_features": _REGIONS, "frames": DEFAULT_CODES}
"""Sizes that no configuration states."""
_PATCHES = ("hidden_states", "pixel_values", "pixel_values_videos")
"""Names of inputs that are rows of patches if the model takes a grid."""
_WHOLE_NUMBERS = ("ids", "timesteps", "freq", "padding")
_VALUES_DECIDE = ("grid", "spatial_shapes", "structure", "sizes", "_thw", "marks", "num_")
"""Parts of the names of inputs whose values, not shapes, determine the computation."""


def input_shape(name: str, request: Request) -> Shape:
    """Return the shape of input `name`.

    Raises:
        SpecError: if neither a rule nor the model's documentation determines it, or the model has
            too few positions for the sequence.

    """
    if is_tokens(name):
        return _token_shape(name, request)
    if name in _PATCHES and has_grid(request.model):
        return Shape(patch_sizes(request.model, request.batch_size))
    if name == ROWS_MASK and has_row_per_image(request.model):
        return Shape(patch_sizes(request.model, request.batch_size)[:-1], is_real=False)
    rule = _RULES.get(name)
    if rule is not None:
        return rule(name, request)
    if any(part in name for part in _VALUES_DECIDE):
        raise unknown(name, request, ", whose values decide the shapes inside it")
    sizes = tuple(_size(word, name, request) for word in documented_shape(name, request.model))
    if not sizes:
        raise unknown(name, request)
    is_real = not any(part in name for part in (*_WHOLE_NUMBERS, "mask"))
    return Shape(sizes, is_real, uses_seq_len=request.seq_len in sizes)


def _size(word: str, name: str, request: Request) -> int:
    """Return the size named by `word` in a documented shape."""
    if word in ("batch_size", "bs"):
        return request.batch_size
    if word.isdecimal():
        return int(word)
    if word == "num_visual_features":
        return _REGIONS
    word = word.removeprefix("config.").removeprefix("self.")
    if word == "num_features":  # of each time, in forecasts
        names = ("num_time_features", "num_dynamic_real_features")
        value = sum(part_setting(request.model.config, (key,), ()) or 0 for key in names)
    else:
        value = part_setting(request.model.config, _DOCUMENTED.get(word, (word,)), ())
    if type(value) is int and value > 0:
        return value
    if word == "frames":
        return DEFAULT_CODES
    if re.search(r"(seq\w*|episode)_len", word):
        past = part_setting(request.model.config, ("context_length",), ())
        # Values before the context, for its lags.
        lags = part_setting(request.model.config, ("lags_sequence",), ()) or (0,)
        return past + max(lags) if type(past) is int else _tokens(name, request)
    raise unknown(name, request)

"""Infer the shape of each input of a transformers model from its name and the configuration.

There are rules for names that many architectures share, such as ``pixel_values``; sizes come from
the configuration, or from that of a part (``vision_config``, ``audio_config``). For other names the
shape is read from the documentation of ``forward``, if the configuration has all its sizes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.models.auto import modeling_auto

from fxpart.capture.models.image_grids import has_grid, patch_sizes
from fxpart.errors import SpecError

__all__ = [
    "ANY_DATA",
    "Request",
    "Shape",
    "input_shape",
    "is_tokens",
    "part_setting",
    "positions",
    "text_config",
]

ANY_DATA = "inputs"
"""The input of a model that takes all modalities under one name."""
_DEFAULT_SEQ_LEN = 512
_DEFAULT_IMAGE_SIZE = 224
_DEFAULT_FRAMES = 16
_DEFAULT_AUDIO_SAMPLES = 160_000
"""Ten seconds at 16 kHz, the usual rate of speech models."""
_REGIONS = 36
"""Detected objects per image for LXMERT, as used by its authors."""
_CHOICES = 2
"""Choices of a multiple-choice model."""
_DEFAULT_SPECTROGRAM = 1024
"""Frames of about ten seconds in steps of 10 ms."""

# Names in transformers of tables with one row per position.
_POSITION_TABLES = ("embed_positions", "position_embedding", "position_embeddings", "wpe")
_TEXT, _IMAGE, _AUDIO = ("text", "decoder"), ("vision", "image", "backbone"), ("audio", "speech")
_MEL_BINS = (
    "input_dim",
    "feature_projection_input_dim",
    "num_mel_bins",
    "input_feat_per_channel",
    "n_mels",
    "input_feat_size",
    "num_mel_channels",
    "feature_size",
    "mel_bins",
    "feature_dim",
)


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """The model and the sizes of the input to create."""

    model: Any
    """A model of transformers."""
    batch_size: int
    seq_len: int | None


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape and dtype of one input."""

    sizes: tuple[int, ...]
    is_real: bool = True
    """Whether the input is real-valued, in the dtype of the weights; otherwise it is int64."""
    uses_seq_len: bool = False


def is_tokens(name: str) -> bool:
    """Return whether an input of that name contains token ids."""
    return name.endswith("input_ids") or name == "task_inputs"


def _rows(table: nn.Embedding) -> int:
    """Return the number of positions of `table`; some tables reserve rows for the padding."""
    reserved = getattr(table, "offset", 0)
    # RoBERTa counts positions from padding_idx + 1; sinusoidal subclasses do not.
    if type(table) is nn.Embedding and table.padding_idx is not None:
        reserved = table.padding_idx + 1
    return table.num_embeddings - int(reserved)


def positions(model: nn.Module, within: str = "", without: Sequence[str] = ()) -> int | None:
    """Return the maximum sequence length of the model's position tables, or None without tables.

    Only tables whose path contains `within`, and none of `without`, count. A rotary or relative
    encoding has no table.
    """
    lengths = [
        _rows(module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and path.rpartition(".")[2] in _POSITION_TABLES
        and within in path
        and not any(part in path for part in without)
    ]
    return min(lengths, default=None)


def _tokens(name: str, request: Request) -> int:
    """Return the length of a token input: `seq_len`, or a default that fits the model."""
    model, seq_len = request.model, request.seq_len
    has_decoder = name.startswith("decoder_") and model.main_input_name != "input_ids"
    table = positions(model, "decoder" if has_decoder else "", (*_IMAGE, *_AUDIO))
    if seq_len is None:
        stated = getattr(text_config(model.config), "max_position_embeddings", None)
        # XLNet states -1 for unlimited.
        usable = [length for length in (table, stated) if type(length) is int and length > 0]
        return min([*usable, _DEFAULT_SEQ_LEN])
    if table is not None and seq_len > table:
        raise SpecError(
            f"seq_len={seq_len} is more than the {table} positions that"
            f" {type(model).__name__} has for {name}; set model.seq_len to {table} or less"
        )
    return seq_len


def text_config(config: Any) -> Any:  # noqa: ANN401 - untyped upstream
    """Return the text part of `config`, or all of it if there are several such parts."""
    try:
        return config.get_text_config()
    except ValueError:
        return config


def _configs(config: Any, parts: Sequence[str]) -> Iterator[Any]:  # noqa: ANN401 - untyped upstream
    """Yield `config` and its parts, those named like `parts` first."""
    yield config
    nested = [
        (key, part)
        for key, part in vars(config).items()
        if hasattr(part, "sub_configs") and part is not config
    ]
    # Sorting is stable: parts of equal rank stay in the order of the configuration.
    for _, part in sorted(nested, key=lambda item: not any(name in item[0] for name in parts)):
        yield from _configs(part, parts)


def part_setting(config: Any, names: Sequence[str], parts: Sequence[str]) -> Any:  # noqa: ANN401
    """Return the value of the first of `names` set in `config` or a part of it, or None."""
    for place in _configs(config, parts):
        for name in names:
            value = getattr(place, name, None)
            if value is not None:
                return value
    return None


def _pixels(request: Request) -> tuple[int, ...]:
    config = request.model.config
    channels = part_setting(config, ("num_channels", "in_channels", "in_chans"), _IMAGE)
    size = part_setting(config, ("image_size", "img_size", "input_size", "crop_size"), _IMAGE)
    match size:
        case Mapping():
            height, width = size.get("height", 0), size.get("width", 0)
        case [height, width, *_]:
            pass
        case [side]:
            height = width = side
        case int():
            height = width = size
        case _:
            height = width = 0
    channels = channels if type(channels) is int else 3
    window = _window(config)
    sides = (int(side or _DEFAULT_IMAGE_SIZE) for side in (height, width))
    height, width = (max(side // window, 1) * window for side in sides)
    return channels, height, width


def _window(config: Any) -> int:  # noqa: ANN401
    """Return the number of pixels that image sides must be a multiple of; 1 without windows."""
    windows = part_setting(config, ("num_windows",), _IMAGE)
    patch = part_setting(config, ("patch_size",), _IMAGE)
    return windows * patch if type(windows) is int and type(patch) is int else 1


def _frames(request: Request, otherwise: int) -> int:
    """Return the configured number of frames of a video, else `otherwise`."""
    names = ("num_frames", "frames_per_clip", "n_frames")
    frames = part_setting(request.model.config, names, _IMAGE)
    return frames if type(frames) is int else otherwise


def _pixel_shape(name: str, request: Request) -> Shape:
    modalities = getattr(request.model, "input_modalities", ())
    has_images = "image" in modalities and "text" in modalities
    is_video = name.endswith("_videos") or ("video" in modalities and "image" not in modalities)
    frames = _frames(request, _DEFAULT_FRAMES if is_video else 0) if not has_images else 0
    if _is_one_of(request, "KEYPOINT_MATCHING"):  # compares two images
        frames = 2
    images = (frames,) if frames else (1,) * (len(_documented_shape(name, request.model)) - 4)
    return Shape((request.batch_size, *images, *_pixels(request)))


def _high_res_shape(name: str, request: Request) -> Shape:
    """Return the shape of the larger of two images, from the part of the configuration for it."""
    config = part_setting(
        request.model.config, (name.replace("pixel_values", "vision_config"),), ()
    )
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    if type(size) is not int:
        raise _unknown(name, request)
    return Shape((request.batch_size, channels, size, size))


def _feature_shape(name: str, request: Request) -> Shape:
    """Return the shape of a spectrogram, with bins before frames for convolutional models."""
    config = request.model.config
    bins = part_setting(config, _MEL_BINS, (*_AUDIO, "encoder"))
    if type(bins) is not int:
        raise _unknown(name, request)
    if hasattr(config, "input_feat_per_channel"):
        return Shape((request.batch_size, _DEFAULT_SPECTROGRAM, bins * config.input_channels))
    first = next((m for m in request.model.modules() if isinstance(m, nn.Conv1d)), None)
    if first is not None and first.in_channels == bins:
        # Whisper's layout, whose convolutions halve the frames.
        half = part_setting(config, ("max_source_positions",), (*_AUDIO, "encoder"))
        frames = 2 * half if type(half) is int else _DEFAULT_SPECTROGRAM
        return Shape((request.batch_size, bins, frames))
    return Shape((request.batch_size, _DEFAULT_SPECTROGRAM, bins))


def _audio_shape(name: str, request: Request) -> Shape:
    """Return the shape of raw audio, or of a spectrogram if the configuration fixes its length."""
    config, batch = request.model.config, request.batch_size
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return Shape((batch, config.max_length, config.num_mel_bins))
    samples = request.seq_len or _DEFAULT_AUDIO_SAMPLES
    channels = getattr(config, "audio_channels", None)
    if channels is None and _documented(name, request.model, 1) == "1":
        channels = 1
    sizes = (samples,) if channels is None else (channels, samples)
    return Shape((batch, *sizes), uses_seq_len=True)


def _is_one_of(request: Request, task: str) -> bool:
    """Return whether transformers lists the model for `task` among its Auto classes."""
    names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
    entries = ([entry] if isinstance(entry, str) else entry for entry in names.values())
    return any(type(request.model).__name__ in entry for entry in entries)


def _token_shape(name: str, request: Request) -> Shape:
    choices = (_CHOICES,) if _is_one_of(request, "MULTIPLE_CHOICE") else ()
    rows = request.batch_size
    books = getattr(getattr(request.model.config, "decoder", None), "num_codebooks", None)
    if name.startswith("decoder_") and type(books) is int:
        rows *= books  # MusicGen: a row for each code book
    sizes = (rows, *choices, _tokens(name, request))
    return Shape(sizes, is_real=False, uses_seq_len=True)


def _embedded_shape(name: str, request: Request) -> Shape:
    width = part_setting(request.model.config, ("hidden_size", "d_model"), _TEXT)
    if type(width) is not int:
        raise _unknown(name, request)
    return Shape((request.batch_size, _tokens(name, request), width), uses_seq_len=True)


def _any_shape(name: str, request: Request) -> Shape:
    """Return the shape for a model of any modality, such as Perceiver, by its task.

    An image classifier gets images, any other model a sequence.
    """
    if _is_one_of(request, "IMAGE_CLASSIFICATION"):
        return Shape((request.batch_size, *_pixels(request)))
    return _token_shape(name, request)


_RULES = {
    ANY_DATA: _any_shape,
    "inputs_embeds": _embedded_shape,
    "high_res_pixel_values": _high_res_shape,
    "pixel_values": _pixel_shape,
    "pixel_values_videos": _pixel_shape,
    "prompt_pixel_values": _pixel_shape,
    "prompt_masks": _pixel_shape,
    "input_features": _feature_shape,
    "input_values": _audio_shape,
}
"""Rules for inputs that many architectures have, by name."""

# Names of sizes in documentation, and the corresponding settings.
_DOCUMENTED = {
    "num_input_channels": ("num_input_channels",),
    "feature_dim": _MEL_BINS,
    "num_mel_bins": _MEL_BINS,
    "num_frames": ("num_frames",),
    "height": ("image_size",),
    "width": ("image_size",),
}
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
    rule = _RULES.get(name)
    if rule is not None:
        return rule(name, request)
    if any(part in name for part in _VALUES_DECIDE):
        raise _unknown(name, request, ", whose values decide the shapes inside it")
    sizes = tuple(_size(word, name, request) for word in _documented_shape(name, request.model))
    if not sizes:
        raise _unknown(name, request)
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
    value = part_setting(request.model.config, _DOCUMENTED.get(word, (word,)), ())
    if type(value) is int and value > 0:
        return value
    if re.search(r"(seq\w*|episode)_len", word):
        past = part_setting(request.model.config, ("context_length",), ())
        return past if type(past) is int else _tokens(name, request)
    raise _unknown(name, request)


def _documented_shape(name: str, model: Any) -> list[str]:  # noqa: ANN401
    """Return the sizes of input `name` in the documentation of ``forward``."""
    text = type(model).forward.__doc__ or ""
    entry = re.search(
        rf"^\s*{re.escape(name)} \([^\n]*?shape\s*`?\(([^)\n]*)\)", text, re.MULTILINE
    )
    return [word.strip() for word in entry[1].split(",") if word.strip()] if entry else []


def _documented(name: str, model: Any, index: int) -> str | None:  # noqa: ANN401
    words = _documented_shape(name, model)
    return words[index] if len(words) > index + 1 else None


def _unknown(name: str, request: Request, why: str = "") -> SpecError:
    why = why or ", whose shape its configuration does not say"
    return SpecError(
        f"{type(request.model).__name__} needs {name}{why};"
        " give a factory that returns the model and its inputs"
    )

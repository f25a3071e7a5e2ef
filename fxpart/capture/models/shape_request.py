"""What shapes are inferred from: a model's settings, documentation and listed tasks."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fxpart.errors import SpecError

__all__ = [
    "AUDIO",
    "IMAGE",
    "MEL_BINS",
    "PLACEHOLDERS",
    "TEXT",
    "Request",
    "Shape",
    "documented",
    "documented_shape",
    "is_one_of",
    "listed",
    "part_setting",
    "unknown",
]

TEXT, IMAGE, AUDIO = ("text", "decoder"), ("vision", "image", "backbone"), ("audio", "speech")
MEL_BINS = (
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

PLACEHOLDERS = (
    "audio_token_id",
    "audio_token_index",
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
)
"""Settings of models that insert images and recordings into their text."""


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
    is_mask: bool = False
    """Whether the input is boolean; `is_real` is then ignored."""


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


def listed(task: str) -> set[str]:
    """Return the names of the classes that transformers lists for `task` among its Auto classes."""
    # Imported here since every capture imports this module, and transformers takes a second.
    from transformers.models.auto import modeling_auto

    names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
    entries = ([entry] if isinstance(entry, str) else entry for entry in names.values())
    return {name for entry in entries for name in entry}


def is_one_of(request: Request, task: str) -> bool:
    """Return whether transformers lists the model for `task` among its Auto classes."""
    return type(request.model).__name__ in listed(task)


def documented_shape(name: str, model: Any) -> list[str]:  # noqa: ANN401
    """Return the sizes of input `name` in the documentation of ``forward``."""
    text = type(model).forward.__doc__ or ""
    entry = re.search(
        rf"^\s*{re.escape(name)} \([^\n]*?shape\s*`?\(([^)\n]*)\)", text, re.MULTILINE
    )
    return [word.strip() for word in entry[1].split(",") if word.strip()] if entry else []


def documented(name: str, model: Any, index: int) -> str | None:  # noqa: ANN401
    """Return the documented name of one size of an input that has more sizes after it."""
    words = documented_shape(name, model)
    return words[index] if len(words) > index + 1 else None


def unknown(name: str, request: Request, why: str = "") -> SpecError:
    """Return the refusal of input `name`, whose shape cannot be inferred."""
    why = why or ", whose shape its configuration does not say"
    return SpecError(
        f"{type(request.model).__name__} needs {name}{why};"
        " give a factory that returns the model and its inputs"
    )

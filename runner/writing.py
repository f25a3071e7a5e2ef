"""Text and JSON files of a run: whole or absent, and the same text for the same content."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fxpart.whole_file import write_whole

__all__ = ["json_text", "write_json", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, making the folders above it; all of it or nothing.

    Raises `CacheError` when the place cannot be written.
    """
    write_whole(path, text, str(path), "choose another output folder")


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write `document` as `json_text` to `path`. Raises what `write_text` does."""
    write_text(path, json_text(document))


def json_text(document: Mapping[str, object]) -> str:
    """Return `document` as JSON with sorted keys: the same text for the same content.

    Numpy numbers and arrays become numbers and lists, paths become strings, and numbers that JSON
    has no word for (infinite, not a number) become null. Anything else is a TypeError.
    """
    return json.dumps(_plain(document), indent=1, sort_keys=True, allow_nan=False) + "\n"


def _plain(item: object) -> object:
    if item is None or isinstance(item, str | bool | int):
        return item
    if isinstance(item, np.ndarray | np.generic):
        return _plain(item.tolist())
    if isinstance(item, float):
        return item if math.isfinite(item) else None
    if isinstance(item, Mapping):
        return {str(key): _plain(value) for key, value in item.items()}
    if isinstance(item, Sequence) and not isinstance(item, bytes):
        return [_plain(value) for value in item]
    if isinstance(item, Path):
        return str(item)
    raise TypeError(f"{type(item).__name__} has no place in a JSON file")

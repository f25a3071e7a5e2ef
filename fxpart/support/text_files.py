"""Text and JSON files: written atomically, equal for equal content."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from fxpart.support.whole_file import write_whole

__all__ = ["json_text", "write_json", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write `text` atomically to `path` as UTF-8, creating its parent folders.

    Raises `CacheError` if it cannot be written.
    """
    write_whole(path, text, str(path), "choose another output folder")


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write `document` as `json_text` to `path`. Raises like `write_text`."""
    write_text(path, json_text(document))


def json_text(document: Mapping[str, object]) -> str:
    """Return `document` as JSON with sorted keys, so that equal content gives equal text.

    Numpy numbers and arrays become numbers and lists, paths become strings, and numbers that are
    not finite become null. Other types that JSON lacks raise a TypeError.

    The text equals that of `json.dumps` with an indent of 1, which is ten times slower, since its C
    encoder does not support indents.
    """
    return _text(document, 1) + "\n"


_PLAIN = frozenset({str, int, bool, type(None)})
"""Types that the JSON encoder handles directly."""


@lru_cache(maxsize=64)
def _encoder(depth: int) -> json.JSONEncoder:
    """Return an encoder of lists and mappings of plain values, indented by `depth`."""
    separators = (",\n" + " " * depth, ": ")
    return json.JSONEncoder(sort_keys=True, allow_nan=False, separators=separators)


def _text(item: object, depth: int) -> str:
    """Return `item` as JSON, with its members indented by `depth` spaces."""
    if isinstance(item, np.ndarray | np.generic):
        return _text(item.tolist(), depth)
    if isinstance(item, float):
        return float.__repr__(item) if math.isfinite(item) else "null"
    if isinstance(item, Path):
        return _encoder(depth).encode(str(item))
    if isinstance(item, Mapping):
        return _mapping_text({str(key): value for key, value in item.items()}, depth)
    if isinstance(item, Sequence) and not isinstance(item, str | bytes):
        return _sequence_text(item, depth)
    if item is None or isinstance(item, str | int):
        return _encoder(depth).encode(item)
    raise TypeError(f"{type(item).__name__} has no place in a JSON file")


def _mapping_text(item: Mapping[str, object], depth: int) -> str:
    if not item:
        return "{}"
    if _PLAIN.issuperset(map(type, item.values())):
        return _framed(_encoder(depth).encode(item), depth)
    encode = _encoder(depth).encode
    rows = [f"{encode(key)}: {_text(item[key], depth + 1)}" for key in sorted(item)]
    return _framed("{" + f",\n{' ' * depth}".join(rows) + "}", depth)


def _sequence_text(item: Sequence[object], depth: int) -> str:
    if not item:
        return "[]"
    if _PLAIN.issuperset(map(type, item)):
        return _framed(_encoder(depth).encode(list(item)), depth)
    rows = [_text(value, depth + 1) for value in item]
    return _framed("[" + f",\n{' ' * depth}".join(rows) + "]", depth)


def _framed(text: str, depth: int) -> str:
    """Return `text` with its brackets on lines of their own."""
    return f"{text[0]}\n{' ' * depth}{text[1:-1]}\n{' ' * (depth - 1)}{text[-1]}"

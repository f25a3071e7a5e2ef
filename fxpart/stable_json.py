"""Equal things as equal text, and the hash of it: how configurations and models are told apart."""

import hashlib
import json
from collections.abc import Mapping

__all__ = ["stable_digest"]


def stable_digest(parts: Mapping[str, object]) -> str:
    """Return the SHA-256 of `parts` as JSON with sorted keys, as 64 hex digits.

    Whatever JSON has no word for counts as what `str` says of it. Keys count as text: YAML knows
    numbers too, and the two cannot be sorted.
    """
    text = json.dumps(_text_keys(parts), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _text_keys(item: object) -> object:
    if isinstance(item, Mapping):
        return {str(key): _text_keys(value) for key, value in item.items()}
    return [_text_keys(value) for value in item] if isinstance(item, list | tuple) else item

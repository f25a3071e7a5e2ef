"""Attention of transformers models captured as they run, not as they export.

A model of transformers that runs without a padding mask leaves the mask out where attention can be
told that it is causal, or needs none. While it is exported it makes the mask, since the export
might be called with other lengths. Ours is of the shapes that it is captured for: with masks, and
copies of keys and values for every head that come with them, it would hold more than a run does.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["unmasked_attention"]

_MASKS = "transformers.masking_utils"
_EXPORTING = "is_torchdynamo_exporting"
_PACKED = "find_packed_sequence_indices"
_POSITIONS = "position_ids"


@contextmanager
def unmasked_attention(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Let models of transformers, while they are exported, leave out masks as when they run.

    A mask whose values decide is made all the same: one that the inputs bring, or that separates
    sequences packed into one row, which positions among the inputs may say. Nothing changes for
    other models, nor where transformers has no such questions. Not for several threads at once.

    Args:
        args: what the model is called with by position.
        kwargs: and by name.

    """
    masks = sys.modules.get(_MASKS)
    answers: dict[str, Callable[..., Any]] = {_EXPORTING: _no}
    if not args and _POSITIONS not in kwargs:
        # Positions that the model counts itself are of one sequence a row.
        answers[_PACKED] = _none
    asked = {name: getattr(masks, name) for name in answers if hasattr(masks, name)}
    for name in asked:
        setattr(masks, name, answers[name])
    try:
        yield
    finally:
        for name, question in asked.items():
            setattr(masks, name, question)


def _no() -> bool:
    return False


def _none(position_ids: object) -> None:
    return None

"""`largest`: the largest size that fits, with few costed sizes, since memory is close to linear."""

import math
from collections.abc import Callable

__all__ = ["Share", "largest"]

Share = Callable[[int], float]
"""The share of memory that a size takes on the fullest device: one above 1 does not fit."""
_MOST_GROWTH = 64
"""Most that one step of the search multiplies a size by."""
_MARGIN = 1.02
"""What the size that would fill the memory is multiplied by, so that the next step is beyond it."""


def largest(room: Share, needed: Share, known: int, limit: int) -> int:
    """Return the largest size up to `limit` whose `needed` share fits; `known` is one that does.

    Both shares increase with the size. `room` is cheap, and at most `needed`.
    """
    top = _beyond(room, known, limit)
    if top == known or (share := needed(top)) <= 1:
        return top
    return _last(needed, (known, needed(known)), (top, share))


def _beyond(room: Share, known: int, limit: int) -> int:
    """Return the largest size with `room`, searched for from `known` upwards."""
    low, share_low, size = known, room(known), min(2 * known, limit)
    while low < size and share_low <= 1:
        share = room(size)
        if share > 1:
            return _last(room, (low, share_low), (size, share))
        growth = (share - share_low) / (size - low)
        low, share_low, size = size, share, min(_after(size, share, growth), limit)
    return low


def _after(size: int, share: float, growth: float) -> int:
    """Return a size that probably does not fit any more, where each step of 1 adds `growth`."""
    if growth <= 0:
        return 2 * size
    full = size + (1 - share) / growth
    return math.ceil(min(_MARGIN * full, _MOST_GROWTH * size)) + 1


def _last(share: Share, low: tuple[int, float], high: tuple[int, float]) -> int:
    """Return the last size that fits between `low`, which does, and `high`, which does not.

    Both have their shares. Sizes are interpolated, and every third is the middle, so that a curve
    takes few steps too.
    """
    steps = 0
    while high[0] - low[0] > 1:
        between, steps = high[0] - low[0], steps + 1
        is_line = steps % 3 and math.isfinite(high[1])
        part = (1 - low[1]) / (high[1] - low[1]) if is_line else 0.5
        size = min(max(low[0] + int(part * between), low[0] + 1), high[0] - 1)
        taken = share(size)
        low, high = ((size, taken), high) if taken <= 1 else (low, (size, taken))
    return low[0]

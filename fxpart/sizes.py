"""Bytes as people read them."""

__all__ = ["show_bytes"]


def show_bytes(size: int) -> str:
    """Return `size` in the largest decimal unit that leaves a digit before the point: 26.23 GB."""
    for unit, step in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(size) >= step:
            return f"{size / step:.2f} {unit}"
    return f"{size} B"

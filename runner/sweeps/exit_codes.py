"""How the sweeps of this process ended: Hydra returns nothing from a sweep."""

__all__ = ["exit_code", "remember"]

_codes: list[int] = []


def remember(code: int) -> None:
    """Keep the exit code of a sweep that this process led."""
    _codes.append(code)


def exit_code() -> int | None:
    """Return the largest of them, None if this process led no sweep."""
    return max(_codes, default=None)

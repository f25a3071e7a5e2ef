"""Round numbers for the axes of figures."""

import math

__all__ = ["ticks"]


def ticks(top: float, about: int) -> list[float]:
    """Return round numbers from 0 to `top`, around `about` of them above 0."""
    if top <= 0:
        return [0.0]
    rough = top / about
    decade = 10.0 ** math.floor(math.log10(rough))
    step = min((1, 2, 2.5, 5, 10), key=lambda factor: abs(factor * decade - rough)) * decade
    return [float(f"{i * step:.6g}") for i in range(int(top / step) + 1)]

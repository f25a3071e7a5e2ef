"""The one place that knows how inner loops are compiled: numba, cached on disk after the first use.

Numba's cache notices a change of the file that a loop stands in, not of the loops that it calls in
other files: after editing a kernel, delete ``__pycache__`` (``make clean``).
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

__all__ = ["compiled"]

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """Return `function` compiled to machine code; the code is cached beside the source."""
    return cast("_F", numba.njit(cache=True, nogil=True)(function))

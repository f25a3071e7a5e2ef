"""The one place that knows how inner loops are compiled: numba, cached on disk after the first use.

Numba takes cached code for fresh while the file that a loop stands in is unchanged, although the
loops that it calls, inlined in that code, may have changed in another file. So here the freshness
of every loop covers all files that loops stand in.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

__all__ = ["compiled"]

_F = TypeVar("_F", bound=Callable[..., Any])


@cache
def _loops_digest() -> str:
    """Return a hash of the source of every package file that could hold a compiled loop."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*here.glob("*.py"), *here.glob("cost/*.py"), *here.glob("modes/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compiled(function: _F) -> _F:
    """Return `function` compiled to machine code; the code is cached beside the source."""
    dispatcher = numba.njit(cache=True, nogil=True)(function)
    # Numba has no public way to add to what decides freshness; without this attribute its own
    # rule, file by file, remains.
    cache_file = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if cache_file is not None and hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = (cache_file._source_stamp, _loops_digest())
    return cast("_F", dispatcher)

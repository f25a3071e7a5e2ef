"""`in_one_piece`: run deeply nested calls without a system call for each of them.

CPython 3.11 and later keep the frames of a thread in pieces of 16 KiB, some hundred calls each. A
call beyond the end of a piece maps a new one, and its return unmaps it: a loop that happens to be
just as deep as that pays for it in each round. A ``phase=generate`` run, which captures symbolic
sizes, lost a tenth of its CPU time to this. An interpreter that keeps frames otherwise is neither
faster nor slower.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["in_one_piece"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_SLOTS = 150_000
"""Of 8 bytes each: the frame has 1.2 MB and its piece 2 MiB, which leaves 0.8 MiB for the calls
inside. The slots are never written, and so take no memory."""


def in_one_piece(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return `function` called in a frame so large that the frames of all it calls fit its piece.

    CPython rounds a new piece up to a power of two that holds the frame it is mapped for.
    """

    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_SLOTS)
    return wraps(function)(call)

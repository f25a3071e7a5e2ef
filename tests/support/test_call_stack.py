"""Deeply nested calls, and the system calls that they need."""

import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fxpart.support.call_stack import in_one_piece


def _deep(depth: int, run: Callable[[], int]) -> int:
    return _deep(depth - 1, run) if depth else run()


def _leaf() -> int:
    return 1


# Larger than a frame of `_deep`, so that one of its depths leaves too little room for this.
_leaf.__code__ = _leaf.__code__.replace(co_stacksize=64)


def _most_faults() -> int:
    """Return the most page faults of 500 calls, over depths of which some end a piece."""
    most = 0
    for depth in range(200, 400):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        _deep(depth, lambda: sum(_leaf() for _ in range(500)))
        most = max(most, resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    return most


def test_no_piece_is_mapped_for_each_call() -> None:
    # In new threads, since the test itself runs in one piece.
    with ThreadPoolExecutor(max_workers=1) as thread:
        assert thread.submit(_most_faults).result() > 400
        assert thread.submit(in_one_piece(_most_faults)).result() < 100


def test_arguments_and_result_are_those_of_the_function() -> None:
    assert in_one_piece(divmod)(7, 2) == (3, 1)
    assert in_one_piece(_leaf).__name__ == "_leaf"

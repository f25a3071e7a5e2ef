"""How many threads the numerical libraries of a worker may start."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["environment", "thread_counts"]

_NAMES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)


def thread_counts(cores: int, processes: int) -> dict[str, str]:
    """Return the environment in which all processes together have a thread for each core.

    Every library would otherwise start as many threads in each process as there are cores. What the
    user has set stays.
    """
    each = str(max(1, cores // processes))
    return {name: os.environ.get(name, each) for name in _NAMES}


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Have processes that are started in here inherit `variables`."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text

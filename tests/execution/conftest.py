"""The common setup of tests with real runs."""

from collections.abc import Iterator

import pytest

from fxpart.execution.device import torch_threads


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread, so that sums have one order."""
    with torch_threads(1):
        yield

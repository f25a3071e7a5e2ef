"""What tests of real runs start from."""

from collections.abc import Iterator

import pytest

from fxpart.execution.device import torch_threads


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread: then sums have one order."""
    with torch_threads(1):
        yield

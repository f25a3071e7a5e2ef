"""Random numbers that depend on a seed alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["seeded"]


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators, of `device` too, and put them back afterwards."""
    others = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=others):
        torch.manual_seed(seed)
        yield

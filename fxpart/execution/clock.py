"""Time and allocated memory of a run, on the CPU and on CUDA devices."""

import time
from collections.abc import Callable

import torch

__all__ = ["allocated_peaks", "timed_in_turns"]


def allocated_peaks(
    step: Callable[[], object], physical: tuple[torch.device, ...]
) -> tuple[int, ...]:
    """Return the most bytes that torch's allocator gave out on each CUDA device in one run."""
    used = sorted({device.index for device in physical if device.type == "cuda"})
    for index in used:
        torch.cuda.synchronize(index)
        torch.cuda.reset_peak_memory_stats(index)
    if used:
        step()
    for index in used:
        torch.cuda.synchronize(index)
    return tuple(int(torch.cuda.max_memory_allocated(index)) for index in used)


def timed_in_turns(
    step: Callable[[], object],
    unsplit: Callable[[], object],
    physical: tuple[torch.device, ...],
    repeats: int,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the times of `repeats` runs of each in s; both have been run before."""
    split_s, unsplit_s = [], []
    for _ in range(repeats):
        split_s.append(_seconds(step, physical))
        unsplit_s.append(_seconds(unsplit, physical))
    return tuple(split_s), tuple(unsplit_s)


def _seconds(step: Callable[[], object], physical: tuple[torch.device, ...]) -> float:
    _wait(physical)
    begin = time.perf_counter()
    step()
    _wait(physical)
    return time.perf_counter() - begin


def _wait(physical: tuple[torch.device, ...]) -> None:
    """Wait for what CUDA devices still compute; the CPU never lags behind."""
    for device in dict.fromkeys(physical):
        if device.type == "cuda":
            torch.cuda.synchronize(device)

"""What operators were measured on, and the clock that fits it."""

import time
from collections.abc import Callable
from typing import Any

import torch

from fxpart.execution.device_name import device_name

__all__ = ["Call", "measured_on", "timed_call"]

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function and what it is called with."""

_HEAD_START_CYCLES = 200_000
"""Clock cycles (about 0.1 ms) that a GPU waits while the host prepares an operator's launch."""


def measured_on(device: torch.device) -> str:
    """Return the device's name; of a CPU, with the threads that torch uses."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{device_name(device)}, {threads} thread{'s' if threads > 1 else ''}"
    return device_name(device)


def timed_call(device: torch.device, box: list[Call]) -> tuple[Any, float]:
    """Return what the one call in `box` returns, and its time in seconds; `box` is left empty.

    The box lets go of the arguments, so that what nobody else holds is freed within the time
    measured, as it is in a real run.

    On a GPU: the larger of the kernels' time, between two events that the host has queued before
    they run, and the host's time to launch them. A host that launches ahead hides the smaller.
    """
    if device.type == "cpu":
        call, args, kwargs = box.pop()
        begin = time.perf_counter()
        result = call(*args, **kwargs)
        del args, kwargs
        return result, time.perf_counter() - begin
    return _timed_on_gpu(device, box)


def _timed_on_gpu(device: torch.device, box: list[Call]) -> tuple[Any, float]:
    call, args, kwargs = box.pop()
    with torch.cuda.device(device):
        first, last = _event(), _event()
        torch.cuda.synchronize()
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        first.record()
        begin = time.perf_counter()
        result = call(*args, **kwargs)
        del args, kwargs
        launch_s = time.perf_counter() - begin
        last.record()
        torch.cuda.synchronize()
        return result, max(launch_s, first.elapsed_time(last) / 1e3)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

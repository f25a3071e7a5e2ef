"""The device that operators are measured on, and the clock that fits it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fxpart.cost.machine import cpu_name
from fxpart.errors import SpecError

__all__ = ["Call", "device_name", "free_bytes", "timed_call", "usable_device"]

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function and what it is called with."""

_HEAD_START_CYCLES = 200_000
"""Clock cycles (about 0.1 ms) that a GPU waits while the host prepares an operator's launch."""


def usable_device(name: str) -> torch.device:
    """Return the device of that name.

    Raises:
        SpecError: for one that does not exist, or that is not on this machine.

    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise SpecError(f"device={name} cannot be measured on; there are: cpu, cuda, cuda:<number>")
    if device.type == "cpu":
        return device
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= there:
        raise SpecError(
            f"device={name} is not here: this machine has {there} CUDA devices; use cpu"
        )
    return device


def device_name(device: torch.device) -> str:
    """Return what the device calls itself; of a CPU, with the threads that torch uses."""
    if device.type == "cpu":
        return f"{cpu_name()}, {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name(device)


def free_bytes(device: torch.device) -> int:
    """Return memory of the device that is not taken, or 1 GiB where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as lines:
            said = dict(line.split(":", 1) for line in lines)
        return int(said["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2**30


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

"""Devices of this machine: names, free memory, timed runs, threads and seeds."""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fxpart.errors import SpecError
from fxpart.support.host import cpu_name

__all__ = [
    "allocated_peaks",
    "checked_device",
    "device_name",
    "free_bytes",
    "seeded",
    "timed_in_turns",
    "torch_threads",
]

_MEMORY_FACTS = Path("/proc/meminfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def checked_device(device: str | torch.device) -> torch.device:
    """Return the CPU or CUDA device of that name, with its index.

    Raises:
        SpecError: if torch does not know the name, or this machine lacks the device.

    """
    try:
        named = torch.device(device)
    except RuntimeError as error:
        raise SpecError(f"device {device!r} is not known; give cpu or cuda") from error
    count = torch.cuda.device_count()
    if named.type == "cuda" and (named.index or 0) < count:
        return torch.device("cuda", named.index or 0)
    if named.type == "cpu":
        return torch.device("cpu")
    present = f"cpu and {count} CUDA device{'s' if count > 1 else ''}" if count else "cpu alone"
    raise SpecError(f"device {str(device)!r} is not here; there is {present}; choose one of these")


def device_name(device: torch.device) -> str:
    """Return the model name of the processor or GPU, if known."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return cpu_name()


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated on `device` without swapping.

    On the CPU: the system's available memory or, if less, that of the container's control group.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    group_bytes = _free_in_control_group()
    return _free_on_host() if group_bytes is None else min(group_bytes, _free_on_host())


def _free_on_host() -> int:
    if _MEMORY_FACTS.exists():
        stated = re.search(r"^MemAvailable:\s*(\d+) kB", _MEMORY_FACTS.read_text(), re.MULTILINE)
        if stated:
            return int(stated[1]) * 1024
    # Without Linux's estimate, use the free pages or, if unknown, all pages.
    known_names = os.sysconf_names
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in known_names else "SC_PHYS_PAGES"
    return int(os.sysconf(pages)) * int(os.sysconf("SC_PAGE_SIZE"))


def _free_in_control_group() -> int | None:
    """Return the free bytes under the control group's limit (version 1 or 2), or None if unlimited.

    Cached file pages count as used, but can be reclaimed.
    """
    for limit, used, cached in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        limit_file = _CONTROL_GROUP / limit
        if not limit_file.exists() or not (limit_bytes := limit_file.read_text().strip()).isdigit():
            continue
        facts = (_CONTROL_GROUP / cached).read_text()
        reclaimable = re.search(r"^inactive_file (\d+)", facts, re.MULTILINE)
        used_bytes = int((_CONTROL_GROUP / used).read_text())
        used_bytes -= int(reclaimable[1]) if reclaimable else 0
        return max(0, int(limit_bytes) - used_bytes)
    return None


def allocated_peaks(
    step: Callable[[], object], physical: tuple[torch.device, ...]
) -> tuple[int, ...]:
    """Return the peak bytes of torch's allocator on each CUDA device during one run."""
    gpu_indices = sorted({device.index for device in physical if device.type == "cuda"})
    for index in gpu_indices:
        torch.cuda.synchronize(index)
        torch.cuda.reset_peak_memory_stats(index)
    if gpu_indices:
        step()
    for index in gpu_indices:
        torch.cuda.synchronize(index)
    return tuple(int(torch.cuda.max_memory_allocated(index)) for index in gpu_indices)


def timed_in_turns(
    step: Callable[[], object],
    unsplit: Callable[[], object],
    physical: tuple[torch.device, ...],
    repeats: int,
    before: Callable[[], object] = tuple,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the seconds of `repeats` alternating runs of each. Both must be warmed up.

    `before` is called before each run, untimed.
    """
    split_s, unsplit_s = [], []
    for _ in range(repeats):
        before()
        split_s.append(_seconds(step, physical))
        before()
        unsplit_s.append(_seconds(unsplit, physical))
    return tuple(split_s), tuple(unsplit_s)


def _seconds(step: Callable[[], object], physical: tuple[torch.device, ...]) -> float:
    _wait(physical)
    begin = time.perf_counter()
    step()
    _wait(physical)
    return time.perf_counter() - begin


def _wait(physical: tuple[torch.device, ...]) -> None:
    """Wait for the CUDA devices; the CPU computes synchronously."""
    for device in dict.fromkeys(physical):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use `count` CPU threads inside the block."""
    previous_count = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous_count)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators, including that of `device`, and restore them afterwards."""
    gpus = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(seed)
        yield

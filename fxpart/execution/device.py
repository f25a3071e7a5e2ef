"""What a device is called: a measurement says on what it was made."""

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


def checked_device(device: str | torch.device) -> torch.device:
    """Return the device that is named, which models can really be run on.

    Raises:
        SpecError: for a name that torch does not know, and a device that is not there.

    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise SpecError(f"device {device!r} is not known; give cpu or cuda") from error
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) < count:
        return torch.device("cuda", found.index or 0)
    if found.type == "cpu":
        return torch.device("cpu")
    there = f"cpu and {count} CUDA device{'s' if count > 1 else ''}" if count else "cpu alone"
    raise SpecError(f"device {str(device)!r} is not here; there is {there}; choose one of these")


def device_name(device: torch.device) -> str:
    """Return the name of the processor that `device` is, as its maker sells it where known."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return cpu_name()


# How much memory a model may still take on a device of this machine.

_HOST_FACTS = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated on `device` without swapping.

    On the CPU that is what the system and, in a container, its control group leave.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    left = _left_of_group()
    return _left_of_host() if left is None else min(left, _left_of_host())


def _left_of_host() -> int:
    if _HOST_FACTS.exists():
        stated = re.search(r"^MemAvailable:\s*(\d+) kB", _HOST_FACTS.read_text(), re.MULTILINE)
        if stated:
            return int(stated[1]) * 1024
    # Without Linux's own estimate: the pages that hold nothing, or, failing these, all pages.
    known = os.sysconf_names
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in known else "SC_PHYS_PAGES"
    return int(os.sysconf(pages)) * int(os.sysconf("SC_PAGE_SIZE"))


def _left_of_group() -> int | None:
    """Return what the limit of the control group leaves; None without a limit.

    Both versions of control groups are known. Pages of files count as used, but can be taken back.
    """
    for limit, used, cached in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        most = _GROUP / limit
        if not most.exists() or not (said := most.read_text().strip()).isdigit():
            continue
        stated = re.search(r"^inactive_file (\d+)", (_GROUP / cached).read_text(), re.MULTILINE)
        taken = int((_GROUP / used).read_text()) - (int(stated[1]) if stated else 0)
        return max(0, int(said) - taken)
    return None


# Time and allocated memory of a run, on the CPU and on CUDA devices.


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


# How many threads torch computes with on the CPU, for a while.


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute with `count` threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Random numbers that depend on a seed alone.


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators, of `device` too, and put them back afterwards."""
    others = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=others):
        torch.manual_seed(seed)
        yield

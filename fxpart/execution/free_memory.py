"""How much memory a model may still take on a device of this machine."""

import os
import re
from pathlib import Path

import torch

__all__ = ["free_bytes"]

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

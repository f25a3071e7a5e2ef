"""Identify this machine and the installed packages, without torch.

Times measured on one machine are not valid on another.
"""

import os
import platform
from functools import cache
from pathlib import Path

__all__ = ["available_cores", "cpu_name", "host_memory_bytes", "installed_version", "machine_key"]


_CPU_INFO, _NVIDIA = Path("/proc/cpuinfo"), Path("/proc/driver/nvidia/gpus")
_CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def cpu_name() -> str:
    """Return the processor's model name, such as ``AMD EPYC 9654``."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine() or "unknown processor"


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    available = getattr(os, "sched_getaffinity", None)
    return len(available(0)) if available else os.cpu_count() or 1


def host_memory_bytes() -> int:
    """Return the memory of this machine, or the limit of its container if that is less."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _CONTAINER_LIMITS:
        try:
            text = path.read_text(encoding="utf-8").strip()
        except OSError:
            continue
        sizes += [int(text)] if text.isdecimal() else []  # "max" is no limit
    return min(sizes)


def machine_key(device: str) -> dict[str, object]:
    """Return a JSON-serializable key of this machine's `device` (``cpu``, ``cuda``, ``cuda:1``).

    For a CPU it has the model and everything that decides torch's initial number of threads. A
    program that sets this number itself should add it to its own keys.
    """
    if device.partition(":")[0] == "cpu":
        cores = available_cores()
        threads = {name: os.environ.get(name) for name in _THREADS}
        return {"device": device, "cpu": cpu_name(), "cores": cores, **threads}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"device": device, "gpus": _gpu_models(), "visible": visible}


def _gpu_models() -> list[str]:
    """Return the GPU models listed by the driver, empty if it lists none."""
    models = []
    for path in sorted(_NVIDIA.glob("*/information")):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        models += [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
    return models


@cache
def installed_version(package: str) -> str | None:
    """Return the version of a package without importing it, None if it is not installed.

    Cached, since reading the metadata takes a millisecond.
    """
    # Imported here, since it takes longer than all the rest of this file.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None

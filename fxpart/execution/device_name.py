"""What a device is called: a measurement says on what it was made."""

import torch

from fxpart.cost.machine import cpu_name
from fxpart.errors import SpecError

__all__ = ["checked_device", "device_name"]


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

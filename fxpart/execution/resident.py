"""How much memory this process has had at most."""

import re
import resource
import sys
from pathlib import Path

__all__ = ["largest_resident_bytes"]

_STATUS = Path("/proc/self/status")


def largest_resident_bytes() -> int:
    """Return the largest resident set of this process so far, libraries included."""
    if _STATUS.exists():
        # Since this program began. What getrusage says is at least what the parent had.
        stated = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
        if stated:
            return int(stated[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

"""A transfer rate as one word: ``16gb``, ``25gbit``, ``16e9``."""

import math
import re
from typing import Any

from fxpart.errors import SpecError

__all__ = ["TRANSFER_GRAMMAR", "looks_like_rate", "transfer_rate"]

TRANSFER_GRAMMAR = (
    "a rate one way, in bytes per second such as 16gb or 16e9, or in bits per second such as 25gbit"
)
"""How a transfer rate is written, for messages and help."""

_RATE = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)([a-z/]*)")
_PER_S = {
    "": 1.0,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "mbit": 1e6 / 8,
    "gbit": 1e9 / 8,
    "tbit": 1e12 / 8,
}
_LATENCY_S = 10e-6


def looks_like_rate(name: str) -> bool:
    """Return whether `name` starts as a rate does, so that a message about rates helps."""
    return bool(re.match(r"[-+]?\.?\d", name))


def transfer_rate(spec: str) -> dict[str, Any]:
    """Return ``{name, bytes_per_s, latency_s, source}`` for the rate that `spec` states.

    Raises:
        SpecError: for an unknown unit or a rate that is not positive and finite.

    """
    asked = f"transfer_rate={spec}"
    found = _RATE.fullmatch(spec.strip().lower())
    if not found or found[2] not in _PER_S:
        units = ", ".join(unit for unit in _PER_S if unit)
        raise SpecError(f"{asked}: not a number with one of {units}, or bare; {_HOW}")
    bytes_per_s = float(found[1]) * _PER_S[found[2]]
    if not 0 < bytes_per_s < math.inf:
        raise SpecError(f"{asked}: the rate must be positive and finite; {_HOW}")
    return {
        "name": spec,
        "bytes_per_s": bytes_per_s,
        "latency_s": _LATENCY_S,
        "source": "rate as asked for; latency assumed",
    }


_HOW = f"write {TRANSFER_GRAMMAR}"

"""Devices, sizes and rates as text."""

import math
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fuzz.judge import Tally
from fxpart.core.device_spec import MAX_DEVICES, MAX_MEMORY_BYTES, parse_devices, parse_size_bytes
from runner.config.specs import device_pools, transfer_rate

__all__ = ["fuzz_specs"]

_ODD = ("-1", "-0.5", "0", "1e400", "nan", "inf", "9" * 30, "9" * 5000, "0.0000000001")
_NUMBER = st.one_of(
    st.sampled_from(_ODD),
    st.integers(1, 64).map(str),
    st.integers(-10, 10**7).map(str),
    st.floats(0, 1e6).map("{:.6f}".format),
)
_UNIT = st.sampled_from(("", "mb", "gb", "tb", "gib", "tib", "kb", "gbit", "GB", "b/s", "\0", "ß"))
_PART = st.builds("{}x{}{}".format, _NUMBER, _NUMBER, _UNIT) | st.builds(
    "{}x{}".format, _NUMBER, st.sampled_from(("h100", "t4", "cpu", "a100_80gb", "x", ""))
)
_DEVICES = st.lists(_PART, min_size=1, max_size=4).map("+".join) | st.text(max_size=40)
_SIZE = st.builds("{}{}".format, _NUMBER, _UNIT) | st.text(max_size=20)
_NEGATIVE = st.builds("-{}{}".format, st.floats(0, 1e9).map("{:.3f}".format), _UNIT)


def _check_pools(pools: Any) -> str | None:  # noqa: ANN401 - pools of either form
    counts = [p["count"] if isinstance(p, dict) else p.count for p in pools]
    sizes = [p["memory_bytes"] if isinstance(p, dict) else p.memory_bytes or 1 for p in pools]
    if min(counts) < 1 or sum(counts) > MAX_DEVICES:
        return f"counts {counts}"
    return None if all(map(_is_size, sizes)) else f"sizes {sizes}"


def _is_size(size_bytes: int) -> bool:
    return 1 <= size_bytes <= MAX_MEMORY_BYTES


def _check_rate(values: dict[str, Any]) -> str | None:
    rate = values["bytes_per_s"]
    return None if 0 < rate < math.inf else f"rate {rate}"


def fuzz_specs(run: Callable[[Any, int], None], cases: int) -> Tally:
    """Try `cases` texts; `run` runs a hypothesis test on a number of examples."""
    tally = Tally("specs")
    accelerators = ("h100", "t4", "cpu", "a100_80gb")

    @given(_DEVICES, st.booleans())
    def devices(text: str, shipped: bool) -> None:
        if shipped:
            tally.attempt(f"device_pools {text!r}", lambda: device_pools(text), _check_pools)
        else:
            work = f"parse_devices {text!r}"
            tally.attempt(work, lambda: parse_devices(text, accelerators), _check_pools)

    @given(_SIZE | _NEGATIVE)
    def sizes(text: str) -> None:
        tally.attempt(
            f"parse_size_bytes {text!r}",
            lambda: parse_size_bytes(text),
            lambda size: None if _is_size(size) else f"size {size}",
            must_fail=text.strip().startswith("-") or "nan" in text or "inf" in text,
        )

    @given(_SIZE | _NEGATIVE)
    def rates(text: str) -> None:
        tally.attempt(
            f"transfer_rate {text!r}",
            lambda: transfer_rate(text),
            _check_rate,
            must_fail=text.strip().startswith("-") or "nan" in text or "inf" in text,
        )

    for test, share in ((devices, 2), (sizes, 4), (rates, 4)):
        run(test, cases // share)
    return tally

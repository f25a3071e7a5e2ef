"""Devices given as one word."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.core.device_spec import (
    DEVICE_GRAMMAR,
    MAX_DEVICES,
    PoolSpec,
    parse_devices,
    parse_size_bytes,
)
from fxpart.errors import SpecError

ACCELERATORS = ("a10", "a100_40gb", "a100_80gb", "h100", "mi300x", "rtx_3070", "t4")


def sized(count: int, memory_bytes: int) -> PoolSpec:
    return PoolSpec(count, memory_bytes, None)


def named(count: int, accelerator: str) -> PoolSpec:
    return PoolSpec(count, None, accelerator)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("16gb", 16_000_000_000),
        ("16GB", 16_000_000_000),
        ("16gib", 17_179_869_184),
        ("1.5gb", 1_500_000_000),
        ("1.5GiB", 1_610_612_736),
        (".5gb", 500_000_000),
        ("512mb", 512_000_000),
        ("512MiB", 536_870_912),
        ("2tb", 2_000_000_000_000),
        ("1tib", 1_099_511_627_776),
        (" 8gb ", 8_000_000_000),
        # In floats 0.1 * 10^9 is exact by luck, but 4.35 * 10^12 is 4349999999999.9995.
        ("4.35tb", 4_350_000_000_000),
    ],
)
def test_sizes_are_exact_bytes(text: str, size_bytes: int) -> None:
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16", "has no unit"),
        ("16gbb", "unknown unit 'gbb'"),
        ("16kb", "unknown unit 'kb'"),
        ("0gb", "must be positive"),
        ("-16gb", "must be positive"),
        ("0.0000001mb", "less than one byte"),
        ("gb", "is not a number and a unit"),
        ("", "is not a number and a unit"),
        ("1e9gb", "is not a number and a unit"),
        ("4504tb", "is more than 4503.60 TB, the most that is counted"),
        (f"{'9' * 5000}gb", "has more than 40 digits"),
    ],
)
def test_a_wrong_size_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_size_bytes(text)


@pytest.mark.parametrize(
    ("spec", "pools"),
    [
        ("4x16gb", (sized(4, 16 * 10**9),)),
        ("16gb", (sized(1, 16 * 10**9),)),
        ("4X16GB", (sized(4, 16 * 10**9),)),
        ("2x80gb+4x16gb", (sized(2, 80 * 10**9), sized(4, 16 * 10**9))),
        ("4x16gb+2x80gb", (sized(4, 16 * 10**9), sized(2, 80 * 10**9))),
        ("8x1.5gib", (sized(8, 3 * 2**29),)),
        ("4xa100_80gb", (named(4, "a100_80gb"),)),
        ("2xH100+4xt4", (named(2, "h100"), named(4, "t4"))),
        ("h100+16gb", (named(1, "h100"), sized(1, 16 * 10**9))),
        # Names that contain an x.
        ("2xmi300x", (named(2, "mi300x"),)),
        ("rtx_3070", (named(1, "rtx_3070"),)),
        (f"{MAX_DEVICES}x1gb", (sized(MAX_DEVICES, 10**9),)),
    ],
)
def test_pools_come_in_the_order_of_the_spec(spec: str, pools: tuple[PoolSpec, ...]) -> None:
    assert parse_devices(spec, ACCELERATORS) == pools


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("4x16", "size '16' has no unit"),
        ("0x16gb", "count 0 in '0x16gb' must be at least 1"),
        ("-1x16gb", "count -1"),
        ("4x16gbb", "unknown unit 'gbb'"),
        ("4x", "has a count but no size"),
        ("4x16gb+", "a part is empty"),
        ("+4x16gb", "a part is empty"),
        ("", "a part is empty"),
        ("2x1000000tb", "is more than 4503.60 TB"),
        (f"{'9' * 5000}x1gb", "has more than 40 digits"),
        ("-1", "must be positive"),
        ("0", "must be positive"),
        ("4xa10000", "there is no accelerator 'a10000', nearest: a100_80gb, a100_40gb, a10"),
        ("2xh10", "nearest: h100"),
        (f"{MAX_DEVICES}x1gb+1x1gb", f"1025 devices are too many, at most {MAX_DEVICES}"),
    ],
)
def test_a_wrong_spec_is_refused_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_devices(spec, ACCELERATORS)
    line = str(caught.value)
    assert line.startswith(f"devices={spec}: ")
    assert message in line
    assert line.endswith(DEVICE_GRAMMAR)
    assert "\n" not in line


def test_without_a_table_a_name_is_refused() -> None:
    with pytest.raises(SpecError, match="none are known here"):
        parse_devices("4xh100")


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 999)), min_size=1, max_size=5))
def test_a_written_spec_is_read_back(parts: list[tuple[int, int]]) -> None:
    spec = "+".join(f"{count}x{mb}mb" for count, mb in parts)
    assert parse_devices(spec) == tuple(sized(count, mb * 10**6) for count, mb in parts)

import pytest

from runner.output.units import format_ids, format_s, format_size, size_unit


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (80 * 10**9, "74.51 GiB"),
        (5 * 2**40, "5120 GiB"),
    ],
)
def test_sizes_have_their_unit(size_bytes: int, expected: str) -> None:
    assert format_size(size_bytes) == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (1.5, 2.5, ("1.50", "2.50")),
        (1.5, 1.5, ("1.50", "1.50")),
        (1.5, 1.5001, ("1.5000", "1.5001")),
        (5120, 5120.5, ("5120.0", "5120.5")),
    ],
)
def test_unequal_sizes_have_the_decimals_that_tell_them_apart(
    first: float, second: float, expected: tuple[str, str]
) -> None:
    gib = size_unit(2**30)
    assert gib.show_unequal(first * gib.size, second * gib.size) == expected


@pytest.mark.parametrize(
    ("time_s", "expected"),
    [(0.0, "0.00 ms"), (5e-6, "5.00 us"), (0.01234, "12.34 ms"), (15.0, "15.00 s")],
)
def test_times_have_their_unit(time_s: float, expected: str) -> None:
    assert format_s(time_s) == expected


@pytest.mark.parametrize(
    ("ids", "expected"), [((), "-"), ((3,), "3"), ((0, 1, 2, 5, 7, 8), "0-2, 5, 7-8")]
)
def test_runs_of_numbers_are_joined(ids: tuple[int, ...], expected: str) -> None:
    assert format_ids(ids) == expected

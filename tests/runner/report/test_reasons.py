"""Why jobs have no result."""

from runner.report.reasons import sweep_reasons
from tests.runner.report.sweeps import row, sweep, unfit


def test_a_few_are_said_one_by_one() -> None:
    rows = [row(1.0, mode="a"), unfit("needs 3 GiB", mode="b"), row(status="failed", mode="c")]
    assert sweep_reasons(sweep(rows, "mode")) == ["mode=b: needs 3 GiB", "mode=c: failed"]


def test_many_alike_are_one_line() -> None:
    rows = [
        unfit(f"{mode}: needs 24.2 GiB, {devices} has {size} GiB", mode=mode, devices=devices)
        for mode in ("single", "size_based")
        for devices, size in (("1x16gb", 16.0), ("1x8gb", 7.5))
    ]
    assert sweep_reasons(sweep(rows, "mode", "devices")) == [
        "4 jobs do not fit (mode=single,size_based devices=1x16gb,1x8gb): such as: single: needs"
        " 24.2 GiB, 1x16gb has 16.0 GiB"
    ]


def test_many_values_are_counted() -> None:
    rows = [unfit("too large", model__batch_size=str(size)) for size in range(9)]
    assert sweep_reasons(sweep(rows, "model.batch_size")) == [
        "9 jobs do not fit (9 values of model.batch_size): too large"
    ]


def test_too_many_reasons_are_cut() -> None:
    rows = [unfit("because " + "x" * count, mode=f"m{count}") for count in range(12)]
    data = sweep(rows, "mode")
    lines = sweep_reasons(data, 8)
    assert (len(lines), lines[-1]) == (8, "and 5 more reasons; the report has all")
    assert len(sweep_reasons(data)) == 12


def test_a_result_that_was_not_recorded_is_said() -> None:
    rows = [row(1.0, error="no space left"), row(2.0, mode="b"), row(status="running")]
    assert sweep_reasons(sweep(rows)) == ["mode=kl_based: no space left"]


def test_what_was_lost_is_said() -> None:
    """A job whose process was killed said nothing, unless its launcher knows why."""
    rows = [row(1.0), row(status="lost", mode="b"), row(None, "lost", "out of memory", mode="c")]
    assert sweep_reasons(sweep(rows)) == [
        "mode=b: lost: its process was killed",
        "mode=c: out of memory",
    ]
    many = [row(status="lost", mode=f"m{n}") for n in range(9)]
    assert sweep_reasons(sweep([row(1.0), *many])) == [
        "9 jobs were lost (9 values of mode): lost: its process was killed"
    ]

"""The findings of a sweep, in words."""

from runner.report.findings import counts_text, sweep_reasons, verdict
from runner.report.ranking import ranked
from tests.runner.report.sweeps import row, sweep, unfit


def test_the_best_job_and_its_alternatives() -> None:
    rows = [
        row(50.0, mode="a", metrics={"devices_used": 4.0, "peak_memory_gib": 2.0}),
        row(100.0, mode="b", metrics={"devices_used": 1.0, "peak_memory_gib": 8.0}),
        row(60.0, mode="c", metrics={"devices_used": 4.0, "peak_memory_gib": 1.0}),
        row(200.0, mode="d", metrics={"devices_used": 4.0, "peak_memory_gib": 9.0}),
    ]
    answer = verdict(ranked(sweep(rows, "mode")), "gpt2")
    assert answer.sentence == (
        "mode=a: 50.000 ms, 37.5 % less than the median of 4 results and 75.0 % less than the"
        " slowest. It uses 4 devices, the fullest of which holds 2.000 GiB."
    )
    assert answer.instead == (
        "Fewest devices: mode=b, 100.000 ms (+100.0 %), 8.000 GiB, 1 device",
        "Least memory: mode=c, 60.000 ms (+20.0 %), 1.000 GiB, 4 devices",
    )


def test_one_job_that_is_best_in_both() -> None:
    rows = [
        row(1.0, mode="a"),
        row(2.0, mode="b", metrics={"devices_used": 1.0, "peak_memory_gib": 1.0}),
    ]
    answer = verdict(ranked(sweep(rows, "mode")), "gpt2")
    assert answer.instead == (
        "Fewest devices and least memory: mode=b, 2.000 ms (+100.0 %), 1.000 GiB, 1 device",
    )


def test_of_equal_jobs_the_one_with_the_shorter_name() -> None:
    """A larger machine, in which devices stay idle."""
    used = {"devices_used": 1.0}
    rows = [
        row(1.0, devices="4x16gb"),
        *(row(2.0, devices=box, metrics=used) for box in ("1x16gb+1x24gb", "1x24gb")),
    ]
    (instead,) = verdict(ranked(sweep(rows, "devices")), "gpt2").instead
    assert instead.startswith("Fewest devices: devices=1x24gb, 2.000 ms")


def test_a_time_names_what_it_measures() -> None:
    rows = [
        row(1.0, model__batch_size="1", metrics={"examples_per_s": 1000.0}),
        row(2.0, model__batch_size="4", metrics={"examples_per_s": 2000.0}),
    ]
    answer = verdict(ranked(sweep(rows, "model.batch_size")), "gpt2")
    assert answer.sentence.startswith("model.batch_size=4: 0.500 ms per example, ")


def test_alone_and_equal() -> None:
    alone = verdict(ranked(sweep([row(1.0, metrics={"devices_used": 1.0})])), "gpt2")
    assert alone.sentence == (
        "a job: 1.000 ms, the only result. It uses 1 device, which holds 1.500 GiB."
    )
    equal = verdict(ranked(sweep([row(1.0, mode="a"), row(1.0, mode="b")], "mode")), "gpt2")
    assert equal.sentence.startswith("mode=a (and 1 other equal to it): 1.000 ms, as all 2 results")
    none = verdict(ranked(sweep([row(0.0), row(0.0)])), "gpt2")
    assert "0.000 ms" in none.sentence


def test_the_counts() -> None:
    rows = [row(1.0), unfit(), unfit(), row(status="failed"), row(status="lost")]
    rows.append(row(status="running"))
    assert counts_text(ranked(sweep(rows))) == [
        ("finished", "1 finished"),
        ("infeasible", "2 do not fit"),
        ("failed", "2 failed"),
        ("running", "1 running"),
    ]


def test_each_model_is_compared_with_itself_alone() -> None:
    rows = [
        row(ms, mode=mode, model__factory_args__width=width)
        for width, mode, ms in (("8", "a", 1.0), ("8", "b", 2.0), ("512", "a", 90.0))
    ]
    ranking = ranked(sweep(rows, "model.factory_args.width", "mode"))
    small, large = (verdict(ranking, model).sentence for model in ("width=8", "width=512"))
    assert small.startswith("mode=a: 1.000 ms, 33.3 % less than the median of 2 results and 50.0 %")
    assert large.startswith("mode=a: 90.000 ms, the only result.")


def test_a_few_failures_are_listed_one_by_one() -> None:
    rows = [row(1.0, mode="a"), unfit("needs 3 GiB", mode="b"), row(status="failed", mode="c")]
    assert sweep_reasons(sweep(rows, "mode")) == ["mode=b: needs 3 GiB", "mode=c: failed"]


def test_many_equal_failures_are_one_line() -> None:
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


def test_an_unrecorded_result_is_reported() -> None:
    rows = [row(1.0, error="no space left"), row(2.0, mode="b"), row(status="running")]
    assert sweep_reasons(sweep(rows)) == ["mode=kl_based: no space left"]


def test_lost_jobs_are_reported() -> None:
    """A killed process of a job left no reason, unless its launcher knows it."""
    rows = [row(1.0), row(status="lost", mode="b"), row(None, "lost", "out of memory", mode="c")]
    assert sweep_reasons(sweep(rows)) == [
        "mode=b: lost: its process was killed",
        "mode=c: out of memory",
    ]
    many = [row(status="lost", mode=f"m{n}") for n in range(9)]
    assert sweep_reasons(sweep([row(1.0), *many])) == [
        "9 jobs were lost (9 values of mode): lost: its process was killed"
    ]

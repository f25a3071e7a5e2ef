import re

import pytest

from runner.output import countdown
from runner.output.countdown import time_text
from runner.sweep.session import SweepProgress
from runner.sweep.swept_job import JobEnd


def _end(status: str, *, known: bool = False) -> JobEnd:
    return JobEnd(status, {}, known=known)


def test_a_log_gets_one_line_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with SweepProgress(6) as jobs:
        jobs.add("known", _end("finished", known=True))
        for status in ("finished", "infeasible", "failed", "lost"):
            jobs.add(status, _end(status))
            jobs.add(status, _end(status))  # reported twice, by its file and at the end
    err = capsys.readouterr().err
    assert err == "5 of 6 jobs done (1 before, 1 does not fit, 2 failed) in 0 s\n"


def test_an_interrupt_is_reported_by_the_end_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs = SweepProgress(6)
    jobs.__enter__()
    jobs.add("one", _end("finished"))
    jobs.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == ""
    assert jobs.tally == "1 of 6 jobs done"


def test_the_most_frequent_errors_are_named() -> None:
    jobs = SweepProgress(20)
    bugs = [f"ZeroDivisionError: a bug; traceback in outputs/{job}/traceback.txt" for job in "ab"]
    errors = [*(f"error {number}" for number in range(6)), *bugs]
    for number, error in enumerate(errors):
        jobs.add(str(number), JobEnd("failed", {}, error))
    jobs.add("lost", JobEnd("lost", {}, "error 5"))
    jobs.add("logged nowhere", JobEnd("finished", {}, "the store is gone"))
    jobs.add("too large", JobEnd("infeasible", {}, "does not fit"))
    assert jobs.failures == [
        "2 jobs failed: error 5",
        f"2 jobs failed: {bugs[0]}",
        "1 job failed: error 0",
        "1 job failed: error 1",
        "1 job failed: error 2",
        "2 jobs failed with other errors",
    ]


def test_a_long_sweep_prints_its_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(countdown, "monotonic", lambda: clock[0])
    with SweepProgress(6) as jobs:
        # The first one captures the model, too.
        for key, took_s in enumerate((100, 40, 40, 40)):
            clock[0] += took_s
            jobs.add(str(key), _end("finished"))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "1 of 6 jobs done, 5 left",
        "2 of 6 jobs done, 4 left",
        "3 of 6 jobs done, 3 left, about 2 min 0 s to go",
        "4 of 6 jobs done, 2 left, about 1 min 20 s to go",
        "4 of 6 jobs done in 3 min 40 s",
    ]


def test_a_search_that_skips_plans_prints_a_limit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(countdown, "monotonic", lambda: clock[0])
    plans = countdown.Countdown("plans", 10, skips=True)
    plans.start()
    for _ in range(3):
        clock[0] += 20
        plans.add(lambda: "costed")
    assert capsys.readouterr().err.endswith("costed, 7 left, up to 2 min 20 s to go\n")


def test_a_terminal_sees_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with SweepProgress(2) as jobs:
        jobs.add("one", _end("finished"))
        jobs.add("two", _end("finished"))
    err = capsys.readouterr().err
    assert re.search(r"2 of 2 jobs done in 0 s\n$", err)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (80, "1 min 20 s"), (7500, "2 h 5 min")]
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert time_text(seconds) == text

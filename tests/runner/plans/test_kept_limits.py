"""Plans that must keep limits, such as a time per token."""

from pathlib import Path

import pytest

from fxpart.errors import InfeasibleError, NotApplicableError, SpecError
from runner.plans.chosen import best_of, recommended_plan
from runner.plans.evaluate import Outcome
from runner.plans.request import ONLY, Request, Space
from runner.recommend.files import document
from runner.recommend.table import habit_lines, proof
from tests.runner.composed import TINY_LLAMA, read

DECODE = (*TINY_LLAMA, "phase=decode", "context_len=64", "devices=2x16gb")


def _outcome(objective: str = "throughput", **limits: float) -> tuple[Request, Outcome]:
    request = Request(objective, rows=100, limits=limits, space=Space(batch=[1, 4, 16]))
    return request, best_of({ONLY: read(*DECODE)}, request, {}, 1, prefix="recommend.")


def test_the_best_is_the_first_that_keeps_the_limits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    _, everything = _outcome()
    times = [plan.metrics["tpot_ms"] for plan in everything.ranking]
    limit = max(time for time in times if time < times[0])
    keeping = [plan for plan in everything.ranking if plan.metrics["tpot_ms"] <= limit]
    assert 0 < len(keeping) < len(times)
    request, within = _outcome(tpot_ms=limit)
    assert [p.candidate.plan for p in within.ranking] == [p.candidate.plan for p in keeping]
    assert len(within.beyond) == len(times) - len(keeping)
    assert within.total == everything.total
    assert f"{len(within.beyond)} are beyond the limits; the first" in proof(request, within)
    assert proof(request, within).endswith("a second of the space within the limits")
    entries = document((), request, within)["beyond"]
    assert isinstance(entries, list)
    assert all(f" > {limit:.6g}" in entry["beyond"] for entry in entries)


def test_a_limit_of_what_is_better_higher_is_the_least(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    _, everything = _outcome("latency")
    fastest, most = everything.ranking[0], max(p.examples_per_s for p in everything.ranking)
    assert fastest.examples_per_s < most
    request, within = _outcome("latency", tokens_per_s=most)
    assert within.ranking[0].examples_per_s == most
    habits = list(habit_lines(request, within))
    assert any(": beyond the limits: tokens_per_s=" in line for line in habits)


def test_a_plan_without_collectives_keeps_their_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    _, within = _outcome(collective_ms=0)
    assert within.beyond
    assert all(plan.candidate.plan.tensor_parallel == 1 for plan in within.ranking)
    assert all(plan.candidate.plan.tensor_parallel > 1 for plan in within.beyond)


def test_no_plan_within_the_limits_is_an_error_with_the_nearest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    least_ms = _outcome("latency")[1].ranking[0].metrics["tpot_ms"]
    with pytest.raises(InfeasibleError, match=rf"nearest is .*: tpot_ms={least_ms:.6g} > 1e-06;"):
        _outcome(tpot_ms=1e-6)
    with pytest.raises(InfeasibleError, match=r": tpot_ms=[\d.]+ > 0;"):
        _outcome(tpot_ms=0)
    with pytest.raises(
        NotApplicableError, match=r"limits.ttft_ms: .* of phase=prefill or generate"
    ):
        _outcome(ttft_ms=10)
    config = read(*DECODE, "mode=recommend", "mode.limits={tpot_ms: 1e-6}")
    with pytest.raises(InfeasibleError, match="keeps the limits"):
        recommended_plan(config)


@pytest.mark.parametrize(
    ("limits", "line"),
    [
        ("{tpot: 5}", "mode.limits: no metric tpot gets better or worse; nearest: tpot_ms"),
        ("{tpot_ms: -1}", "mode.limits.tpot_ms=-1 must be a number from 0"),
        ("{tpot_ms: fast}", "must map metrics to numbers"),
        ("5", "mode.limits=5 must map metrics to numbers"),
    ],
)
def test_a_meaningless_limit_is_one_line(limits: str, line: str) -> None:
    with pytest.raises(SpecError, match=line):
        recommended_plan(read(*DECODE, "mode=recommend", f"mode.limits={limits}"))

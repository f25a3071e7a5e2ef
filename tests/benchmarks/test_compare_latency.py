"""Every outcome of comparing two latencies, on a chain of four layers."""

import pytest

from benchmarks.compare_latency import LatencyPlan, Tally, compare_latency, compare_pair
from benchmarks.static_case import Case, make_case
from benchmarks.torch_families import chain
from benchmarks.two_sides import TORCH, Answer, Mode, Placed, Question, solve


@pytest.fixture(name="case")
def _case() -> Case:
    return make_case("four", chain(4), (0.9, 0.9), 1.0)


def _answer(case: Case, *devices: int) -> Answer:
    """Return an answer with each operator in its own partition, on the given devices."""
    numbers = {name: number for number, name in enumerate(case.operators)}
    placed = tuple(
        Placed(number, frozenset({name}), (device,) if device >= 0 else (), 0)
        for (name, number), device in zip(numbers.items(), devices, strict=True)
    )
    return Answer(1.0, 0, placed, numbers, numbers)


REFUSED = Answer(1.0, 0, error="RuntimeError: no", runtime_error=True)


def _told(case: Case, theirs: Answer, ours: Answer) -> tuple[dict[str, int], str]:
    """Return the nonzero counts and the message."""
    tally = Tally()
    printed = compare_pair(case, theirs, ours, tally)
    names = ("lower", "equal", "higher", "torch_invalid", "torch_refuses", "both_refuse", "wrong")
    return {name: getattr(tally, name) for name in names if getattr(tally, name)}, printed


def test_fewer_cuts_are_lower_and_more_are_higher(case: Case) -> None:
    one_cut, three_cuts = _answer(case, 0, 0, 1, 1), _answer(case, 0, 1, 0, 1)
    assert _told(case, three_cuts, one_cut) == ({"lower": 1}, "")
    assert _told(case, one_cut, _answer(case, 1, 1, 0, 0)) == ({"equal": 1}, "")
    counts, printed = _told(case, one_cut, three_cuts)
    assert counts == {"higher": 1}
    # Four layers and three transfers, each as long as a layer, divided by four layers and one.
    assert "ratio 1.400000" in printed


def test_invalid_answers_of_torch_are_not_compared(case: Case) -> None:
    ours = _answer(case, 0, 0, 1, 1)
    assert _told(case, _answer(case, 0, 0, 0, 0), ours) == ({"torch_invalid": 1}, "")
    assert _told(case, _answer(case, 0, 0, 0, -1), ours) == ({"torch_invalid": 1}, "")
    assert _told(case, REFUSED, ours) == ({"torch_refuses": 1}, "")
    assert _told(case, REFUSED, REFUSED) == ({"both_refuse": 1}, "")


def test_wrong_answers_of_ours_are_counted(case: Case) -> None:
    theirs = _answer(case, 0, 0, 1, 1)
    emitted = Answer(1.0, 0, theirs.partitions, theirs.partition_of, {})
    other = Answer(
        1.0, 0, theirs.partitions, theirs.partition_of, theirs.emitted, same_outputs=False
    )
    crash = Answer(1.0, 0, error="KeyError: 3")
    for ours, message in (
        (REFUSED, "refuses where torch has"),
        (_answer(case, 0, 0, 0, 0), "invalid: device 0 holds"),
        (emitted, "does not follow the partitions"),
        (other, "computes something else"),
    ):
        counts, printed = _told(case, theirs, ours)
        assert counts == {"wrong": 1}
        assert message in printed
    assert _told(case, REFUSED, crash) == ({"wrong": 1}, "wrong: not a RuntimeError: KeyError: 3")


def test_torch_against_itself_is_equal_or_wrong_in_its_emitted_module(
    capsys: pytest.CaptureFixture[str],
) -> None:
    most: dict[Mode, int] = {"kl_based": 16, "cost_aware": 10}
    plan = LatencyPlan(6, most, small_only=True, limit_s=60.0, kinds=("random",))
    listed = compare_latency(plan, ours=TORCH)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > listed > 0
    assert all(" wrong: " in line for line in lines[-listed:])
    assert any("does not follow the partitions" in line for line in lines)


def test_the_emitted_module_of_torch_is_compared_if_it_differs() -> None:
    case = make_case("ten", chain(10), (0.45,) * 4, 10.0)
    theirs = solve(TORCH, case, Question("kl_based"))
    assert theirs.emitted != theirs.partition_of
    tally = Tally()
    ours = Answer(1.0, 0, theirs.partitions, theirs.partition_of, theirs.partition_of)
    compare_pair(case, theirs, ours, tally)
    assert tally.ratios == [1.0]
    assert len(tally.emitted_ratios) == 1

"""The search itself, on jobs that are computed here."""

import itertools
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.errors import SpecError
from runner.sweep.axes import Axis
from runner.sweep.optuna.space import Interval, Space, Steps
from runner.sweep.optuna.study import SAMPLERS, Goal, Search, read_goals
from runner.sweep.swept_job import JobEnd

MODES = Axis(("mode",), (("mode=a",), ("mode=b",), ("mode=c",)))
SIZES = Steps("size", ("1", "2", "4"))
LISTED = Space(("model=x",), (MODES, SIZES))
ENDLESS = Space(
    ("model=x",),
    (MODES, SIZES, Interval("gain", 1e-4, 1e-1, log=True), Interval("n", 1, 8, whole=True)),
)
LATENCY = read_goals("latency_ms", "minimize")
BOTH = read_goals(["latency_ms", "throughput"], ["minimize", "maximize"])


def job(overrides: tuple[str, ...]) -> JobEnd:
    """Return the outcome of a job; mode c of size 4 does not fit, mode b of size 1 fails."""
    of = dict(override.split("=") for override in overrides)
    place, size = "abc".index(of["mode"]), float(of["size"])
    if (of["mode"], of["size"]) == ("c", "4"):
        return JobEnd("infeasible", {"feasible": 0.0}, "does not fit")
    if (of["mode"], of["size"]) == ("b", "1"):
        return JobEnd("failed", {}, "a bug")
    cost = abs(size - 2) + place + 10 * float(of.get("gain", 0)) + float(of.get("n", 0)) / 3
    return JobEnd("finished", {"latency_ms": cost, "throughput": size / (1 + place)})


def asked(search: Search, trials: int, n_jobs: int = 1) -> list[tuple[str, ...]]:
    """Return the jobs of a complete search, in the order of proposals."""
    jobs: list[tuple[str, ...]] = []
    while len(jobs) < trials:
        proposals = search.ask(min(n_jobs, trials - len(jobs)))
        if not proposals:
            break
        jobs += [proposal.overrides for proposal in proposals]
        for proposal in proposals:
            search.tell(proposal, job(proposal.overrides))
    return jobs


@pytest.mark.parametrize("goals", [LATENCY, BOTH], ids=["one", "two"])
@pytest.mark.parametrize(("sampler", "n_jobs"), [*((name, 1) for name in SAMPLERS), ("tpe", 3)])
def test_a_restarted_search_proposes_the_same_jobs(
    sampler: str, n_jobs: int, goals: tuple[Goal, ...]
) -> None:
    space = LISTED if sampler == "grid" else ENDLESS
    whole = Search(space, goals, sampler, seed=3)
    part, other = Search(space, goals, sampler, seed=3), Search(space, goals, sampler, seed=4)
    jobs = asked(whole, 24, n_jobs)
    assert asked(part, 6, n_jobs) == jobs[:6]
    assert asked(other, 6, n_jobs) != jobs[:6]
    assert len(set(jobs)) == len(jobs)
    assert all(overrides[0] == "model=x" for overrides in jobs)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_all_combinations_are_proposed_exactly_once(sampler: str) -> None:
    jobs = asked(Search(LISTED, LATENCY, sampler), 100)
    sizes, modes = ("1", "2", "4"), "abc"
    every = {("model=x", f"mode={m}", f"size={s}") for m, s in itertools.product(modes, sizes)}
    assert len(jobs) == 9
    assert set(jobs) == every


def test_the_best_is_the_first_of_the_best_that_finished() -> None:
    search = Search(LISTED, LATENCY, "random", seed=1)
    jobs = asked(search, 100)
    (best,) = search.best()
    assert best.overrides == ("model=x", "mode=a", "size=2")
    assert best.values == (0.0,)
    assert jobs[best.job] == best.overrides
    most = Search(LISTED, read_goals("throughput", "maximize"))
    asked(most, 100)
    # Mode c of size 4 would have the second largest throughput; it does not fit.
    assert [trial.overrides for trial in most.best()] == [("model=x", "mode=a", "size=4")]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=9))
def test_of_two_goals_the_best_are_the_undominated(values: list[tuple[int, int]]) -> None:
    space = Space((), (Steps("n", tuple(map(str, range(9)))),))
    search = Search(space, read_goals(["down", "up"], ["minimize", "maximize"]), "random")
    results = {}
    for proposal, (down, up) in zip(search.ask(len(values)), values, strict=True):
        search.tell(proposal, JobEnd("finished", {"down": float(down), "up": float(up)}))
        results[proposal.job] = (down, up)
    expected = {
        (down, up)
        for down, up in values
        if not any(d <= down and u >= up and (d, u) != (down, up) for d, u in values)
    }
    best = search.best()
    assert {(int(t.values[0]), int(t.values[1])) for t in best} == expected
    assert len(best) == len(expected)
    assert [trial.job for trial in best] == sorted(
        min(number for number, pair in results.items() if pair == best_pair)
        for best_pair in expected
    )


def test_a_search_prefers_better_jobs() -> None:
    # Of 40 random jobs about 13 would have mode a.
    jobs = asked(Search(ENDLESS, LATENCY, "tpe", seed=0), 40)
    assert sum("mode=a" in overrides for overrides in jobs) >= 20


@pytest.mark.parametrize(
    "end",
    [
        JobEnd("infeasible", {"feasible": 0.0}),
        JobEnd("failed", {}),
        JobEnd("lost", {}),
        JobEnd("finished", {"latency_ms": float("nan")}),
        JobEnd("finished", {"latency_ms": float("inf")}),
        JobEnd("finished", {}, known=True),
    ],
)
def test_a_job_without_a_result_is_never_the_best(end: JobEnd) -> None:
    for sampler in SAMPLERS:
        search = Search(LISTED, LATENCY, sampler)
        for _ in range(5):
            (proposal,) = search.ask(1)
            search.tell(proposal, end)
        assert search.best() == []


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_excluded_jobs_are_not_proposed(sampler: str) -> None:
    def wanted(overrides: tuple[str, ...]) -> bool:
        return "mode=b" not in overrides

    search = Search(LISTED, LATENCY, sampler)
    proposals = search.ask(100, wanted)
    assert len(proposals) == 6
    assert [proposal.job for proposal in proposals] == list(range(6))
    assert not any("mode=b" in proposal.overrides for proposal in proposals)


def test_the_only_wanted_job_is_found() -> None:
    only = ("model=x", "mode=c", "size=4")
    for seed in range(20):
        search = Search(LISTED, LATENCY, "tpe", seed)
        assert [proposal.overrides for proposal in search.ask(3, only.__eq__)] == [only]


def test_a_search_without_a_wanted_job_ends() -> None:
    assert Search(ENDLESS, LATENCY, "random").ask(1, lambda _: False) == []
    assert Search(LISTED, LATENCY, "random").ask(1, lambda _: False) == []


def test_a_result_from_the_store_has_the_same_effect_as_the_first_time() -> None:
    exact, kept = 1.23456789012, float(f"{1.23456789012:.7g}")
    searches = [Search(ENDLESS, LATENCY, "tpe") for _ in range(2)]
    for search, value in zip(searches, (exact, kept), strict=True):
        (proposal,) = search.ask(1)
        search.tell(proposal, JobEnd("finished", {"latency_ms": value}))
    assert searches[0].best()[0].values == searches[1].best()[0].values == (kept,)


def test_an_infinite_result_is_bad_also_when_read_again() -> None:
    """A store keeps no infinite number, nor does a file: the same proposals follow."""
    followed = []
    for metrics, known in (
        ({"latency_ms": float("inf"), "peak": 1.0}, False),
        ({"peak": 1.0}, True),
        (cast("dict[str, float]", {"latency_ms": None, "peak": 1.0}), True),
    ):
        search = Search(ENDLESS, LATENCY, "tpe")
        for proposal in search.ask(3):
            search.tell(proposal, JobEnd("finished", metrics, known=known))
        followed.append([proposal.overrides for proposal in search.ask(3)])
        with pytest.raises(
            SpecError,
            match=("latency_ms is not a numeric metric of any finished job; there are: peak"),
        ):
            search.refuse_unknown()
        (last,) = search.ask(1)
        search.tell(last, JobEnd("finished", {"latency_ms": 1.0}))
        search.refuse_unknown()
    assert followed[0] == followed[1] == followed[2]


def test_goals_are_read_in_pairs() -> None:
    assert read_goals("a", "minimize") == (Goal("a", "minimize"),)
    two = (Goal("a", "minimize"), Goal("b", "maximize"))
    assert read_goals(["a", "b"], ["minimize", "maximize"]) == two


def _tell_without_metric() -> None:
    search = Search(LISTED, read_goals("step_ms", "minimize"))
    for proposal in search.ask(5):
        search.tell(proposal, JobEnd("finished", {"latency_ms": 1.0, "partitions": 2.0}))


@pytest.mark.parametrize("known", [True, False])
def test_some_jobs_may_lack_the_metric(known: bool) -> None:
    """Modes without steps do not have it, in the first command as in the next."""
    search = Search(LISTED, read_goals("step_ms", "minimize"))
    *lacking, last = search.ask(5)
    for proposal in lacking:
        search.tell(proposal, JobEnd("finished", {"latency_ms": 1.0}, known=known))
    assert search.best() == []
    search.tell(last, JobEnd("finished", {"latency_ms": 2.0, "step_ms": 3.0}, known=known))
    for proposal in search.ask(4):
        search.tell(proposal, JobEnd("finished", {"latency_ms": 1.0}, known=known))
    search.refuse_unknown()
    assert [trial.overrides for trial in search.best()] == [last.overrides]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: read_goals("a", "maximise"), "hydra.sweeper.direction=maximise does not exist"),
        (lambda: read_goals(["a", "b"], "minimize"), "metric names 2, hydra.sweeper.direction 1"),
        (lambda: read_goals(["a", "a"], ["minimize"] * 2), "metric names a metric twice: a, a"),
        (lambda: Search(LISTED, LATENCY, "tpee"), "hydra.sweeper.sampler=tpee does not exist"),
        (
            lambda: Search(ENDLESS, LATENCY, "grid"),
            ("sampler=grid needs a finite list of values for gain"),
        ),
        (
            _tell_without_metric,
            ("metric=step_ms is not a numeric metric of any finished job; nearest:"),
        ),
    ],
)
def test_a_mistake_is_one_line(mistake: Callable[[], object], message: str) -> None:
    with pytest.raises(SpecError) as raised:
        mistake()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)

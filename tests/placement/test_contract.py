"""The contract of every mode, on random graphs: one suite for all modes, also new ones."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxpart.cost.least_placement
import fxpart.placement.search.refine
import fxpart.placement.search.steady
from fxpart.core.topology import Link
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError, SpecError
from fxpart.placement import MODES, make_mode
from tests import independent
from tests.sketch import BASELINES, GIVEN, devices, problem, random_graph

FREE = [name for name in MODES if name not in (*GIVEN, "sparse_nn", "mtkahypar")]
"""Modes that place any model on any devices; the others have their own suites."""
OPTIONS: dict[str, dict[str, object]] = {"optimal": {"steps": 5}}
"""Limited by steps, not by time."""
REFUSING = ("single", "pipeline")
"""Modes that try only one device or contiguous stages; all others fall back on filling."""


@pytest.fixture(autouse=True, scope="module")
def _few_choices() -> Iterator[None]:
    """Search all choices for two devices alone: those of four take twenty times as long.

    Likewise branch and bound ends after an eighth of its nodes, and leaves more to other searches.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fxpart.cost.least_placement, "_MOST_WORK", 2_000_000)
        patch.setattr(fxpart.placement.search.steady, "_FEW_SUBSETS", 4)
        yield


def _tight_problem(seed: int, n: int, count: int, share: float) -> Problem:
    """Return a random problem whose devices together have `share` of the model's memory."""
    graph = random_graph(seed, n)
    whole = independent.peak_bytes(graph, np.zeros(n, dtype=np.int64), 0)
    rng = np.random.default_rng(seed)
    sizes = [max(1, int(whole * share * rng.uniform(0.7, 1.3) / count)) for _ in range(count)]
    return problem(graph, devices(*sizes, link=Link(4.0, 0.125)))


@pytest.mark.parametrize("mode", FREE)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 30),
    count=st.integers(1, 4),
    share=st.sampled_from([0.8, 1.1, 1.5, 3.0, 6.0]),
)
def test_every_mode_keeps_the_contract(
    mode: str, seed: int, n: int, count: int, share: float
) -> None:
    this = _tight_problem(seed, n, count, share)
    graph = this.graph
    try:
        placed = make_mode(mode, OPTIONS.get(mode))(this)
    except InfeasibleError:
        if mode in BASELINES:  # CONTRIBUTING.md says what else they need
            return
        # No mode may refuse a model that fits on one device.
        whole = independent.peak_bytes(graph, np.zeros(n, dtype=np.int64), 0)
        assert this.topology.memory_bytes.max() < whole
        if mode not in REFUSING:
            with pytest.raises(InfeasibleError):
                make_mode("size_based")(this)
        return
    device_of = placed.device_of
    assert device_of.shape == (n,)
    assert device_of.min() >= 0
    assert device_of.max() < count
    for device in range(count):
        peak = independent.peak_bytes(graph, device_of, device)
        assert peak <= this.topology.devices[device].memory_bytes
    assert (device_of == device_of[graph.group]).all()
    for op in range(n):
        for value in graph.reads_of(op):
            maker = graph.value_producer[value]
            assert maker < 0 or placed.partition_of[maker] <= placed.partition_of[op]
    latency_s = evaluate(this, placed, search_bounds=False).latency_s
    assert latency_s == pytest.approx(independent.latency_s(this, device_of))


@pytest.mark.parametrize("mode", [*FREE, "sparse_nn"])
@pytest.mark.parametrize(("count", "spare"), [(1, 0), (2, 0), (4, 0), (2, 1), (4, 10**6)])
def test_no_mode_refuses_devices_that_each_hold_the_model(
    mode: str, count: int, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the existence of a plan matters, not its quality.
    monkeypatch.setattr(fxpart.placement.search.refine, "_KICKS", 8)
    # Without spare memory it is hard; with some, three graphs are enough.
    for seed in range(3 if spare else 6):
        graph = random_graph(seed, 25)
        whole = independent.peak_bytes(graph, np.zeros(25, dtype=np.int64), 0)
        placed = make_mode(mode, OPTIONS.get(mode))(
            problem(graph, devices(*[whole + spare] * count))
        )
        assert placed.device_of.shape == (25,)


@given(seed=st.integers(0, 10_000), n=st.integers(1, 30), count=st.integers(1, 4))
def test_kl_based_is_never_slower_than_size_based(seed: int, n: int, count: int) -> None:
    this = _tight_problem(seed, n, count, 1.6)
    try:
        start = make_mode("size_based")(this)
    except InfeasibleError:
        return
    better = make_mode("kl_based")(this)
    assert independent.latency_s(this, better.device_of) <= independent.latency_s(
        this, start.device_of
    ) * (1 + 1e-12)


def test_kl_based_is_close_to_the_optimum_and_often_reaches_it() -> None:
    excess = []
    for seed in range(40):
        graph = random_graph(seed, 8)
        this = problem(graph, devices(10**6, 10**6, link=Link(50.0)))
        best = min(
            independent.latency_s(this, np.array(code))
            for code in itertools.product((0, 1), repeat=8)
            if all(code[op] == code[graph.group[op]] for op in range(8))
        )
        latency_s = independent.latency_s(this, make_mode("kl_based")(this).device_of)
        single_s = independent.latency_s(this, np.zeros(8, dtype=np.int64))
        if best < single_s:
            assert latency_s < single_s
            excess.append(latency_s / best - 1)
    assert len(excess) > 30
    assert sum(share < 1e-9 for share in excess) >= len(excess) // 2
    assert sum(excess) / len(excess) < 0.1


@pytest.mark.parametrize("mode", MODES)
def test_an_unknown_option_is_named(mode: str) -> None:
    with pytest.raises(SpecError, match="no option 'speed'"):
        make_mode(mode, {"speed": 1})


def test_an_unknown_mode_suggests_the_nearest() -> None:
    with pytest.raises(SpecError, match="nearest: kl_based"):
        make_mode("kl_base")


def test_an_option_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(SpecError, match=r"mode\.max_passes must be of type int, got 'many'"):
        make_mode("kl_based", {"max_passes": "many"})


def test_zero_passes_are_refused() -> None:
    with pytest.raises(SpecError, match="at least 1 and at most 1000000, got 0"):
        make_mode("kl_based", {"max_passes": 0})


def test_an_invalid_gain_is_refused() -> None:
    with pytest.raises(SpecError, match=r"at least 0 and below 1, got 1\.0"):
        make_mode("kl_based", {"min_gain": 1})


def test_a_change_below_the_minimal_gain_is_not_made() -> None:
    graph = random_graph(1, 60)  # for fewer operators all plans are tried
    this = problem(graph, devices(10**6, 10**6, link=Link(50.0)))
    greedy = make_mode("kl_based", {"min_gain": 0})(this)
    content = make_mode("kl_based", {"min_gain": 0.9})(this)
    assert len(set(greedy.device_of.tolist())) == 2
    assert len(set(content.device_of.tolist())) == 1


def places() -> dict[str, list[int]]:
    """Return the devices that each mode chooses for one graph."""
    this = problem(random_graph(3, 45), devices(200, 200, 200))
    modes = {name: make_mode(name, OPTIONS.get(name)) for name in FREE if name != "single"}
    return {name: place(this).device_of.tolist() for name, place in modes.items()}

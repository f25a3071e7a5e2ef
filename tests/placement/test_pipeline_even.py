"""`pipeline`: the choice among equally good cuts, against all of them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.core.topology import Link
from fxpart.cost.problem import Problem
from fxpart.placement import make_mode
from fxpart.placement.device_order import on_devices, speed_order
from fxpart.placement.stages.even_cuts import lowest_parabolas, most_even
from fxpart.placement.stages.line import stage_line
from tests import independent
from tests.placement.test_pipeline import sending_s
from tests.placement.training_sketch import random_training_graph
from tests.sketch import Sketch, chain, devices, problem, random_graph

SHARES = st.sampled_from([0.9, 1.2, 1.6, 3.0, 9.0])


def _problem(seed: int, n: int, count: int, share: float, *, training: bool = False) -> Problem:
    """Return a random graph on devices of two speeds and nodes, with `share` of its bytes."""
    graph = random_training_graph(seed, n) if training else random_graph(seed, n)
    rng = np.random.default_rng(seed)
    whole = independent.peak_bytes(graph, np.zeros(graph.n_ops, dtype=np.int64), 0)
    sizes = [max(1, int(whole * share * rng.uniform(0.5, 1.5) / count)) for _ in range(count)]
    topology = devices(
        *sizes,
        speeds=[float(rng.choice([1.0, 1.0, 2.0])) for _ in range(count)],
        nodes=rng.integers(0, 2, size=count).tolist(),
        link=Link(float(rng.choice([1e9, 20.0])), float(rng.choice([0.0, 0.25]))),
        far=Link(float(rng.choice([1e9, 5.0])), float(rng.choice([0.0, 0.5]))),
    )
    this = problem(graph, topology)
    return on_devices(this, speed_order(this))


def _alike(this: Problem, *, in_a_row: bool) -> bool:
    """Return whether all links, or those from each device to the next, are equal."""
    pairs = itertools.combinations(range(this.topology.n_devices), 2)
    links = [
        (float(this.topology.bytes_per_s[link]), float(this.topology.latency_s[link]))
        for pair in pairs
        if not in_a_row or pair[1] == pair[0] + 1
        for link in (pair, pair[::-1])
    ]
    return len(set(links)) == 1


def _spread(
    this: Problem, cuts: tuple[int, ...], slots: tuple[int, ...], *, alike: bool
) -> tuple[float, float]:
    """Return the largest load and the sum of squares of times; infinite if it does not fit.

    If links are `alike`, each carries what a stage sends; else all that crosses the cut before it.
    """
    line = stage_line(this)
    bounds = (0, *cuts, line.n_units)
    loads, times, before = [], [], -1
    device_of = np.empty(this.graph.n_ops, dtype=np.int64)
    for device, (begin, end) in zip(slots, itertools.pairwise(bounds), strict=True):
        in_stage = (begin <= line.unit_of) & (line.unit_of < end)
        device_of[in_stage] = device
        compute_s = float(this.costs.op_time_s[in_stage, device].sum())
        loads.append(compute_s)
        if begin and not alike:
            for row, link in enumerate(((before, device), (device, before))):
                busy = line.passing_values[row, begin] * this.topology.latency_s[link]
                busy += line.passing_bytes[row, begin] / this.topology.bytes_per_s[link]
                loads.append(float(busy))
        crossing, receive_s = int(line.crossing_bytes[begin]), 0.0
        if crossing:
            receive_s = float(this.topology.latency_s[before, device])
            receive_s += crossing / float(this.topology.bytes_per_s[before, device])
        times.append(compute_s + receive_s)
        before = device
    for device in slots:
        peak_bytes = independent.peak_bytes(this.graph, device_of, device)
        if peak_bytes > this.topology.devices[device].memory_bytes:
            return float("inf"), float("inf")
    if alike:
        loads += sending_s(this, device_of).tolist()
    return max(loads), sum(time**2 for time in times)


def _all(
    this: Problem, slots: tuple[int, ...], *, alike: bool
) -> dict[tuple[int, ...], tuple[float, float]]:
    cuts = itertools.combinations(range(1, stage_line(this).n_units), len(slots) - 1)
    return {cut: _spread(this, cut, slots, alike=alike) for cut in cuts}


def _found(this: Problem, options: dict[str, object]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the chosen cuts and devices."""
    line = stage_line(this)
    placed = make_mode("pipeline", {"boundary_gain": None, **options})(this)
    forward = np.flatnonzero(~this.graph.is_backward)
    homes = np.empty(line.n_units, dtype=np.int64)
    homes[line.unit_of[forward]] = placed.device_of[forward]
    cuts = np.flatnonzero(np.diff(homes)) + 1
    return tuple(cuts.tolist()), tuple(homes[[0, *cuts]].tolist())


@settings(max_examples=150)
@given(st.integers(0, 10_000), st.integers(2, 13), st.integers(2, 4), SHARES, st.booleans())
def test_of_equal_loads_the_most_even_is_chosen(
    seed: int, n: int, count: int, share: float, training: bool
) -> None:
    this = _problem(seed, n, count, 9.0 if training else share, training=training)
    slots = tuple(range(count))
    all_cuts = _all(this, slots, alike=_alike(this, in_a_row=True))
    best = min((load for load, _ in all_cuts.values()), default=float("inf"))
    if best == float("inf"):
        return
    cuts, homes = _found(this, {"stages": count})
    assert homes == slots
    least_squares = min(s for load, s in all_cuts.values() if load <= best * (1 + 1e-9))
    chosen = all_cuts[cuts]
    assert chosen[0] == pytest.approx(best)
    assert chosen[1] == pytest.approx(least_squares, rel=1e-12)


@settings(max_examples=100)
@given(st.integers(0, 10_000), st.integers(2, 10), st.integers(2, 3), SHARES)
def test_of_equally_many_devices_the_most_even_are_chosen(
    seed: int, n: int, count: int, share: float
) -> None:
    this = _problem(seed, n, count, share)
    alike = _alike(this, in_a_row=False)
    every = {
        (slots, cuts): spread
        for k in range(1, count + 1)
        for slots in itertools.permutations(range(count), k)
        for cuts, spread in _all(this, slots, alike=alike).items()
    }
    best = min(load for load, _ in every.values())
    if best == float("inf"):
        return
    good = {key: squares for key, (load, squares) in every.items() if load <= best * (1 + 1e-9)}
    cuts, homes = _found(this, {})
    assert len(homes) == min(len(slots) for slots, _ in good)
    # Among cuts on the same devices; between orders of devices the latency decides.
    least = min(squares for (slots, _), squares in good.items() if slots == homes)
    assert good[homes, cuts] == pytest.approx(least, rel=1e-12)


def _row(*loads: int, link: Link, sizes: list[int], count: int) -> Problem:
    """Return a chain of operators, each with its load in seconds and the bytes it passes on."""
    sketch = Sketch()
    value = sketch.input(0)
    for load, size in zip(loads, sizes, strict=True):
        value = sketch.op([value], size, flops=load)
    return problem(sketch.graph(value), devices(*[10**6] * count, link=link))


FAST = Link(1e12)


@pytest.mark.parametrize(
    ("link", "sizes", "expected"),
    [
        # The last operator takes 6 s; the operators before it are halved.
        (FAST, [1] * 7, (3, 6)),
        # A byte takes 0.1 s: after the fourth only one crosses, (4, 2 + 0.1) instead of (3, 3 + 2).
        (Link(10.0), [20, 20, 20, 1, 20, 1, 1], (4, 6)),
        # After the third only one crosses: (3, 3 + 0.1) instead of (4, 2 + 2).
        (Link(10.0), [20, 20, 1, 20, 1, 1, 1], (3, 6)),
        # If nothing crosses there is no latency: (4, 2) instead of (3, 3 + 0.5).
        (Link(1e12, 0.5), [1, 1, 1, 0, 1, 1, 1], (4, 6)),
    ],
)
def test_the_rest_besides_a_large_operator_is_divided_evenly(
    link: Link, sizes: list[int], expected: tuple[int, ...]
) -> None:
    this = _row(1, 1, 1, 1, 1, 1, 6, link=link, sizes=sizes, count=3)
    assert _found(this, {"stages": 3})[0] == expected
    # Two stages of 6 s have the same largest load.
    assert _found(this, {})[0] == (6,)


def test_of_equal_sums_the_earliest_begin_is_chosen() -> None:
    # Stages of 2, 3 and 3 s in any order; the last begins at 5 or 6, and 5 leaves 2 and 3.
    this = problem(chain(8, size=0), devices(999, 999, 999))
    assert _found(this, {"stages": 3})[0] == (2, 5)


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(0, 60))
def test_the_lowest_parabola_at_each_position(seed: int, places: int, count: int) -> None:
    # Integers, many of them equal: sums are exact, and ties are frequent.
    rng = np.random.default_rng(seed)
    x = np.sort(rng.integers(0, 12, size=places)).astype(np.float64)
    first = rng.integers(0, places, size=count)
    last = np.array([rng.integers(f, places) for f in first], dtype=np.int64)
    rank = rng.integers(0, 2, size=count)
    base, apex = rng.integers(0, 30, size=(2, count)).astype(np.float64)
    expected = [
        min(
            (i for i in range(count) if first[i] <= position <= last[i]),
            key=lambda i: (-rank[i], base[i] + (x[position] - apex[i]) ** 2, i),
            default=-1,
        )
        for position in range(places)
    ]
    assert lowest_parabolas(x, first, last, rank, base, apex).tolist() == expected


def test_a_slot_on_which_no_stage_may_begin_stays_empty() -> None:
    line = stage_line(problem(chain(4), devices(99, 99)))
    stay, go = np.arange(5), np.full(5, 4)
    assert most_even(line, (0, 1), (stay, go), may_skip=True) == [(0, 4, 1)]
    assert most_even(line, (0, 1), (go, stay), may_skip=True) == [(0, 4, 0)]
    assert most_even(line, (0, 1), (go, go), may_skip=False) == [(0, 2, 0), (2, 4, 1)]

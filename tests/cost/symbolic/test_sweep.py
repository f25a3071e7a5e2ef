import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.core.assignment import Assignment
from fxpart.core.data_parallel import split_topology
from fxpart.core.reserve import rounded
from fxpart.core.symbolic_graph import SymbolicGraph
from fxpart.core.topology import Link
from fxpart.cost.all_reduce import all_reduce_cost
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import make_problem
from fxpart.cost.profile import OperatorProfile
from fxpart.cost.roofline import LatencyModel
from fxpart.cost.symbolic.sweep import Sums, sweep
from fxpart.errors import SpecError
from tests.cost.symbolic.drawn import random_assignment, random_symbolic, with_sizes
from tests.sketch import Sketch, devices

GB = 10**9


def _two_in_a_row(symbols: tuple[str, ...] = ("batch",)) -> SymbolicGraph:
    """Return x (2 b) -> a (5 b, weight 100, 6 s) -> c (3 b, weight 10, 2 b s)."""
    sketch = Sketch()
    x = sketch.input(0)
    a = sketch.op([x], 0, [sketch.weight(100)])
    c = sketch.op([a], 0, [sketch.weight(10)])
    tables = {
        "flops": np.array([[0, 6], [2, 0]]),
        "moved_bytes": np.zeros((2, 2), dtype=np.int64),
        "value_bytes": np.array([[2, 0], [5, 0], [3, 0]]),
    }
    return with_sizes(sketch.graph(c), symbols, tables)


_APART = Assignment(np.arange(2), ((0,), (1,)))


def test_a_table_by_hand() -> None:
    topology = devices(GB, 50, link=Link(10.0))
    table = sweep(
        _two_in_a_row(),
        topology,
        LatencyModel(),
        _APART,
        [{"batch": 8}, {"batch": 1}, {"batch": 5}],
    )
    assert table.symbols == ("batch",)
    assert table.sizes.tolist() == [[8], [1], [5]]
    # a 6 s, its 5 b bytes in b / 2 s, c 2 b s; the busiest is c at 8, a at 1, c at 5.
    assert table.latency_s.tolist() == [6 + 4 + 16, 6 + 0.5 + 2, 6 + 2.5 + 10]
    assert table.throughput_per_s.tolist() == [8 / 16, 1 / 6, 5 / 10]
    assert table.peak_bytes.tolist() == [[156, 74], [107, 18], [135, 50]]
    assert table.feasible.tolist() == [False, True, True]
    # Over a slow link, its 5 b bytes take 5 b s, longer than any operator.
    slow = devices(GB, GB, link=Link(1.0))
    table = sweep(_two_in_a_row(), slow, LatencyModel(), _APART, [{"batch": 8}])
    assert table.throughput_per_s.tolist() == [8 / 40]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(2, 30),
    both=st.booleans(),
    rounding_bytes=st.sampled_from([1, 64]),
)
def test_equal_to_the_evaluation_at_each_size(
    seed: int, n: int, both: bool, rounding_bytes: int
) -> None:
    symbolic = random_symbolic(seed, n, ("batch", "seq_len") if both else ("batch",))
    assignment = random_assignment(seed, n, 3, most_replicas=2)
    topology = devices(5000, 7000, GB, speeds=[1.0, 2.0, 3.0], link=Link(9.0, 0.25))
    model = LatencyModel(op_overhead_s=0.5)
    named = {"batch": [1, 2, 3, 40, 64], "seq_len": [7, 1, 64, 2, 33]}
    at = [{name: named[name][i] for name in symbolic.symbols} for i in range(5)]
    table = sweep(symbolic, topology, model, assignment, at, rounding_bytes=rounding_bytes)
    for row, sizes in enumerate(at):
        graph = rounded(symbolic.at(**sizes), rounding_bytes)
        this = make_problem(graph, topology, model)
        result = evaluate(this, assignment, search_bounds=False)
        assert table.latency_s[row] == result.latency_s
        assert table.throughput_per_s[row] == pytest.approx(
            result.throughput_per_s * sizes["batch"]
        )
        peaks = [use.peak_bytes for use in result.devices]
        assert table.peak_bytes[row].tolist() == peaks
        assert table.feasible[row] == all(use.free_bytes >= 0 for use in result.devices)


def test_replicas_sum_by_hand() -> None:
    # The 3 b bytes of c go once around a ring of two, at 2 bytes per second: 1.5 b s.
    parallel = split_topology(devices(GB, GB, link=Link(2.0)), 2)
    single = Assignment(np.zeros(2, dtype=np.int64), ((0,),))
    sums = Sums(np.array([2]), parallel)
    at = [{"batch": 2}, {"batch": 4}]
    table = sweep(_two_in_a_row(), parallel.replica, LatencyModel(), single, at, sums=sums)
    assert table.latency_s.tolist() == [6 + 4 + 3, 6 + 8 + 6]
    assert table.throughput_per_s.tolist() == pytest.approx([2 / 13, 4 / 20])
    # Each replica holds everything: weights, and x, a and c.
    assert table.peak_bytes.tolist() == [[110 + 10 * 2], [110 + 10 * 4]]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 30))
def test_equal_to_the_evaluation_with_sums(seed: int, n: int) -> None:
    symbolic, assignment = random_symbolic(seed, n), random_assignment(seed, n, 2)
    parallel = split_topology(devices(GB, GB, GB, GB, link=Link(9.0, 0.25)), 2)
    model = LatencyModel(op_overhead_s=0.5)
    partial = np.flatnonzero(symbolic.graph.value_is_output)
    at = [{"batch": batch} for batch in (1, 3, 64)]
    sums = Sums(partial, parallel, bucket_bytes=40)
    table = sweep(symbolic, parallel.replica, model, assignment, at, sums=sums)
    for row, sizes in enumerate(at):
        problem = make_problem(symbolic.at(**sizes), parallel.replica, model)
        cost = all_reduce_cost(
            problem,
            assignment,
            evaluate(problem, assignment, search_bounds=False),
            partial=partial,
            replicas=parallel,
            bucket_bytes=40,
        )
        assert table.latency_s[row] == cost.latency_s
        assert table.throughput_per_s[row] == cost.throughput_per_s * sizes["batch"]


def test_without_a_batch_the_throughput_is_of_inputs() -> None:
    batched = _two_in_a_row()
    renamed = SymbolicGraph(
        batched.graph,
        ("seq_len",),
        batched.captured_at,
        batched.exponents,
        batched.coefficients,
        batched.value_batch_dim,
    )
    topology = devices(GB, GB, link=Link(10.0))
    table = sweep(renamed, topology, LatencyModel(), _APART, [{"seq_len": 5}])
    assert table.throughput_per_s.tolist() == [1 / 10]


def test_a_placement_that_takes_no_time_has_unlimited_throughput() -> None:
    sketch = Sketch()
    a = sketch.op([sketch.input(0)])
    none = np.zeros((1, 2), dtype=np.int64)
    tables = {"flops": none, "moved_bytes": none, "value_bytes": np.zeros((2, 2), dtype=np.int64)}
    symbolic = with_sizes(sketch.graph(a), ("batch",), tables)
    single = Assignment(np.zeros(1, dtype=np.int64), ((0,),))
    table = sweep(symbolic, devices(GB), LatencyModel(), single, [{"batch": 2}])
    assert table.throughput_per_s.tolist() == [np.inf]


def test_invalid_requests_are_refused() -> None:
    symbolic, topology, model = _two_in_a_row(), devices(GB, GB), LatencyModel()
    with pytest.raises(SpecError, match="a sweep needs sizes"):
        sweep(symbolic, topology, model, _APART, [])
    with pytest.raises(SpecError, match="batch=0 must be a whole number"):
        sweep(symbolic, topology, model, _APART, [{"batch": 0}])
    with pytest.raises(SpecError, match="a size of batch is missing"):
        sweep(symbolic, topology, model, _APART, [{}])
    profile = OperatorProfile(np.ones(2), np.ones(2, dtype=np.int64), "cpu")
    with pytest.raises(SpecError, match="OperatorProfile hold for the size"):
        sweep(symbolic, topology, profile, _APART, [{"batch": 1}])
    with pytest.raises(SpecError, match="uses device 1, there are 1"):
        sweep(symbolic, devices(GB), model, _APART, [{"batch": 1}])

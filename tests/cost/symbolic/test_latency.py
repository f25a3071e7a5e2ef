from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.core.assignment import Assignment
from fxpart.core.efficiency import Efficiency
from fxpart.core.symbolic_graph import SymbolicGraph
from fxpart.core.topology import Link, Topology
from fxpart.cost.calibration import Calibration
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import make_problem
from fxpart.cost.profile import OperatorProfile
from fxpart.cost.roofline import LatencyModel
from fxpart.cost.symbolic.latency import latency_formula, latency_formulas
from fxpart.cost.tables import LatencySource
from fxpart.errors import SpecError
from tests.cost.symbolic.drawn import random_assignment, random_symbolic, with_sizes
from tests.sketch import Sketch, devices

GB = 10**9
_ATTENTION = "aten.scaled_dot_product_attention.default"
ROOFLINE = LatencyModel(compute_efficiency=0.5, op_overhead_s=3.0)
OF_DEVICES = LatencyModel(compute_efficiency=None, bandwidth_efficiency=None)
EFFICIENCY = Efficiency(
    gemm={"float32": 0.3, "memory": 0.7},
    attention={"float32": 0.6},
    convolution={"float32": 0.2},
    other={"memory": 0.9},
)
CALIBRATION = Calibration(
    2.0,
    0.5,
    7.0,
    {"gemm float32": 3.0, "convolution float32": 5.0},
    "d0",
    moves_per_s={"function": 4.0, "reduction": 2.0},
)


def _simulated_s(
    symbolic: SymbolicGraph,
    topology: Topology,
    latency: LatencySource,
    assignment: Assignment,
    sizes: dict[str, int],
) -> float:
    graph = symbolic.at(**sizes)
    this = make_problem(graph, topology, latency)
    return evaluate(this, assignment, search_bounds=False).latency_s


def _fork(flops: list[list[int]], moved: list[list[int]]) -> SymbolicGraph:
    """Return a -> (b, c) -> d; the result of a has 5 b bytes, those of b, c and d one."""
    sketch = Sketch()
    a = sketch.op([sketch.input(0)])
    b, c = sketch.op([a]), sketch.op([a])
    d = sketch.op([b, c])
    values = np.array([[0, 0], [5, 0], [0, 1], [0, 1], [0, 1]])
    tables = {"flops": np.array(flops), "moved_bytes": np.array(moved), "value_bytes": values}
    return with_sizes(sketch.graph(d), ("batch",), tables)


_NOTHING = [[0, 0]] * 4
_BATCHES = [{"batch": batch} for batch in range(1, 11)]
_ONE = Assignment(np.zeros(4, dtype=np.int64), ((0,),))


def test_the_latency_on_one_device_is_the_sum() -> None:
    symbolic = _fork([[2, 0], [3, 0], [0, 4], [1, 0]], _NOTHING)
    latency = latency_formula(symbolic, devices(GB), LatencyModel(), _ONE, _BATCHES)
    assert latency.formula.text() == "4 + 6*batch"
    assert latency.checked_at.tolist() == [[batch] for batch in range(1, 11)]
    assert latency.largest_error < 1e-12
    assert latency.formula.unit == "s"


def test_the_latency_on_two_devices_is_the_longer_path() -> None:
    symbolic = _fork([[2, 0], [3, 0], [0, 40], [1, 0]], _NOTHING)
    split = Assignment(np.array([0, 0, 1, 2]), ((0,), (1,), (0,)))
    topology = devices(GB, GB, link=Link(1.0, 0.5))
    latency = latency_formula(symbolic, topology, LatencyModel(), split, _BATCHES)
    # Via c on device 1: a 2 b, its transfer 0.5 + 5 b, c 40, 0.5 + 1 back, d b. Via b
    # it is never longer.
    assert latency.formula.text() == "42 + 8*batch"
    slow = _fork([[2, 0], [30, 0], [0, 40], [1, 0]], _NOTHING)
    two_device = latency_formula(slow, topology, LatencyModel(), split, _BATCHES)
    assert two_device.formula.text() == "max(\n  33*batch,\n  42 + 8*batch,\n)"


def test_an_operator_is_compute_bound_above_some_size() -> None:
    # 10 bytes at any batch, or 3 b FLOPs; the others only move 1 b bytes.
    symbolic = _fork([[3, 0], [0, 0], [0, 0], [0, 0]], [[0, 10], [1, 0], [1, 0], [1, 0]])
    latency = latency_formula(symbolic, devices(GB), LatencyModel(), _ONE, _BATCHES)
    assert latency.formula.text() == "max(\n  6*batch,\n  10 + 3*batch,\n)"


def test_efficiencies_and_overhead_are_included() -> None:
    symbolic = _fork([[2, 0], [0, 0], [0, 4], [0, 0]], _NOTHING)
    # Two operators have work, at half of 1 FLOP/s, and take 3 s more each.
    latency = latency_formula(symbolic, devices(GB), ROOFLINE, _ONE, _BATCHES)
    assert latency.formula.text() == "14 + 4*batch"


def test_a_calibration_by_hand() -> None:
    symbolic = _fork([[9, 0], [0, 0], [0, 0], [0, 0]], [[0, 0], [7, 0], [0, 0], [0, 0]])
    latency = latency_formula(symbolic, devices(GB), CALIBRATION, _ONE, _BATCHES)
    # 2 + 9 b / 3, 2 + 7 b / 7, and two views of half a second.
    assert latency.formula.text() == "5 + 4*batch"


@pytest.mark.parametrize("latency", [LatencyModel(), ROOFLINE, OF_DEVICES, CALIBRATION])
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 30),
    count=st.integers(1, 4),
    both=st.booleans(),
)
def test_the_formula_equals_the_simulation_at_every_given_size(
    latency: LatencySource, seed: int, n: int, count: int, both: bool
) -> None:
    symbolic = random_symbolic(seed, n, ("batch", "seq_len") if both else ("batch",))
    rng = np.random.default_rng(seed)
    # A calibration has a rate for each class, and getitem costs nothing.
    targets = rng.choice(
        ["aten.linear.default", "aten.conv2d.default", "aten.gelu.default", "getitem", _ATTENTION],
        n,
    )
    calls = [[op, 64, op % 2] for op in np.flatnonzero(targets == _ATTENTION)]
    graph = replace(
        symbolic.graph,
        targets=tuple(targets.tolist()),
        attention=np.array(calls, dtype=np.int64).reshape(-1, 3),
    )
    symbolic = replace(symbolic, graph=graph)
    topology = devices(
        *[GB] * count, speeds=rng.uniform(0.5, 4.0, count).tolist(), link=Link(9.0, 0.25)
    )
    stated = replace(topology.devices[0], efficiency=EFFICIENCY)
    topology = replace(topology, devices=(stated, *topology.devices[1:]))
    assignment = Assignment(
        np.arange(n), tuple((int(device),) for device in rng.integers(0, count, n))
    )
    named = {"batch": [1, 2, 3, 8, 40, 64], "seq_len": [7, 1, 64, 2, 1, 33]}
    at = [{name: named[name][i] for name in symbolic.symbols} for i in range(6)]
    for piece in latency_formulas(symbolic, topology, latency, assignment, at):
        for row in piece.checked_at:
            sizes = dict(zip(symbolic.symbols, map(int, row), strict=True))
            simulated = _simulated_s(symbolic, topology, latency, assignment, sizes)
            assert float(piece.formula.at(**sizes)) == pytest.approx(simulated, rel=1e-8)
        assert piece.largest_error < 1e-8


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 30), size=st.integers(1, 70))
def test_the_formula_is_a_lower_bound_at_other_sizes(seed: int, n: int, size: int) -> None:
    symbolic, assignment = random_symbolic(seed, n), random_assignment(seed, n, 3)
    topology = devices(GB, GB, GB, link=Link(9.0, 0.25))
    latency = latency_formula(symbolic, topology, ROOFLINE, assignment, [{"batch": 6}])
    simulated = _simulated_s(symbolic, topology, ROOFLINE, assignment, {"batch": size})
    assert float(latency.formula.at(batch=size)) <= simulated * (1 + 1e-9)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 30))
def test_with_replicas_the_formula_is_that_of_the_first_input(seed: int, n: int) -> None:
    symbolic, assignment = random_symbolic(seed, n), random_assignment(seed, n, 3, 3)
    topology = devices(GB, GB, GB, speeds=[1.0, 2.0, 3.0])
    latency = latency_formula(symbolic, topology, LatencyModel(), assignment, _BATCHES)
    for sizes in _BATCHES:
        simulated = _simulated_s(symbolic, topology, LatencyModel(), assignment, sizes)
        assert float(latency.formula.at(**sizes)) == pytest.approx(simulated, rel=1e-8)


def test_a_tolerance_shortens_the_formula_within_its_error() -> None:
    symbolic = random_symbolic(5, 60)
    assignment = random_assignment(5, 60, 3)
    topology = devices(GB, GB, GB, link=Link(9.0, 0.25))
    at = [{"batch": batch} for batch in range(1, 65)]
    exact = latency_formula(symbolic, topology, LatencyModel(), assignment, at)
    short = latency_formula(symbolic, topology, LatencyModel(), assignment, at, tolerance=0.02)
    assert 1 <= len(short.formula.rows) < len(exact.formula.rows)
    assert 1e-6 < short.largest_error <= 0.02
    sizes = np.arange(1, 65)
    assert (short.formula.at(batch=sizes) <= exact.formula.at(batch=sizes) * (1 + 1e-9)).all()


def test_an_operator_that_starts_to_have_work_splits_the_regimes() -> None:
    # b - 1 FLOPs of operator 0: none at 1, then also its overhead.
    symbolic = _fork([[1, -1], [0, 0], [0, 4], [0, 0]], _NOTHING)
    first, second = latency_formulas(symbolic, devices(GB), ROOFLINE, _ONE, _BATCHES)
    assert first.checked_at.tolist() == [[1]]
    assert float(first.formula.at(batch=1)) == pytest.approx(3 + 8)
    assert second.checked_at[:, 0].tolist() == list(range(2, 11))
    assert second.formula.text() == "12 + 2*batch"
    with pytest.raises(
        SpecError, match=r"between batch=1 and batch=2 an operator begins"
    ) as caught:
        latency_formula(symbolic, devices(GB), ROOFLINE, _ONE, _BATCHES)
    assert "\n" not in str(caught.value)
    # Without overhead there is no jump.
    plain = latency_formula(symbolic, devices(GB), LatencyModel(), _ONE, _BATCHES)
    assert plain.formula.text() == "3 + batch"


def test_large_results_of_a_calibration_split_the_regimes() -> None:
    # The first result has 2^23 b bytes: from b = 4 on it has 32 MiB and needs fresh memory.
    sketch = Sketch()
    a = sketch.op([sketch.input(0)])
    view = sketch.op([a], view_of=a)
    tables = {
        "flops": np.zeros((2, 2), dtype=np.int64),
        "moved_bytes": np.array([[7, 0], [0, 0]]),
        "value_bytes": np.array([[0, 0], [2**23, 0], [2**23, 0]]),
    }
    symbolic = with_sizes(sketch.graph(view), ("batch",), tables)
    fresh = replace(CALIBRATION, fresh_s_per_byte=2.0**-23)
    pair = Assignment(np.zeros(2, dtype=np.int64), ((0,),))
    small, large = latency_formulas(symbolic, devices(GB), fresh, pair, _BATCHES)
    assert small.formula.text() == "2.5 + batch"
    assert large.formula.text() == "2.5 + 2*batch"
    assert large.checked_at[:, 0].tolist() == list(range(4, 11))
    for latency in (small, large):
        assert latency.largest_error < 1e-12


def test_memory_that_is_only_allocated_costs_nothing() -> None:
    # Like `torch.empty`: it neither computes nor moves anything, and allocates 2^26 b bytes.
    sketch = Sketch()
    result = sketch.op([sketch.input(0)])
    none = np.zeros((1, 2), dtype=np.int64)
    values = np.array([[0, 0], [2**26, 0]])
    tables = {"flops": none, "moved_bytes": none, "value_bytes": values}
    symbolic = with_sizes(sketch.graph(result), ("batch",), tables)
    fresh = replace(CALIBRATION, fresh_s_per_byte=2.0**-23)
    single = Assignment(np.zeros(1, dtype=np.int64), ((0,),))
    latency = latency_formula(symbolic, devices(GB), fresh, single, _BATCHES)
    assert (latency.formula.text(), latency.largest_error) == ("0.5", 0.0)


def test_measured_times_are_refused() -> None:
    profile = OperatorProfile(np.ones(4), np.ones(4, dtype=np.int64), "cpu")
    with pytest.raises(SpecError, match="OperatorProfile hold for the size that was measured"):
        latency_formula(_fork(_NOTHING, _NOTHING), devices(GB), profile, _ONE, _BATCHES)


def test_a_model_that_takes_no_time() -> None:
    latency = latency_formula(
        _fork(_NOTHING, _NOTHING), devices(GB), LatencyModel(), _ONE, _BATCHES
    )
    assert (latency.formula.text(), latency.largest_error) == ("0", 0.0)


def test_invalid_requests_are_refused() -> None:
    symbolic, topology = _fork(_NOTHING, _NOTHING), devices(GB)
    with pytest.raises(SpecError, match="give at least one"):
        latency_formula(symbolic, topology, LatencyModel(), _ONE, [])
    with pytest.raises(SpecError, match="tolerance=1 must be at least 0 and below 1"):
        latency_formula(symbolic, topology, LatencyModel(), _ONE, _BATCHES, tolerance=1)
    with pytest.raises(SpecError, match="batch=0 must be a whole number"):
        latency_formula(symbolic, topology, LatencyModel(), _ONE, [{"batch": 0}])
    elsewhere = Assignment(np.zeros(4, dtype=np.int64), ((1,),))
    with pytest.raises(SpecError, match="uses device 1, there are 1"):
        latency_formula(symbolic, topology, LatencyModel(), elsewhere, _BATCHES)
    other = Assignment(np.zeros(5, dtype=np.int64), ((0,),))
    with pytest.raises(SpecError, match="places 5 operators, the model has 4"):
        latency_formula(symbolic, topology, LatencyModel(), other, _BATCHES)

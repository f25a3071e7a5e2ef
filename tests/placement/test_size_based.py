import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.core.graph import OpGraph
from fxpart.core.topology import Link
from fxpart.errors import InfeasibleError
from fxpart.placement import infeasible, make_mode
from fxpart.placement.search.fill import fill_in_order
from fxpart.placement.search.units import Units, atomic_units, contiguous_units, module_units
from tests.independent import peak_bytes
from tests.placement.training_sketch import random_training_graph
from tests.sketch import Sketch, chain, devices, problem, random_graph


def test_devices_are_filled_in_graph_order() -> None:
    # Each operator has its weight of 10 and two live values of 1: three take 32, four 42.
    # Of equally fast devices, the largest comes first.
    this = problem(chain(7), devices(32, 42, 42))
    assert make_mode("size_based")(this).device_of.tolist() == [1, 1, 1, 1, 2, 2, 2]


def test_the_fastest_device_that_holds_all_is_taken_not_the_largest() -> None:
    this = problem(chain(3), devices(100, 50, 40, speeds=[1.0, 2.0, 4.0]))
    for mode in ("size_based", "single"):
        assert make_mode(mode)(this).devices_of_partition == ((2,),)
    small = problem(chain(3), devices(100, 50, 20, speeds=[1.0, 2.0, 4.0]))
    assert make_mode("single")(small).devices_of_partition == ((1,),)


def test_several_fast_devices_are_preferred_to_a_slow_one_that_holds_all() -> None:
    this = problem(chain(6), devices(100, 32, 32, speeds=[0.1, 2.0, 2.0], link=Link(1e3)))
    assert make_mode("size_based")(this).device_of.tolist() == [1, 1, 1, 2, 2, 2]


def test_a_device_that_only_adds_transfers_stays_empty() -> None:
    # The second fastest holds one operator: it would save half a second, and cost another transfer.
    this = problem(chain(6), devices(42, 22, 12, speeds=[4.0, 1.0, 2.0], link=Link(1.0)))
    assert make_mode("size_based")(this).device_of.tolist() == [0, 0, 0, 0, 1, 1]


def _training_chain(layers: int) -> OpGraph:
    """Return layers with a weight of 10 and a saved result of 1, and their backward."""
    sketch = Sketch()
    value, saved, weights = sketch.input(0), list[int](), list[int]()
    for _ in range(layers):
        weights.append(sketch.weight(10))
        value = sketch.op([value], 1, [weights[-1]], 1)
        saved.append(value)
    gradients = [value]
    for op in reversed(range(layers)):
        gradients.append(sketch.op([gradients[-1], saved[op]], 10, [weights[op]], backward_of=op))
    return sketch.graph(*gradients[1:])


def test_a_training_step_is_filled_by_its_forward() -> None:
    # A layer holds a weight, its gradient and that of the next, 30, and one or two results.
    graph = _training_chain(6)
    placed = make_mode("size_based")(problem(graph, devices(54, 54, 54)))
    assert placed.device_of.tolist() == [0, 0, 1, 1, 2, 2, 2, 2, 1, 1, 0, 0]
    # A forward and a backward each, which are one on the last device.
    assert placed.devices_of_partition == ((0,), (1,), (2,), (1,), (0,))


@given(seed=st.integers(0, 10_000), n=st.integers(2, 30), share=st.floats(0.2, 1.0))
def test_stretches_of_a_training_step_are_placed_in_order(seed: int, n: int, share: float) -> None:
    graph = random_training_graph(seed, n)
    this = problem(graph, devices(1))
    whole = peak_bytes(graph, np.zeros(graph.n_ops, dtype=np.int64), 0)
    units = contiguous_units(graph)
    assert sorted(units[1].tolist()) == list(range(graph.n_ops))
    capacity = [max(1, int(whole * share))] * 3
    device_of, _, n_left = fill_in_order(this.memory, units, capacity)
    assert (device_of == device_of[graph.group]).all()
    assert (device_of == device_of[graph.forward_of]).all()
    forward = device_of[: graph.first_backward]
    placed = forward[forward >= 0]
    assert (np.diff(placed) >= 0).all()
    assert (forward[: len(placed)] >= 0).all()
    assert (n_left == 0) == bool((device_of >= 0).all())
    for device, capacity_bytes in enumerate(capacity):
        assert (
            not (device_of == device).any()
            or peak_bytes(graph, device_of, device) <= capacity_bytes
        )


def test_an_exact_fit_is_a_fit() -> None:
    graph = chain(4)
    assert make_mode("size_based")(problem(graph, devices(42))).device_of.tolist() == [0] * 4
    with pytest.raises(InfeasibleError):
        make_mode("size_based")(problem(graph, devices(41)))


def test_the_whole_model_goes_to_the_largest_device_if_it_fits() -> None:
    placed = make_mode("size_based")(problem(chain(3), devices(10, 100, 50)))
    assert placed.devices_of_partition == ((1,),)


def test_a_device_too_small_for_the_next_operator_stays_empty() -> None:
    placed = make_mode("size_based")(problem(chain(4), devices(5, 22, 22)))
    assert placed.device_of.tolist() == [1, 1, 2, 2]


def test_remaining_operators_go_where_they_fit_most_tightly() -> None:
    sketch = Sketch()
    for weight in (60, 60, 30, 8):
        sketch.op([], 0, [sketch.weight(weight)], 1)
    # 60 fills device 0 to 60 of 100; the next 60 needs device 1; 30 fits beside it (90 of 95);
    # 8 is left over, and only device 0 has room.
    placed = make_mode("size_based")(problem(sketch.graph(), devices(100, 95)))
    assert placed.device_of.tolist() == [0, 1, 1, 0]


def test_the_error_states_how_many_devices_would_be_enough() -> None:
    # 6 operators of 10 with two values of 1: 62 bytes; two operators in 22 bytes, so 3 devices.
    with pytest.raises(
        InfeasibleError, match="smallest number of such devices found to hold it is 3"
    ) as caught:
        make_mode("size_based")(problem(chain(6), devices(22, 22)))
    assert caught.value.needed_bytes == 62
    assert caught.value.available_bytes == 44
    assert caught.value.devices_that_fit == 3
    make_mode("size_based")(problem(chain(6), devices(22, 22, 22)))


def test_an_operator_too_large_for_any_device_is_named() -> None:
    with pytest.raises(
        InfeasibleError, match="operator op0 of layer0 alone needs 11 B, a device has 5 B"
    ):
        make_mode("size_based")(problem(chain(3), devices(5, 5)))


def test_single_names_the_device_that_it_would_use() -> None:
    with pytest.raises(InfeasibleError, match=r"the model needs 62 B \(62 bytes\)") as caught:
        make_mode("single")(problem(chain(6), devices(22, 22)))
    assert caught.value.available_bytes == 22


def test_single_gives_needed_and_available_bytes_that_round_to_the_same() -> None:
    this = problem(chain(1, weight=2_400_692_736), devices(2_400_692_736))
    with pytest.raises(InfeasibleError, match=r"has 2\.40 GB \(2400692736 bytes\)") as caught:
        make_mode("single")(this)
    assert f"needs 2.40 GB ({caught.value.needed_bytes} bytes)" in str(caught.value)


def test_each_device_gets_the_longest_run_that_fits() -> None:
    opened_most = 0
    for seed in range(60):
        graph = random_graph(seed, 25)
        units = contiguous_units(graph)
        start, ops = units
        assert ops.tolist() == list(range(25))
        capacity = 60 + max(_alone_bytes(graph, units))
        this = problem(graph, devices(capacity))
        device_of, opened, n_left = fill_in_order(this.memory, units, [capacity] * 25)
        assert n_left == 0
        opened_most = max(opened_most, opened)
        # One at a time, a device is opened exactly when the next unit does not fit.
        slow = np.full(graph.n_ops, -1)
        device = 0
        for unit in range(len(start) - 1):
            unit_ops = ops[start[unit] : start[unit + 1]]
            slow[unit_ops] = device
            if peak_bytes(graph, slow, device) > capacity:
                device += 1
                slow[unit_ops] = device
        assert device_of.tolist() == slow.tolist()
        assert opened == device + 1
    assert opened_most > 2


def _alone_bytes(graph: OpGraph, units: Units) -> list[int]:
    """Return the bytes that each unit needs on a device of its own."""
    unit_bytes = []
    for unit in np.split(units[1], units[0][1:-1]):
        home = np.full(graph.n_ops, -1)
        home[unit] = 0
        unit_bytes.append(peak_bytes(graph, home, 0))
    return unit_bytes


def test_operators_between_those_of_a_group_are_filled_with_them() -> None:
    sketch = Sketch()
    base = sketch.op([], 64)
    view = sketch.op([base], 64, view_of=base)
    last = sketch.op([base, view], 1, group=0)
    graph = sketch.graph(sketch.op([last], 1, [sketch.weight(50)]))
    # Without the view that it reads, the group holds two copies of 64: more units need less.
    assert peak_bytes(graph, np.array([0, 1, 0, 1]), 0) == 64 + 64 + 1
    assert peak_bytes(graph, np.array([0, 0, 0, 1]), 0) == 64 + 1
    placed = make_mode("size_based")(problem(graph, devices(70, 65)))
    assert placed.device_of.tolist() == [0, 0, 0, 1]


def test_stretches_contain_whole_groups() -> None:
    sketch = Sketch()
    for group in (0, 0, 2, 2, 0, 5, 5, 7, 8, 8, 7, 11):
        # Groups {0, 1, 4} around {2, 3}; {5, 6}; {7, 10} around {8, 9}; and 11.
        sketch.op([], 1, group=group)
    start, ops = contiguous_units(sketch.graph())
    assert [list(o) for o in np.split(ops, start[1:-1])] == [
        [0, 1, 2, 3, 4],
        [5, 6],
        [7, 8, 9, 10],
        [11],
    ]


def test_units_of_modules_go_from_coarse_to_fine() -> None:
    sketch = Sketch()
    for module in ("emb", "layer.0.attn", "layer.0.attn", "layer.0.mlp", "layer.1.attn", "head"):
        sketch.op([], 1, module=module)
    levels = module_units(sketch.graph())
    assert [[list(o) for o in np.split(ops, start[1:-1])] for start, ops in levels] == [
        [[0], [1, 2, 3, 4], [5]],
        [[0], [1, 2, 3], [4], [5]],
        [[0], [1, 2], [3], [4], [5]],
    ]


def test_units_never_divide_a_group() -> None:
    sketch = Sketch()
    first = sketch.op([], 1, module="a")
    sketch.op([first], 1, module="b", group=0)
    sketch.op([], 1, module="c")
    for start, ops in [atomic_units(sketch.graph()), *module_units(sketch.graph())]:
        assert [list(o) for o in np.split(ops, start[1:-1])] == [[0, 1], [2]]


def test_a_second_packing_succeeds_where_graph_order_fails() -> None:
    sketch = Sketch()
    for weight in (12, 32, 24, 20, 16):
        sketch.op([], 0, [sketch.weight(weight)], 1)
    # In order: 12 | 32 + 20 | ... leaves 24 or 16 over; 12 + 24 + 16 and 32 + 20 fit in 52.
    this = problem(sketch.graph(), devices(52, 52))
    homes = make_mode("size_based")(this).device_of.tolist()
    assert homes[1] == homes[3] != homes[0] == homes[2] == homes[4]


def test_a_group_of_distant_operators_is_not_considered_too_large() -> None:
    sketch = Sketch()
    for group in (0, 1, 2, 0):
        sketch.op([], 0, [sketch.weight(10)], 1, group=group)
    # The group's two operators take 20; in graph order all four would have to be on one device.
    with pytest.raises(InfeasibleError, match="found to hold it is 2") as caught:
        make_mode("size_based")(problem(sketch.graph(), devices(25)))
    assert caught.value.devices_that_fit == 2
    assert make_mode("size_based")(problem(sketch.graph(), devices(25, 25))).n_partitions > 1


def test_the_number_of_sufficient_devices_is_computed_only_when_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Searches skip what does not fit: finding how many devices are enough can take seconds."""
    looked: list[int] = []

    def place_all(*_: object) -> None:
        looked.append(1)

    monkeypatch.setattr(infeasible, "place_all", place_all)
    error = infeasible.does_not_fit(problem(chain(8, weight=10), devices(25, 25)))
    assert (error.available_bytes, looked) == (50, [])
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == str(error)
    assert copied.devices_that_fit == error.devices_that_fit is not None
    assert looked == [1]

"""Other schedules of a graph: what is in use after each node."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from fxpart.errors import SpecError
from fxpart.torch_compat.memory import MemoryTracker, build_memory_profile
from tests.torch_compat.memory.scene import Drawing, aten, no_primal, random_drawing


def _diamond() -> tuple[fx.Graph, dict[str, fx.Node]]:
    d = Drawing()
    x = d.input("primals_1", 4)
    big = d.call(aten.repeat.default, x, [10])
    left = d.call(aten.sum.default, big)
    wide = d.call(aten.repeat.default, x, [5])
    right = d.call(aten.sum.default, wide)
    graph = d.done(d.call(aten.add.Tensor, left, right))
    return graph, {"big": big, "left": left, "wide": wide, "right": right}


def test_the_order_decides_the_peak() -> None:
    graph, by = _diamond()
    one_by_one, together = MemoryTracker(graph), MemoryTracker(graph)
    seen = []
    for name in ("big", "left", "wide", "right"):
        one_by_one.schedule_node(by[name])
        seen.append(one_by_one.get_current_memory_bytes())
    # 16 of the input; 160, of which a sum of 4 bytes is left; then 80, and another 4.
    assert seen == [176, 20, 100, 24]
    assert one_by_one.peak_memory == 180
    for name in ("wide", "big", "right", "left"):
        together.schedule_node(by[name])
    assert together.peak_memory == 16 + 80 + 160 + 4
    assert together.current_memory_bytes == 24


def test_what_may_go_and_which_devices_count_can_be_said() -> None:
    graph, by = _diamond()
    none = MemoryTracker(graph, device_filter=lambda device: device.type != "cpu")
    all_stay = MemoryTracker(graph, lambda _: False)
    doubled = MemoryTracker(graph, size_of=lambda size: 2 * int(size))
    for name in ("big", "left"):
        for tracker in (none, all_stay, doubled):
            tracker.schedule_node(by[name])
    assert (none.current_memory_bytes, none.peak_memory) == (0, 0)
    assert all_stay.current_memory_bytes == 16 + 160 + 4
    assert doubled.current_memory_bytes == 40


def _profile_by_tracker(graph: fx.Graph) -> list[int]:
    """Return a tracker's bytes before the first operator and after each."""
    tracker = MemoryTracker(graph, no_primal)
    seen = [tracker.get_current_memory_bytes()]
    for node in graph.nodes:
        tracker.schedule_node(node)
        if node.op == "call_function":
            seen.append(tracker.get_current_memory_bytes())
    assert tracker.peak_memory == max(build_memory_profile(graph, no_primal))
    return seen


def _reordered(graph: fx.Graph, rng: random.Random) -> fx.Graph:
    """Return a copy in another order in which nodes come after what they read."""
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    waiting = [node for node in graph.nodes if node.op != "output"]
    while waiting:
        ready = [n for n in waiting if all(before in copies for before in n.all_input_nodes)]
        node = rng.choice([n for n in ready if n.op == "placeholder"] or ready)
        copies[node] = copy.node_copy(node, copies.__getitem__)
        waiting.remove(node)
    copy.node_copy(graph.output_node(), copies.__getitem__)
    return copy


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_a_schedule_is_the_profile_of_the_graph_in_that_order(seed: int) -> None:
    graph = random_drawing(seed)
    assert _profile_by_tracker(graph) == build_memory_profile(graph, no_primal)[::2]
    other = _reordered(graph, random.Random(seed))
    by_name = {node.name: node for node in graph.nodes}
    tracker = MemoryTracker(graph, no_primal)
    for node in other.nodes:
        tracker.schedule_node(by_name[node.name])
    expected = build_memory_profile(other, no_primal)
    assert tracker.peak_memory == max(expected)
    assert tracker.current_memory_bytes == expected[-1]


def test_refusals() -> None:
    graph, by = _diamond()
    tracker = MemoryTracker(graph)
    with pytest.raises(
        SpecError, match=r"sum_default cannot .* before what it reads: repeat_defau"
    ):
        tracker.schedule_node(by["left"])
    assert tracker.peak_memory == 16, "a refusal changes nothing"
    tracker.schedule_node(by["big"])
    with pytest.raises(SpecError, match="repeat_default was scheduled before"):
        tracker.schedule_node(by["big"])
    output = graph.output_node()
    with pytest.raises(SpecError, match="output cannot be scheduled before what it reads"):
        tracker.schedule_node(output)
    stranger = fx.Graph().placeholder("repeat_defalt")
    with pytest.raises(SpecError, match=r"repeat_defalt is not in the graph .nearest: repeat_def"):
        tracker.schedule_node(stranger)

"""Other schedules of a graph: bytes in use after each node."""

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
    total = d.call(aten.sum.default, big)
    wide = d.call(aten.repeat.default, x, [5])
    right = d.call(aten.sum.default, wide)
    graph = d.done(d.call(aten.add.Tensor, total, right))
    return graph, {"big": big, "left": total, "wide": wide, "right": right}


def test_the_order_decides_the_peak() -> None:
    graph, nodes = _diamond()
    one_by_one, together = MemoryTracker(graph), MemoryTracker(graph)
    bytes_in_use = []
    for name in ("big", "left", "wide", "right"):
        one_by_one.schedule_node(nodes[name])
        bytes_in_use.append(one_by_one.get_current_memory_bytes())
    # 16 of the input; 160, of which a sum of 4 bytes remains; then 80, and another 4.
    assert bytes_in_use == [176, 20, 100, 24]
    assert one_by_one.peak_memory == 180
    for name in ("wide", "big", "right", "left"):
        together.schedule_node(nodes[name])
    assert together.peak_memory == 16 + 80 + 160 + 4
    assert together.current_memory_bytes == 24


def test_releasable_nodes_and_counted_devices_can_be_chosen() -> None:
    graph, nodes = _diamond()
    none = MemoryTracker(graph, device_filter=lambda device: device.type != "cpu")
    all_stay = MemoryTracker(graph, lambda _: False)
    doubled = MemoryTracker(graph, size_of=lambda size: 2 * int(size))
    for name in ("big", "left"):
        for tracker in (none, all_stay, doubled):
            tracker.schedule_node(nodes[name])
    assert (none.current_memory_bytes, none.peak_memory) == (0, 0)
    assert all_stay.current_memory_bytes == 16 + 160 + 4
    assert doubled.current_memory_bytes == 40


def _profile_by_tracker(graph: fx.Graph) -> list[int]:
    """Return a tracker's bytes before the first operator and after each."""
    tracker = MemoryTracker(graph, no_primal)
    bytes_in_use = [tracker.get_current_memory_bytes()]
    for node in graph.nodes:
        tracker.schedule_node(node)
        if node.op == "call_function":
            bytes_in_use.append(tracker.get_current_memory_bytes())
    assert tracker.peak_memory == max(build_memory_profile(graph, no_primal))
    return bytes_in_use


def _reordered(graph: fx.Graph, rng: random.Random) -> fx.Graph:
    """Return a copy in another order in which nodes follow their inputs."""
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
def test_a_schedule_equals_the_profile_of_the_graph_in_that_order(seed: int) -> None:
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
    graph, nodes = _diamond()
    tracker = MemoryTracker(graph)
    with pytest.raises(
        SpecError, match=r"sum_default cannot .* before what it reads: repeat_defau"
    ):
        tracker.schedule_node(nodes["left"])
    assert tracker.peak_memory == 16, "a refusal changes nothing"
    tracker.schedule_node(nodes["big"])
    with pytest.raises(SpecError, match="repeat_default was scheduled before"):
        tracker.schedule_node(nodes["big"])
    output = graph.output_node()
    with pytest.raises(SpecError, match="output cannot be scheduled before what it reads"):
        tracker.schedule_node(output)
    stranger = fx.Graph().placeholder("repeat_defalt")
    with pytest.raises(SpecError, match=r"repeat_defalt is not in the graph .nearest: repeat_def"):
        tracker.schedule_node(stranger)

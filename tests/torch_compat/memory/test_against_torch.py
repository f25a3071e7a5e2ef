"""The same numbers as torch's own estimator where it is right, and the cases where it is not.

The graphs pretend to be on a GPU: torch's estimator ignores CPU tensors.
"""

import random

import pytest
import torch._inductor.fx_passes.memory_estimator as theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from fxpart.torch_compat.memory import MemoryTracker, build_memory_profile, get_peak_memory
from tests.torch_compat.memory.scene import Drawing, always, aten, never, no_primal, random_drawing


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_profiles_equal_those_of_torch(seed: int) -> None:
    graph = random_drawing(seed, device="cuda", unread=False)
    for rule in (always, never, no_primal):
        assert build_memory_profile(graph, rule) == theirs.build_memory_profile(graph, rule)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_trackers_equal_those_of_torch_after_each_node(seed: int) -> None:
    graph = random_drawing(seed, device="cuda", unread=False)
    rng, ours, other = random.Random(seed), MemoryTracker(graph), theirs.MemoryTracker(graph)
    waiting = [node for node in graph.nodes if node.op == "call_function"]
    scheduled = set(graph.find_nodes(op="placeholder"))
    while waiting:
        node = rng.choice([n for n in waiting if scheduled.issuperset(n.all_input_nodes)])
        for tracker in (ours, other):
            tracker.schedule_node(node)
        assert ours.get_current_memory_bytes() == other.get_current_memory_bytes()
        waiting.remove(node)
        scheduled.add(node)
    assert ours.peak_memory == other.peak_memory


def _both(graph: fx.Graph) -> tuple[list[int], list[int]]:
    return build_memory_profile(graph, no_primal), theirs.build_memory_profile(graph, no_primal)


def test_torch_leaves_tensors_of_the_cpu_out() -> None:
    d = Drawing()
    a = d.call(aten.neg.default, d.input("x", 4))
    assert _both(d.done(a)) == ([16, 32, 16], [0, 0, 0])


def test_torch_never_frees_a_result_that_nobody_takes() -> None:
    d = Drawing("cuda")
    x = d.input("primals_1", 4)
    d.call(aten.neg.default, x)
    a = d.call(aten.relu.default, x)
    assert _both(d.done(a)) == ([16, 32, 16, 32, 32], [16, 32, 32, 48, 48])


def test_torch_asks_one_of_the_inputs_that_share_a_storage() -> None:
    d = Drawing("cuda")
    x = d.input("x", 4)
    with d.mode:
        d.given("primals_1", aten.slice.Tensor(x.meta["val"], 0, 0, 2))
    a = d.call(aten.neg.default, x)
    assert _both(d.done(a)) == ([16, 32, 32], [16, 32, 16])


def test_torch_takes_copied_metadata_for_an_alias() -> None:
    d = Drawing("cuda")
    x = d.input("primals_1", 4)
    a = d.call(aten.neg.default, x)
    b = d.call(aten.relu.default, x)
    b.meta["val"] = a.meta["val"]
    assert _both(d.done(a, b)) == ([16, 32, 32, 48, 48], [16, 32, 32, 32, 32])


def test_torch_takes_what_a_schema_says_is_one_storage_for_two() -> None:
    d = Drawing("cuda")
    a = d.call(aten.neg.default, d.input("primals_1", 4))
    b = d.call(aten.relu_.default, a)
    with d.mode:
        b.meta["val"] = b.meta["val"].clone()
    assert _both(d.done(b)) == ([16, 32, 32, 32, 32], [16, 32, 32, 48, 32])


def test_torch_releases_attributes() -> None:
    d = Drawing("cuda")
    constant = d.graph.get_attr("constant")
    constant.meta["val"] = d.input("x", 4).meta["val"].clone()
    a = d.call(aten.neg.default, constant)
    assert _both(d.done(a)) == ([32, 48, 48], [32, 48, 32])


def test_torch_counts_a_node_without_metadata_as_nothing() -> None:
    d = Drawing("cuda")
    a = d.graph.call_function(aten.neg.default, (d.input("x", 4),))
    graph = d.done(a)
    assert theirs.build_memory_profile(graph, always) == [16, 16, 0]
    with pytest.raises(RuntimeError, match="neg_default carries no meta"):
        build_memory_profile(graph, always)


def test_torch_finds_no_peak_of_a_pair_at_all() -> None:
    d = Drawing("cuda")
    forward = d.done(d.call(aten.neg.default, d.input("primals_1", 4)))
    e = Drawing("cuda")
    backward = e.done(e.call(aten.neg.default, e.input("tangents_1", 4)))
    with pytest.raises(TypeError):
        theirs.get_peak_memory(forward, backward)
    with pytest.raises(TypeError):
        theirs.get_fwd_bwd_interactions(forward, backward)
    # The input and the result stay; also the tangent, while its negative is computed.
    assert get_peak_memory(forward, backward) == 16 + 16 + 16 + 16

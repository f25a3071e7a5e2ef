"""Memory of a device that is reserved before anything is placed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.core.assignment import Assignment
from fxpart.core.optimizer import Optimizer, with_optimizer
from fxpart.core.reserve import Reserve, rounded, with_reserve
from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from fxpart.cost.all_reduce import with_buckets
from fxpart.cost.evaluate import evaluate
from fxpart.errors import InfeasibleError, SpecError
from fxpart.placement import make_mode
from fxpart.placement.infeasible import describe_reserve
from tests.sketch import Sketch, chain, devices, problem, random_graph


def device(memory_bytes: int) -> DeviceSpec:
    return DeviceSpec("d", memory_bytes, {"float32": 1.0}, 1.0)


def test_a_reserve_reduces_the_memory_for_tensors() -> None:
    remaining = with_reserve(device(1000), Reserve(context_bytes=90, workspace_bytes=10))
    assert (remaining.memory_bytes, remaining.reserved_bytes, remaining.total_bytes) == (
        900,
        100,
        1000,
    )


def test_fragmentation_is_a_share_of_the_remaining_memory() -> None:
    reserve = Reserve(context_bytes=100, fragmentation=0.25)
    assert reserve.reserved_bytes(1000) == 100 + 225
    assert with_reserve(device(1000), reserve).memory_bytes == 675


def test_the_default_reserves_nothing() -> None:
    assert with_reserve(device(1000), Reserve()) == device(1000)


def test_a_second_reserve_adds_to_the_first() -> None:
    once = with_reserve(device(1000), Reserve(context_bytes=100))
    twice = with_reserve(once, Reserve(workspace_bytes=50))
    assert (twice.memory_bytes, twice.reserved_bytes) == (850, 150)


@given(
    st.integers(1, 10**12),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.floats(0, 0.9),
)
def test_memory_is_split_into_tensors_and_reserve(
    memory: int, context: int, workspace: int, fragmentation: float
) -> None:
    reserve = Reserve(context, workspace, 512, fragmentation)
    if context + workspace >= memory or reserve.reserved_bytes(memory) >= memory:
        with pytest.raises(InfeasibleError, match="its reserve alone takes"):
            with_reserve(device(memory), reserve)
        return
    remaining = with_reserve(device(memory), reserve)
    assert remaining.total_bytes == memory
    assert remaining.memory_bytes >= 1
    assert remaining.reserved_bytes >= context + workspace


def test_a_device_smaller_than_its_reserve_is_refused() -> None:
    reserve = Reserve(context_bytes=3000, workspace_bytes=1000)
    with pytest.raises(
        InfeasibleError,
        match=(
            r"device d has 2\.00 kB, but its reserve alone takes 4\.00 kB \(driver context"
            r" 3\.00 kB, workspace 1\.00 kB\); take a larger device, or reserve=none$"
        ),
    ):
        with_reserve(device(2000), reserve)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_bytes": -1}, "reserve.context_bytes must be at least 0, got -1"),
        ({"workspace_bytes": -5}, "reserve.workspace_bytes must be at least 0, got -5"),
        ({"rounding_bytes": 0}, "reserve.rounding_bytes must be from 1, .* got 0"),
        ({"fragmentation": -0.1}, "reserve.fragmentation must be a share from 0 to 0.9"),
        ({"fragmentation": 1.0}, "reserve.fragmentation must be a share from 0 to 0.9"),
        ({"fragmentation": float("nan")}, "reserve.fragmentation must be a share from 0 to 0.9"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Reserve(**settings)  # type: ignore[arg-type]


def test_storages_are_rounded_but_not_transfers() -> None:
    graph = random_graph(3, 30)
    whole = rounded(graph, 512)
    for before, after in (
        (graph.weight_bytes, whole.weight_bytes),
        (graph.value_alloc_bytes, whole.value_alloc_bytes),
    ):
        assert after.tolist() == [512 if size else 0 for size in before.tolist()]
    assert whole.value_bytes is graph.value_bytes
    assert rounded(graph, 1) is graph


def test_multiples_stay_and_larger_sizes_are_rounded_up() -> None:
    sizes = chain(3, weight=1024, size=1025)
    assert rounded(sizes, 512).weight_bytes.tolist() == [1024] * 3
    assert rounded(sizes, 512).value_alloc_bytes.tolist() == [0, 1536, 1536, 1536]


def test_each_tensor_of_a_state_is_rounded() -> None:
    sketch = Sketch()
    weights = [sketch.weight(500), sketch.weight(1028)]
    values = [sketch.op([], 500, [weights[0]]), sketch.op([], 1028, [weights[1]])]
    step = replace(
        sketch.graph(*values),
        gradient_values=np.array(values),
        gradient_weights=np.array(weights),
    )
    graph = with_optimizer(step, Optimizer("adam"))
    assert graph.weight_state_bytes.tolist() == [1004, 2060]
    # Two states and the step count each: as one allocation, 1004 bytes would be 1024.
    whole = rounded(graph, 512)
    assert whole.weight_state_bytes.tolist() == [3 * 512, 2 * 1536 + 512]
    rounded_again = rounded(with_buckets(whole, np.array(values)), 512)
    assert rounded_again.weight_state_bytes.tolist() == [4 * 512, 3 * 1536 + 512]


def test_a_state_of_one_tensor_is_rounded_as_one() -> None:
    graph = replace(chain(2), weight_state_bytes=np.array([0, 1004]))
    assert rounded(graph, 512).weight_state_bytes.tolist() == [0, 1024]


def test_a_rounding_of_zero_is_refused() -> None:
    with pytest.raises(SpecError, match="rounding_bytes must be from 1, "):
        rounded(chain(2), 0)


def test_modes_and_evaluation_use_the_remaining_memory() -> None:
    # 3 weights of 10 bytes and two values of 1: 32 bytes in total.
    graph, whole = chain(3), Assignment(np.zeros(3, dtype=np.int64), ((0,),))
    exact = with_reserve(device(132), Reserve(context_bytes=100))
    tight = with_reserve(device(131), Reserve(context_bytes=100))
    fits = problem(graph, uniform_topology((exact,), Link(1.0)))
    use = evaluate(fits, whole).devices[0]
    assert (use.peak_bytes, use.free_bytes, use.reserved_bytes) == (32, 0, 100)
    assert use.total_bytes == 132
    for mode in ("single", "size_based", "kl_based"):
        make_mode(mode)(fits)
        with pytest.raises(InfeasibleError, match=r"31 B.* beside 100 B reserved"):
            make_mode(mode)(problem(graph, uniform_topology((tight,), Link(1.0))))


def test_the_reserve_is_named_for_equal_and_unequal_devices() -> None:
    small, large = (with_reserve(device(size), Reserve(fragmentation=0.5)) for size in (100, 200))
    assert describe_reserve([small]) == " beside 50 B reserved"
    assert describe_reserve([small, small]) == " beside 50 B reserved on each"
    assert describe_reserve([small, large]) == " beside up to 100 B reserved on each"
    assert describe_reserve([device(100)]) == ""


def test_the_error_of_large_tables_names_the_reserve() -> None:
    sketch = Sketch()
    rows = [sketch.op([], 1, [sketch.weight(60)]) for _ in range(3)]
    joined = sketch.op(rows, 1)
    graph = replace(
        sketch.graph(joined), targets=("aten.embedding.default",) * 3 + ("aten.cat.default",)
    )
    for reserve, count, message in (
        (60, 2, "beside 60 B reserved on each"),
        (90, 1, "beside 90 B"),
    ):
        remaining = with_reserve(device(130), Reserve(context_bytes=reserve))
        topology = uniform_topology((remaining,) * count, Link(1.0))
        with pytest.raises(InfeasibleError, match=message):
            make_mode("sparse_nn")(problem(graph, topology))


def test_a_topology_without_reserves_has_none() -> None:
    assert [d.reserved_bytes for d in devices(5, 6).devices] == [0, 0]

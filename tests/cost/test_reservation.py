"""Memory that the allocator reserves for a graph, and the total needs of a device."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fxpart.capture.training.joint import joint_graph
from fxpart.core.assignment import Assignment
from fxpart.core.graph import CACHE, IntArray
from fxpart.core.optimizer import Optimizer, with_optimizer
from fxpart.core.reserve import Interval, Reserve, rounded
from fxpart.cost.caching_allocator import AllocatorRun, run_allocator
from fxpart.cost.device_memory import DeviceMemory, convolution_bytes, device_memory_of
from fxpart.cost.evaluate import evaluate
from fxpart.cost.peak_tensors import storages_at_peak
from fxpart.cost.problem import Problem
from fxpart.cost.reservation import reservation
from fxpart.errors import SpecError
from tests.sketch import Sketch, chain, devices, problem, random_graph

MIB = 2**20


def _whole(task: Problem) -> Assignment:
    n = task.graph.n_ops
    return Assignment(np.zeros(n, dtype=np.int64), ((0,),))


def _needs(task: Problem, plan: Assignment, reserve: Reserve, peers: int = 0) -> DeviceMemory:
    peak_of = {use.logical_id: use.peak_bytes for use in evaluate(task, plan).devices}
    reserves = [reserve] * task.topology.n_devices
    return device_memory_of(
        task, plan, reserves, tensor_bytes=peak_of, peers=dict.fromkeys(peak_of, peers)
    )[0]


@pytest.mark.parametrize("seed", range(6))
def test_without_workspaces_the_allocator_peaks_at_the_evaluated_peak(seed: int) -> None:
    graph = rounded(random_graph(seed, 40), 512)
    # Sent values have the size of their source, so that they too are whole blocks.
    graph = replace(graph, value_bytes=graph.value_alloc_bytes)
    task = problem(graph, devices(10**9, 10**9))
    half = np.arange(graph.n_ops) % 2
    for plan in (_whole(task), Assignment(half, ((0,), (1,)))):
        uses = evaluate(task, plan).devices
        for device, _, storages, _ in storages_at_peak(task, plan):
            run = reservation(graph, storages, np.zeros(graph.n_ops, dtype=np.int64))
            assert run.allocated_bytes == uses[device].peak_bytes
            assert run.reserved_bytes >= run.allocated_bytes
            assert run.reserved_bytes % (2 * MIB) == 0


def test_too_little_memory_does_not_change_what_is_needed() -> None:
    small = random_graph(3, 60)
    graph = replace(small, value_alloc_bytes=small.value_alloc_bytes * 3 * MIB)
    task = problem(graph, devices(10**12))
    ((_, _, storages, _),) = storages_at_peak(task, _whole(task))
    no_workspaces = np.zeros(graph.n_ops, dtype=np.int64)
    whole = reservation(graph, storages, no_workspaces)
    for limit_bytes in range(0, whole.reserved_bytes, 2 * MIB):
        run = reservation(graph, storages, no_workspaces, limit_bytes)
        assert run == whole or run.reserved_bytes <= limit_bytes
    assert reservation(graph, storages, no_workspaces, 0) == whole


def test_weights_that_no_operator_reads_are_on_the_only_device() -> None:
    sketch = Sketch()
    read, _ = sketch.weight(3 * MIB), sketch.weight(5 * MIB)
    value = sketch.op([sketch.input(MIB)], MIB, [read])
    task = problem(sketch.graph(sketch.op([value], MIB)), devices(10**9, 10**9))
    reserve = Reserve(context_bytes=MIB)
    needs = _needs(task, _whole(task), reserve)
    assert needs.parts["unread weights"] == Interval(5 * MIB, 5 * MIB, 5 * MIB)
    assert needs.needed.expected - needs.parts["tensors"].expected >= 5 * MIB
    apart = Assignment(np.array([0, 1]), ((0,), (1,)))
    assert "unread weights" not in _needs(task, apart, reserve).parts
    assert "unread weights" not in _needs(task, _whole(task), Reserve()).parts


def test_weights_that_no_operator_reads_leave_the_allocator_less_room() -> None:
    # 80 MiB do not fit into the 60 MiB freed before, which are returned only if room is short.
    sketch = Sketch()
    value = sketch.input(MIB)
    for size in (60, 20, 80, 20):
        value = sketch.op([value], size * MIB)
    graph = replace(
        sketch.graph(value),
        unread_weight_names=("unread",),
        unread_weight_bytes=np.array([5 * MIB]),
    )
    # Segments of at least 2 MiB, and those weights: 2 + 60 + 20 + 80 + 5.
    for total, needed in ((170, 167), (165, 107)):
        task = problem(graph, devices(total * MIB))
        need = _needs(task, _whole(task), Reserve(caching_allocator=True))
        assert need.needed.expected == needed * MIB


def test_a_chain_of_large_tensors_needs_two_of_them() -> None:
    # Weights of 10 MiB; each value is freed when the next one is computed.
    task = problem(chain(6, weight=10 * MIB, size=30 * MIB), devices(10**9))
    ((_, _, storages, _),) = storages_at_peak(task, _whole(task))
    run = reservation(task.graph, storages, np.zeros(6, dtype=np.int64))
    # The input, the value read and the value computed; the result of a step stays.
    assert run.allocated_bytes == (60 + 2 * 30) * MIB
    assert run.reserved_bytes == run.allocated_bytes


def test_optimizer_state_is_allocated_by_the_first_update() -> None:
    sketch = Sketch()
    weight = sketch.weight(10 * MIB)
    value = sketch.op([], 10 * MIB, [weight])
    step = replace(
        sketch.graph(value),
        gradient_values=np.array([value]),
        gradient_weights=np.array([weight]),
    )
    graph = with_optimizer(step, Optimizer("momentum", implementation="fused"))
    task = problem(graph, devices(10**9))
    ((_, _, storages, _),) = storages_at_peak(task, _whole(task))
    run = reservation(graph, storages, np.zeros(graph.n_ops, dtype=np.int64))
    assert run.reserved_bytes == run.allocated_bytes == 30 * MIB


def test_a_cache_lives_across_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # A cache of 30 MiB, and a value of 20 MiB that would fit where it was freed.
    sketch = Sketch()
    cache = sketch.input(30 * MIB)
    value = sketch.op([cache], 20 * MIB, [sketch.weight(10 * MIB)])
    graph = sketch.graph(sketch.op([value], 20 * MIB))
    names = (f"{CACHE}keys", *graph.value_names[1:])
    allocations: list[int] = []

    def counting(sizes: IntArray, events: IntArray, limit_bytes: float) -> AllocatorRun:
        allocations.append(sizes[events[events >= 0]].tolist().count(30 * MIB))
        return run_allocator(sizes, events, limit_bytes)

    monkeypatch.setattr("fxpart.cost.reservation.run_allocator", counting)
    for named in (graph, replace(graph, value_names=names)):
        task = problem(named, devices(10**9))
        ((_, _, storages, _),) = storages_at_peak(task, _whole(task))
        reservation(named, storages, np.zeros(named.n_ops, dtype=np.int64))
    # An input is allocated anew for each of two steps.
    assert allocations == [2, 1]


def _convolution(moved_bytes: int) -> Problem:
    # A window of 3 x 3: as many products as reads of the input, the weight and the result imply.
    flops = int(2 * (9 * 20 * 10 * 20 * MIB**3 / 4**3) ** 0.5)
    graph = replace(
        chain(3, weight=10 * MIB, size=20 * MIB),
        targets=("aten.relu.default", "aten.convolution.default", "aten.relu.default"),
        moved_bytes=np.array([moved_bytes] * 3),
        flops=np.array([flops] * 3),
    )
    return problem(graph, devices(10**9))


def test_a_workspace_is_live_while_its_convolution_runs() -> None:
    task = _convolution(50 * MIB)
    assert convolution_bytes(task.graph).tolist() == [0, 50 * MIB, 0]
    reserve = Reserve(convolution_workspace=2.0, convolution_workspace_range=(0.0, 1.5))
    parts = _needs(task, _whole(task), reserve).parts
    # 30 of weights, and the values read and computed.
    assert parts["tensors"] == Interval(70 * MIB, 70 * MIB, 70 * MIB)
    assert parts["kernel workspaces"] == Interval(0, 100 * MIB, 150 * MIB)
    assert "allocator" not in parts


@pytest.mark.parametrize(
    ("layer", "takes"),
    [
        (nn.Conv2d(8, 16, 3, padding=1), True),
        (nn.Conv2d(8, 16, 3, stride=2), True),
        (nn.Conv2d(8, 16, 3, padding=1, groups=2), True),
        (nn.Conv1d(8, 16, 5), True),
        (nn.Conv2d(8, 16, 1), False),
        (nn.Conv2d(8, 16, 4, stride=4), False),
        (nn.Conv2d(16, 16, 3, padding=1, groups=16), False),
        (nn.ConvTranspose2d(8, 16, 2, stride=2), False),
    ],
)
def test_convolutions_with_overlapping_windows_take_workspaces_in_both_directions(
    layer: nn.Module, takes: bool
) -> None:
    channels = layer.in_channels
    assert isinstance(channels, int)
    shape = [2, channels, 64] if isinstance(layer, nn.Conv1d) else [2, channels, 64, 64]
    graph = joint_graph(layer.to("meta"), (torch.zeros(shape, device="meta"),))
    is_convolution = ["convolution" in target for target in graph.targets]
    assert sum(is_convolution) == 2
    expected_bytes = np.where(is_convolution, graph.moved_bytes if takes else 0, 0)
    assert convolution_bytes(graph).tolist() == expected_bytes.tolist()


def test_every_part_of_a_device_is_named_and_adds_up() -> None:
    reserve = Reserve(
        context_bytes=100,
        context_range=(0.5, 2.0),
        workspace_bytes=10,
        nccl_peer_bytes=7,
        convolution_workspace=0.1,
        caching_allocator=True,
        allocator_error=0.5,
    )
    task = _convolution(10 * MIB)
    need = _needs(task, _whole(task), reserve, peers=3)
    parts = need.parts
    assert list(parts) == [
        "tensors",
        "kernel workspaces",
        "allocator",
        "library workspaces",
        "communication",
        "driver context",
    ]
    assert parts["driver context"] == Interval(50, 100, 200)
    assert parts["communication"] == Interval(21, 21, 21)
    # A workspace of 1 MiB has its own segment, half of which is kept.
    assert parts["kernel workspaces"].expected == parts["allocator"].expected == MIB
    assert need.needed.expected == sum(part.expected for part in parts.values())
    assert _needs(task, _whole(task), Reserve()).parts == {"tensors": parts["tensors"]}


@pytest.mark.parametrize(
    ("total_bytes", "verdict", "decided_by"),
    [
        (150, "fits", ""),
        (149, "tight", "driver context"),
        (100, "tight", "driver context"),
        (99, "does not fit", "driver context"),
        (59, "does not fit", "tensors"),
    ],
)
def test_the_verdict_and_its_deciding_part(total_bytes: int, verdict: str, decided_by: str) -> None:
    parts = {"tensors": Interval(60, 60, 60), "driver context": Interval(10, 40, 90)}
    need = DeviceMemory(0, parts, total_bytes)
    assert need.needed == Interval(70, 100, 150)
    assert (need.verdict, need.decided_by) == (verdict, decided_by)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_range": (0.5, 0.9)}, "reserve.context_range must be two factors"),
        ({"nccl_peer_range": (0.5,)}, "reserve.nccl_peer_range must be two factors"),
        ({"allocator_error": -0.1}, "reserve.allocator_error must be a share from 0"),
        ({"convolution_workspace": float("nan")}, "reserve.convolution_workspace must be a share"),
        ({"nccl_peer_bytes": -1}, "reserve.nccl_peer_bytes must be at least 0"),
    ],
)
def test_inconsistent_parts_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Reserve(**settings)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="an interval ascends"):
        Interval(3, 2, 4)

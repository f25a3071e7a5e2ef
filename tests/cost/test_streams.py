"""Copies of weights besides the simulated schedule: by hand, over links of 1 byte per second."""

from collections.abc import Sequence

import numpy as np
import pytest

from fxpart.core.graph import OpGraph
from fxpart.core.partitions import partition_by_device
from fxpart.cost.kernels import schedule, schedule_log
from fxpart.cost.streams import (
    Copy,
    Push,
    Source,
    Streams,
    Uses,
    buffer_bytes,
    copies_of,
    run_copies,
    with_streams,
)
from tests.sketch import Sketch, devices, problem

HERE, DISK = Source(), Source(from_disk=True)


def layers(*seconds: int) -> OpGraph:
    """Return a chain of layers that take the given seconds on a device of 1 FLOP/s."""
    sketch = Sketch()
    value = sketch.input(0)
    for i, flops in enumerate(seconds):
        value = sketch.op([value], 0, [sketch.weight(4)], flops, module=f"layers.{i}")
    return sketch.graph(value)


def streams(count: int = 1, **settings: float | bool) -> Streams:
    return Streams(np.ones(count), np.zeros(count), **settings)  # type: ignore[arg-type]


def latency_s(
    graph: OpGraph,
    copies: Sequence[Copy],
    settings: Streams,
    device_of: Sequence[int] | None = None,
) -> float:
    placed = np.array(device_of or [0] * graph.n_ops, dtype=np.int64)
    costs = problem(graph, devices(*[100] * len(settings.link_bytes_per_s))).costs
    timed, _ = run_copies(costs, placed, copies, settings)
    return float(schedule(timed, placed, schedule_log(timed))[0])


def streamed(graph: OpGraph, *ops: int, source: Source = HERE) -> list[Copy]:
    """Return the copies of the 4 bytes of each of those layers to the first device."""
    return [Copy(op, 0, 4, op, op, source) for op in ops]


@pytest.mark.parametrize(
    ("first_s", "overlap", "expected_s"),
    [
        (2, False, 2 + 4 + 3),
        (2, True, 4 + 3),  # the copy takes longer than the first layer
        (6, True, 6 + 3),  # the copy is hidden behind it
        (6, False, 6 + 4 + 3),
    ],
)
def test_two_layers_of_which_the_second_is_streamed(
    first_s: int, overlap: bool, expected_s: float
) -> None:
    graph = layers(first_s, 3)
    assert latency_s(graph, streamed(graph, 1), streams(overlap=overlap)) == expected_s


def test_the_third_copy_waits_for_memory() -> None:
    graph = layers(10, 10, 10)
    copies = streamed(graph, 0, 1, 2)
    # Copies at 0 to 4 and 4 to 8; the third after the first layer, at 14 to 18.
    placed = np.zeros(3, dtype=np.int64)
    costs = problem(graph, devices(100)).costs
    _, run = run_copies(costs, placed, copies, streams())
    assert run.copies == [(0, 4), (4, 8), (14, 18)]
    assert latency_s(graph, copies, streams()) == 4 + 3 * 10
    quick = layers(1, 1, 1)
    # All copies are needed before they arrive: 12 s of copies and the last layer.
    assert latency_s(quick, streamed(quick, 0, 1, 2), streams()) == 12 + 1


@pytest.mark.parametrize(("root", "expected_s"), [(np.inf, 5), (2.0, 7), (1.0, 9)])
def test_devices_share_a_root(root: float, expected_s: float) -> None:
    sketch = Sketch()
    value = sketch.input(0)
    ends = [sketch.op([value], 0, [sketch.weight(4)], 1, module=f"layers.{i}") for i in (0, 1)]
    graph = sketch.graph(*ends)
    copies = [Copy(0, 0, 4, 0, 0), Copy(1, 1, 4, 1, 1)]
    # A root of 2 bytes per second lets the second copy begin after half of its time.
    settings = streams(2, host_bytes_per_s=root)
    assert latency_s(graph, copies, settings, [0, 1]) == expected_s


def test_disks_and_pageable_memory_are_slower_than_the_link() -> None:
    graph = layers(1, 1)
    from_disk = streamed(graph, 1, source=DISK)
    assert latency_s(graph, from_disk, streams(disk_bytes_per_s=0.5)) == 8 + 1
    # A device that waits has it read first: at half a byte, then at one byte per second.
    assert latency_s(graph, from_disk, streams(overlap=False, disk_bytes_per_s=0.5)) == 1 + 12 + 1
    pageable = streamed(graph, 1, source=Source(share=0.25))
    assert latency_s(graph, pageable, streams(overlap=False)) == 1 + 16 + 1


def test_a_unit_is_copied_to_each_device_that_uses_it() -> None:
    graph = layers(1, 1, 1)
    unit_of = np.array([-1, 0, 0], dtype=np.int64)
    sizes = graph.weight_bytes
    uses = Uses(graph.users, graph.uses, sizes)
    together = copies_of(uses, np.zeros(3, dtype=np.int64), unit_of, [HERE])
    assert together == [Copy(0, 0, 8, 1, 2)]
    apart = copies_of(uses, np.array([0, 0, 1]), unit_of, [HERE])
    assert apart == [Copy(0, 0, 4, 1, 1), Copy(0, 1, 4, 2, 2)]
    assert buffer_bytes(apart, 2, overlap=True).tolist() == [4, 4]


def test_overlap_needs_memory_for_two_adjacent_layers() -> None:
    copies = [Copy(i, 0, size, i, i) for i, size in enumerate([4, 6, 3, 8])]
    assert buffer_bytes(copies, 1, overlap=True).tolist() == [11]
    assert buffer_bytes(copies, 1, overlap=False).tolist() == [8]


@pytest.mark.parametrize(
    ("push", "overlap", "expected_s"),
    [
        (Push(0, 2, 0), True, 5),  # while the second layer computes
        (Push(0, 4, 1), True, 5 + 4),  # the input ends when it has arrived
        (Push(0, 4, 0, waiting_ops=(1,)), True, 2 + 4 + 3),
        (Push(0, 4, 0), False, 2 + 4 + 3),
        (Push(0, 4, 1, source=DISK), True, 5 + 8),
    ],
)
def test_produced_values_are_pushed(push: Push, overlap: bool, expected_s: float) -> None:
    graph = layers(2, 3)
    settings = streams(overlap=overlap, disk_bytes_per_s=0.5)
    task, placed = problem(graph, devices(100)), np.zeros(2, dtype=np.int64)
    assignment = partition_by_device(graph, placed)
    evaluation = with_streams(
        task, assignment, [], settings, bound_s=0.0, least_load_s=0.0, pushes=[push]
    )
    assert evaluation.latency_s == expected_s


def test_a_link_carries_one_copy_and_one_push_at_a_time() -> None:
    graph = layers(1, 1, 1)
    task, placed = problem(graph, devices(100)), np.zeros(3, dtype=np.int64)
    pushes = [Push(0, 4, 0), Push(0, 4, 1), Push(0, 2, 2, to_host=False)]
    _, run = run_copies(task.costs, placed, streamed(graph, 2), streams(), pushes)
    assert run.copies == [(0, 4)]
    assert run.pushes == [(1, 5), (5, 9), (5, 7)]
    # Two devices write to the host over a root of 2 bytes per second.
    task = problem(graph, devices(100, 100))
    apart = np.array([0, 1, 0], dtype=np.int64)
    pushes = [Push(0, 4, 0), Push(1, 4, 0)]
    _, run = run_copies(task.costs, apart, [], streams(2, host_bytes_per_s=2.0), pushes)
    assert run.pushes == [(1, 5), (3, 7)]


def test_an_evaluation_counts_the_buffers_and_the_links() -> None:
    graph = layers(2, 3)
    task, placed = problem(graph, devices(100)), np.zeros(2, dtype=np.int64)
    evaluation = with_streams(
        task,
        partition_by_device(graph, placed),
        streamed(graph, 0, 1),
        streams(),
        bound_s=1.5,
        least_load_s=0.5,
    )
    assert (evaluation.latency_s, evaluation.lower_bound_s) == (8 + 3, 1.5)
    assert evaluation.load_bound_s == 0.5
    # A stream of inputs keeps the link busy for 8 s each, the device for 5.
    assert evaluation.throughput_per_s == 1 / 8
    assert (
        evaluation.devices[0].peak_bytes == 8 + 8
    )  # the weights of the problem, and memory for two

"""The peak of a device and its tensors: by hand, and computed in another way."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fxpart.capture.training.joint import joint_capture
from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.partitions import partition_by_device
from fxpart.core.reserve import Interval, Reserve
from fxpart.cost.device_memory import device_memory_of
from fxpart.cost.evaluate import evaluate
from fxpart.cost.peak_tensors import (
    DevicePeak,
    LiveTensor,
    device_peaks,
    memory_by_kind,
    peaks_in_turn,
)
from fxpart.cost.storage_kinds import KINDS
from tests.cost.training_step import step
from tests.placement.training_sketch import random_training_graph
from tests.sketch import Sketch, devices, problem, random_graph

BIG = 10**9


def with_training(graph: OpGraph, seed: int) -> OpGraph:
    """Return the graph with optimizer state, and with values of its backward as gradients."""
    rng = np.random.default_rng(seed)
    late = np.flatnonzero(graph.is_backward[np.maximum(graph.value_producer, 0)])
    late = late[graph.value_producer[late] >= 0]
    chosen = np.sort(rng.permutation(late)[: len(late) // 3]).astype(np.int64)
    weights = len(graph.weight_bytes)
    kinds = ("aten.add.Tensor", "aten.mm.default", "aten.add_.Tensor", "aten.addmm.default")
    targets = [kinds[i % len(kinds)] for i in range(graph.n_ops)]
    return replace(
        graph,
        targets=tuple(targets),
        weight_state_bytes=rng.integers(0, 3, weights).astype(np.int64) * graph.weight_bytes,
        gradient_values=chosen,
        gradient_weights=rng.integers(0, weights, len(chosen)).astype(np.int64),
    )


def any_graph(seed: int, n: int) -> OpGraph:
    if seed % 2:
        return with_training(random_training_graph(seed, n), seed)
    return random_graph(seed, n)


def random_homes(graph: OpGraph, seed: int, count: int) -> IntArray:
    """Return a device for each operator; operators of a group share it."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, count, graph.n_ops).astype(np.int64)[graph.group]


def peaks_of(graph: OpGraph, homes: list[int], count: int, top: int = 10) -> tuple[DevicePeak, ...]:
    placed = partition_by_device(graph, np.array(homes, dtype=np.int64))
    return device_peaks(problem(graph, devices(*[BIG] * count)), placed, top)


def test_a_training_step_by_hand() -> None:
    (peak,) = peaks_of(step(), [0] * 6, 1)
    # At the fourth of them y (8), loss (1) and g (7) are live; at the fifth loss, g and a part;
    # at the last loss, the part and the gradient, 1 + 10 + 10 bytes.
    assert (peak.device, peak.op, peak.op_name, peak.module) == (0, 5, "op5", "net.one")
    assert peak.doing == "add in the backward"
    assert peak.bytes == 10 + 20 + 25 + 3 + 21
    assert list(peak.by_kind.items()) == [
        ("weight", 30),
        ("optimizer state", 25),
        ("input", 3),
        ("gradient", 20),
        ("output", 1),
    ]
    assert peak.tensors[:3] == (
        LiveTensor("w0", "", "", "optimizer state", 25),
        LiveTensor("w1", "", "", "weight", 20),
        LiveTensor("w0", "", "", "weight", 10),
    )
    assert peak.tensors[3] == LiveTensor("v5", "net.one", "aten.mm.default", "gradient", 10)
    assert len(peak.tensors) == 7


def test_saved_values_count_on_the_device_that_holds_them() -> None:
    """The second device receives y in the forward, and reads it again in the backward."""
    graph = replace(step(), group=np.array([0, 1, 2, 2, 0, 0]))
    first, second = peaks_of(graph, [0, 0, 1, 1, 0, 0], 2)
    assert first.by_kind == {
        "weight": 10,
        "optimizer state": 25,
        "input": 3,
        "gradient": 20,
    }
    assert (second.op, second.doing) == (3, "backward of mse_loss")
    # loss is an output, g a temporary; the view is sent with all of its 8 bytes.
    assert second.by_kind == {"weight": 20, "saved activation": 8, "output": 1, "temporary": 7}
    saved = next(tensor for tensor in second.tensors if tensor.kind == "saved activation")
    assert saved == LiveTensor("v2", "net.one", "aten.view.default", "saved activation", 8)


def test_partitions_in_turn_receive_before_they_begin() -> None:
    """The second device's only partition runs after the other, though its operators come first."""
    sketch = Sketch()
    x = sketch.input(3)
    large = sketch.op([x], 100)
    small = sketch.op([large], 2)
    sent = sketch.op([x], 4)
    graph = sketch.graph(sketch.op([small, sent], 1))
    placed = partition_by_device(graph, np.array([1, 1, 0, 1]))
    assert placed.n_partitions == 2
    this = problem(graph, devices(BIG, BIG))
    # In graph order `sent` arrives when `large` has been freed.
    assert [peak.bytes for peak in device_peaks(this, placed)] == [3 + 4, 3 + 102]
    assert peaks_in_turn(graph, this.memory, placed, 3) == (3 + 4, 3 + 102 + 4, 0)
    needs = device_memory_of(
        this, placed, [Reserve()] * 2, tensor_bytes={0: 7, 1: 105 + 50}, peers={}
    )
    assert [need.needed for need in needs] == [Interval(7, 7, 7), Interval(155, 155, 159)]


def test_the_first_operator_may_run_after_another_partition() -> None:
    """Its result, which is sent, is no input."""
    sketch = Sketch()
    x = sketch.input(3)
    sent = sketch.op([x], 100)
    awaited = sketch.op([x], 50)
    back = sketch.op([sent, awaited], 5)
    graph = sketch.graph(sketch.op([sent, back], 1))
    placed = partition_by_device(graph, np.array([0, 1, 0, 1]))
    assert placed.partition_of.tolist() == [1, 0, 1, 2]
    # The second device frees `awaited` once sent, before it receives the others.
    peaks = peaks_in_turn(graph, problem(graph, devices(BIG, BIG)).memory, placed, 2)
    assert peaks == (3 + 155, 3 + 106)
    assert device_peaks(problem(graph, devices(BIG, BIG)), placed)[1].bytes == 3 + 150


def test_an_output_that_the_backward_reads_stays_an_output() -> None:
    """It is live after its last use in the backward, so it does not count as saved."""
    graph = step()
    outputs = graph.value_is_output.copy()
    outputs[1] = True  # y
    (peak,) = peaks_of(replace(graph, value_is_output=outputs), [0] * 6, 1)
    assert (peak.op, peak.by_kind["output"]) == (5, 9)
    assert "saved activation" not in peak.by_kind


def test_an_inference_has_received_and_temporary_tensors() -> None:
    sketch = Sketch()
    a = sketch.op([sketch.input(2)], 5)
    b = sketch.op([a], 4)
    c = sketch.op([b], 3)
    first, second = peaks_of(sketch.graph(c), [0, 1, 1], 2)
    assert first.by_kind == {"input": 2, "temporary": 5}
    assert second.by_kind == {"received": 5, "temporary": 4}
    assert (second.op_name, second.doing) == ("op1", "op")


def test_an_update_has_optimizer_state() -> None:
    graph = step()
    targets = (*graph.targets[:5], "optimizer.adamw")
    (peak,) = peaks_of(replace(graph, targets=targets), [0] * 6, 1)
    assert peak.doing == "adamw update"
    assert peak.by_kind["gradient"] == 10  # an update accumulates no gradients
    assert peak.by_kind["temporary"] == 10


def test_a_part_of_a_gradient_stays_one_when_sent() -> None:
    """For a tied weight, one part comes from another device and is added to the other."""
    sketch = Sketch()
    a = sketch.op([sketch.input(1)], 1, [sketch.weight(0)])
    b = sketch.op([a], 1)
    sent = sketch.op([b], 9, backward_of=1)
    part = sketch.op([sent, a], 9, backward_of=0)
    grad = sketch.op([sent, part], 9, backward_of=0)
    targets = ("aten.mm.default",) * 4 + ("aten.add.Tensor",)
    graph = replace(
        sketch.graph(grad),
        targets=targets,
        gradient_values=np.array([grad]),
        gradient_weights=np.array([0]),
    )
    first, _ = peaks_of(graph, [0, 1, 1, 0, 0], 2)
    assert first.doing == "add in the backward"
    assert first.by_kind == {"input": 1, "gradient": 27}


def test_the_largest_tensors_come_first_up_to_the_limit() -> None:
    (peak,) = peaks_of(step(), [0] * 6, 1, top=2)
    assert [tensor.bytes for tensor in peak.tensors] == [25, 20]
    assert peaks_of(step(), [0] * 6, 1, top=0)[0].tensors == ()


def _kind(graph: OpGraph, device_of: IntArray, device: int, source: int) -> str:
    """Return the kind of the storage of `source`, from all values that share it."""
    maker = int(graph.value_producer[source])
    if maker < 0:
        return "input"
    sharing = [v for v in range(graph.n_values) if _storage(graph, device_of, device, v) == source]
    produced = [v for v in sharing if device_of[graph.value_producer[v]] == device]
    if any(v in _gradients(graph) for v in [source, *produced]):
        return "gradient"
    if any(graph.value_is_output[v] for v in produced):
        return "output"
    readers = [
        op
        for op in range(graph.n_ops)
        if device_of[op] == device and set(graph.reads_of(op).tolist()) & set(sharing)
    ]
    backward = graph.is_backward
    if readers and not backward[maker] and backward[max(readers)]:
        return "saved activation"
    return "received" if device_of[maker] != device else "temporary"


def _gradients(graph: OpGraph) -> set[int]:
    """Return gradients and everything accumulated into them, by iterating to a fixed point."""
    values = set(graph.gradient_values.tolist())
    while True:
        added = set()
        for value in values:
            op = int(graph.value_producer[value])
            parts = [int(graph.value_base[value])]
            if graph.targets[op] in ("aten.add.Tensor", "aten.add_.Tensor"):
                size = graph.value_bytes[value]
                parts += [v for v in graph.reads_of(op).tolist() if graph.value_bytes[v] == size]
            for v in parts:
                if v >= 0 and graph.value_producer[v] >= 0:
                    added |= {v} if graph.is_backward[graph.value_producer[v]] else set()
        if added <= values:
            return values
        values |= added


def _storage(graph: OpGraph, device_of: IntArray, device: int, value: int) -> int:
    while True:
        maker, base = int(graph.value_producer[value]), int(graph.value_base[value])
        if maker < 0 or device_of[maker] != device or base < 0:
            return value
        value = base


def _alive(graph: OpGraph, device_of: IntArray, device: int, op: int) -> Counter[str]:
    """Return the bytes of each kind of produced and received tensors while `op` runs."""
    until: dict[int, int] = {}
    for other in np.flatnonzero(device_of == device).tolist():
        produced = np.flatnonzero(graph.value_producer == other).tolist()
        for value in [*graph.reads_of(other).tolist(), *produced]:
            storage = _storage(graph, device_of, device, value)
            is_kept = value in produced and graph.value_is_output[value]
            until[storage] = max(until.get(storage, -1), graph.n_ops if is_kept else other)
    alive: Counter[str] = Counter()
    for storage, last in until.items():
        maker = int(graph.value_producer[storage])
        local = maker < 0 or device_of[maker] == device
        size = graph.value_alloc_bytes[storage] if local else graph.value_bytes[storage]
        if maker < 0 or maker <= op <= last:
            alive[_kind(graph, device_of, device, storage)] += int(size)
    return alive


@given(st.integers(0, 9999), st.integers(2, 14), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_kinds_match_their_definitions(seed: int, n: int, count: int) -> None:
    graph = any_graph(seed, n)
    device_of = random_homes(graph, seed, count)
    placed = partition_by_device(graph, device_of)
    for peak in device_peaks(problem(graph, devices(*[BIG] * count)), placed, top=10**6):
        expected = _alive(graph, device_of, peak.device, peak.op)
        ops = np.flatnonzero(device_of == peak.device)
        used = {int(w) for op in ops for w in graph.uses_of(int(op))}
        expected["weight"] += sum(int(graph.weight_bytes[w]) for w in used)
        expected["optimizer state"] += sum(int(graph.weight_state_bytes[w]) for w in used)
        assert peak.by_kind == {kind: expected[kind] for kind in KINDS if expected[kind]}
        # These are all tensors, and the peak is the first operator of the device that reaches it.
        by_tensor: Counter[str] = Counter()
        for tensor in peak.tensors:
            by_tensor[tensor.kind] += tensor.bytes
        assert dict(by_tensor) == peak.by_kind
        held_bytes = [sum(_alive(graph, device_of, peak.device, int(op)).values()) for op in ops]
        assert int(ops[int(np.argmax(held_bytes))]) == peak.op


@given(st.integers(0, 9999), st.integers(2, 60), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_kinds_sum_to_the_evaluated_peak(seed: int, n: int, count: int) -> None:
    graph = any_graph(seed, n)
    placed = partition_by_device(graph, random_homes(graph, seed, count))
    this = problem(graph, devices(*[BIG] * count))
    evaluation = evaluate(this, placed, search_bounds=False)
    peaks = device_peaks(this, placed)
    assert [peak.device for peak in peaks] == [
        d.logical_id for d in evaluation.devices if d.operators
    ]
    for peak in peaks:
        use = evaluation.devices[peak.device]
        assert peak.bytes == use.peak_bytes == sum(peak.by_kind.values())
        assert peak.by_kind.get("weight", 0) == use.weight_bytes
        assert peak.by_kind.get("optimizer state", 0) == use.state_bytes
        assert set(peak.by_kind) <= set(KINDS)
    for profile, kinds in zip(evaluation.memory, memory_by_kind(graph, placed, count), strict=True):
        assert kinds.shape == (len(KINDS), len(profile.op))
        assert kinds.sum(axis=0).tolist() == profile.held_bytes.tolist()


@pytest.mark.parametrize("seed", range(8))
def test_replicas_need_the_memory_of_their_fullest_round(seed: int) -> None:
    graph = any_graph(seed, 20)
    placed = partition_by_device(graph, random_homes(graph, seed, 2))
    homes = [(device, 2, 3) if device else (device,) for (device,) in placed.devices_of_partition]
    copied = Assignment(placed.partition_of, tuple(homes))
    this = problem(graph, devices(*[BIG] * 4))
    evaluation = evaluate(this, copied, search_bounds=False)
    peaks = device_peaks(this, copied)
    assert [peak.bytes for peak in peaks] == [
        evaluation.devices[peak.device].peak_bytes for peak in peaks
    ]
    over_time = memory_by_kind(graph, copied, 4)
    for profile, kinds in zip(evaluation.memory, over_time, strict=True):
        assert kinds.sum(axis=0).tolist() == profile.held_bytes.tolist()


def test_at_the_end_of_a_captured_step_all_gradients_are_live() -> None:
    """By then every weight has one, and no activation is saved any more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    graph = joint_capture(model, (torch.zeros(32, 8),)).graph
    placed = Assignment(np.zeros(graph.n_ops, dtype=np.int64), ((0,),))
    kinds = dict(zip(KINDS, memory_by_kind(graph, placed, 1)[0], strict=True))
    assert kinds["gradient"][-1] == graph.total_weight_bytes == 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert kinds["saved activation"][-1] == 0
    # The results of the first layer and of the activation, saved beyond the end of the forward.
    assert kinds["saved activation"].max() >= 4 * 32 * (16 + 16)
    assert (kinds["gradient"][: graph.first_backward] == 0).all()


def test_a_device_without_operators_has_no_peak() -> None:
    assert [peak.device for peak in peaks_of(step(), [1] * 6, 3)] == [1]

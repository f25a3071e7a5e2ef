"""Derive the costs of pipeline stages from a placement."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray, OpGraph
from fxpart.cost.holding import weight_bytes_of
from fxpart.cost.problem import Problem
from fxpart.cost.tables import launch_s
from fxpart.errors import NotApplicableError
from fxpart.schedule.costs import PipelineCosts, StageCost, StageLink
from fxpart.schedule.stage_shards import WeightShards, stage_shards
from fxpart.schedule.stage_storages import peak_of_intervals, stage_bytes

__all__ = ["stage_costs", "stages_of", "tied_parts", "update_bytes"]


# Memory allocated by the weight updates of a stage at the end of a step.


def update_bytes(graph: OpGraph, updates: IntArray) -> tuple[int, int]:
    """Return the peak of temporaries of a stage's updates, and the part that stays live.

    That part lives until all updates of the device are done. Weights, gradients and optimizer state
    are not counted.

    Args:
        graph: a step of n operators.
        updates: the updates of the stage.

    """
    if not len(updates):
        return 0, 0
    values = np.flatnonzero(np.isin(graph.value_producer, updates))
    last = graph.value_producer.copy()
    np.maximum.at(last, graph.reads, graph.readers)
    last[graph.value_is_output] = graph.n_ops - 1
    birth, last, size = graph.value_producer[values], last[values], graph.value_alloc_bytes[values]
    live_on_bytes = int(size[graph.value_is_output[values]].sum())
    return peak_of_intervals(birth, last, size, graph.n_ops), live_on_bytes


# Gradients of tied weights: values that are a stage's term of a sum.


def tied_parts(graph: OpGraph, stage_of: IntArray) -> npt.NDArray[np.bool_]:
    """Return whether each value is one stage's term of a tied weight's gradient. Length V.

    In the graph of a training step a weight has one gradient: the terms of all stages that use it
    are summed where the last one is produced. A term is a value produced in the backward and read
    there by another stage, with as many bytes as a weight that both stages use in the forward.
    """
    readers, maker = graph.readers, graph.value_producer[graph.reads]
    # If the producer belongs to the backward, so does the reader.
    changes_stage = (maker >= graph.first_backward) & (stage_of[maker] != stage_of[readers])
    is_part = np.zeros(graph.n_values, dtype=np.bool_)
    if not changes_stage.any():
        return is_part
    weights = _weights_of_stages(graph, stage_of)
    for edge in np.flatnonzero(changes_stage).tolist():
        value = int(graph.reads[edge])
        both = weights[stage_of[maker[edge]]] & weights[stage_of[readers[edge]]]
        is_part[value] |= bool((graph.weight_bytes[both] == graph.value_bytes[value]).any())
    return is_part


def _weights_of_stages(graph: OpGraph, stage_of: IntArray) -> npt.NDArray[np.bool_]:
    """Return which weights each stage uses in the forward, by stage and weight."""
    users = graph.users
    forward = users < graph.first_backward
    shape = (int(stage_of.max()) + 1, len(graph.weight_bytes))
    used = np.zeros(shape, dtype=np.bool_)
    used[stage_of[users[forward]], graph.uses[forward]] = True
    return used


_REMEDY = "place the model with mode=pipeline"


def stage_costs(
    problem: Problem, assignment: Assignment, shards: WeightShards | None = None
) -> PipelineCosts:
    """Return the costs of a microbatch in each stage of a chain-like placement.

    The graph is that of one microbatch. Stages are the partitions in order, with consecutive ones
    on the same device merged; for a training step, they are the uninterrupted runs of a device's
    forward operators in graph order. A backward operator belongs to the stage of its forward
    operator.

    A value is sent to each device once, directly to the first stage there that reads it. Terms of
    the gradient of a weight used by two stages are not timed, as they can be summed once after the
    last microbatch. A value live in two stages of one device counts twice. Weight updates are not
    part of a microbatch's backward: they run once, at the end of the step.

    With `shards`, replicas share weights: their optimizer state and updates are sharded too.

    Raises:
        NotApplicableError: if the placement has replicas, a backward operator is on another device
            than its forward, stages do not go round the devices in order, equally many on each, or
            a stage reads from a later one.
        SpecError: if the backward of the graph does not come last, or the assignment is for another
            graph or other devices.

    """
    graph = problem.graph
    assignment.check_for(graph.n_ops, problem.topology.n_devices)
    stage_of, devices = stages_of(graph, assignment)
    return PipelineCosts(
        tuple(_stages(problem, stage_of, devices, shards)),
        tuple(_links(problem, stage_of, devices)),
        graph.first_backward < graph.n_ops,
    )


def stages_of(graph: OpGraph, assignment: Assignment) -> tuple[IntArray, list[int]]:
    """Return the stage of each operator, and the device of each stage.

    Raises:
        FxpartError: as `stage_costs`.

    """
    if assignment.replicas > 1:
        raise NotApplicableError(
            "a schedule needs each partition on one device, but the placement has replicas; leave "
            f"out devices.saturate_host, or {_REMEDY}"
        )
    device_of, forward_of = assignment.device_of, graph.forward_of
    split_pairs = np.flatnonzero(device_of != device_of[forward_of])
    if len(split_pairs):
        op = int(split_pairs[0])
        raise NotApplicableError(
            f"a schedule needs the backward on the device of its forward: {graph.names[op]} is on"
            f" device {device_of[op]}, {graph.names[int(forward_of[op])]} is not; {_REMEDY}"
        )
    # Partitions are in a valid execution order. In a training step a partition may merge two
    # forward turns of a device, so the graph order is used instead.
    first_backward = graph.first_backward
    training = first_backward < graph.n_ops
    place = np.arange(graph.n_ops) if training else assignment.partition_of
    forward = np.arange(first_backward)
    order = forward[np.argsort(place[forward], kind="stable")]
    device_in_order = device_of[order]
    begins = np.concatenate([[True], device_in_order[1:] != device_in_order[:-1]])
    stage_of = np.empty(graph.n_ops, dtype=np.int64)
    stage_of[order] = np.cumsum(begins) - 1
    devices = device_in_order[begins].tolist()
    _refuse_other_than_turns(devices)
    _refuse_reads_ahead(graph, stage_of)
    return stage_of[forward_of], devices


def _refuse_other_than_turns(devices: list[int]) -> None:
    used = list(dict.fromkeys(devices))
    if len(devices) % len(used) or devices != used * (len(devices) // len(used)):
        shown = ", ".join(map(str, devices[:12])) + (", ..." if devices[12:] else "")
        raise NotApplicableError(
            "a schedule needs stages that take the devices in turn, with the same number on each; "
            f"the {len(devices)} of this placement are on devices {shown}; {_REMEDY}"
        )


def _refuse_reads_ahead(graph: OpGraph, stage_of: IntArray) -> None:
    """Refuse forward operators that read from a later stage, such as partitions in a cycle."""
    maker, reader = graph.value_producer[graph.reads], graph.readers
    is_forward = (maker >= 0) & (reader < graph.first_backward) & (maker < graph.first_backward)
    ahead = np.flatnonzero(is_forward & (stage_of[maker] > stage_of[reader]))
    if len(ahead):
        op, source = int(reader[ahead[0]]), int(maker[ahead[0]])
        raise NotApplicableError(
            f"a schedule needs stages that read from earlier ones: {graph.names[op]} of stage"
            f" {stage_of[op]} reads from {graph.names[source]} of stage {stage_of[source]};"
            f" {_REMEDY}"
        )


def _stages(
    problem: Problem, stage_of: IntArray, devices: list[int], shards: WeightShards | None
) -> list[StageCost]:
    graph, first = problem.graph, problem.graph.first_backward
    times = problem.costs.op_time_s[np.arange(graph.n_ops), np.array(devices)[stage_of]]
    is_forward, is_update = np.arange(graph.n_ops) < first, graph.is_update
    forward_s, backward_s, update_s = (
        np.bincount(stage_of, weights=np.where(mask, times, 0.0), minlength=len(devices))
        for mask in (is_forward, ~is_forward & ~is_update, is_update)
    )
    # The host of each stage's process launches its operators while its device computes.
    launches_s = launch_s(graph, problem.topology)
    forward_s, backward_s = (
        np.maximum(device_s, np.bincount(stage_of, launches_s * mask, minlength=len(devices)))
        for device_s, mask in ((forward_s, is_forward), (backward_s, ~is_forward))
    )
    seconds = (forward_s.tolist(), backward_s.tolist(), update_s.tolist())
    cut = _Cut(stage_of, devices, np.where(is_update, -1, stage_of), first)
    return [
        _stage(problem, cut, stage, of_stage, shards)
        for stage, of_stage in enumerate(zip(*seconds, strict=True))
    ]


class _Cut(NamedTuple):
    """The stage of each operator."""

    stage_of: IntArray
    devices: list[int]
    """Device of each stage."""
    before_updates: IntArray
    """As `stage_of`, and -1 for updates. Length n."""
    first_backward: int


def _stage(
    problem: Problem,
    cut: _Cut,
    stage: int,
    seconds: tuple[float, float, float],
    sharding: WeightShards | None,
) -> StageCost:
    """Return the costs of a stage; `seconds` are its times of forward, backward and updates."""
    graph, (stage_of, devices, before_updates, first_backward) = problem.graph, cut
    same = [s for s in range(stage + 1) if devices[s] == devices[stage]]
    weights = weight_bytes_of(problem.memory, np.flatnonzero(np.isin(stage_of, same)))
    earlier_weights = weight_bytes_of(problem.memory, np.flatnonzero(np.isin(stage_of, same[:-1])))
    storages = stage_bytes(problem.memory, before_updates, stage, first_backward)
    updates = np.flatnonzero((stage_of == stage) & (before_updates < 0))
    update_peak_bytes, update_kept_bytes = update_bytes(graph, updates)
    shards = None
    if sharding is not None:
        ops = np.flatnonzero(before_updates == stage)
        shards = stage_shards(
            graph,
            ops,
            problem.costs.op_time_s[ops, devices[stage]],
            shards=sharding,
            device=devices[stage],
            copy_bytes_per_s=problem.topology.devices[devices[stage]].memory_bandwidth_bytes_per_s,
            lifetimes=(storages.forward, storages.backward, storages.first_backward),
        )
    return StageCost(
        device=devices[stage],
        forward_s=seconds[0],
        backward_s=seconds[1],
        weight_bytes=weights - earlier_weights - (shards.whole_bytes if shards else 0),
        gradient_bytes=storages.gradient + (shards.accumulation_bytes if shards else 0),
        input_bytes=storages.inputs,
        output_bytes=storages.output,
        saved_bytes=storages.saved,
        forward_peak_bytes=storages.forward.peak(graph.n_ops),
        backward_peak_bytes=storages.backward.peak(graph.n_ops),
        first_backward_peak_bytes=storages.first_backward.peak(graph.n_ops),
        update_s=seconds[2],
        update_peak_bytes=update_peak_bytes,
        update_kept_bytes=update_kept_bytes,
        reduce_s=shards.reduce_s if shards else 0.0,
        shards=shards,
    )


def _links(problem: Problem, stage_of: IntArray, devices: list[int]) -> list[StageLink]:
    """Return the transfers, a link for each kind, source and target."""
    graph, topology = problem.graph, problem.topology
    home = np.array(devices, dtype=np.int64)
    reader, value = graph.readers, graph.reads
    is_produced = graph.value_producer[value] >= 0
    reader, value = reader[is_produced], value[is_produced]
    maker = graph.value_producer[value]
    source, target = stage_of[maker], stage_of[reader]
    changes_device = home[source] != home[target]
    forward = (maker < graph.first_backward) & (source < target)
    sent = changes_device & (forward | (source > target)) & ~tied_parts(graph, stage_of)[value]
    order = np.flatnonzero(sent)
    # The first reader: forwards before backwards, nearer stages before farther ones.
    distance = np.abs(source - target)
    order = order[np.lexsort((distance[order], ~forward[order]))]
    pairs = np.stack([value[order], home[target[order]]], axis=1)
    _, first = np.unique(pairs, axis=0, return_index=True)
    seconds: dict[tuple[str, int, int], tuple[int, float]] = {}
    for i in order[np.sort(first)].tolist():
        a, b, size = int(source[i]), int(target[i]), int(graph.value_bytes[value[i]])
        transfer_s = size / topology.bytes_per_s[devices[a], devices[b]]
        transfer_s += topology.latency_s[devices[a], devices[b]]
        key = ("F" if forward[i] else "B", a, b)
        before = seconds.get(key, (0, 0.0))
        seconds[key] = (before[0] + size, before[1] + float(transfer_s))
    return [
        StageLink(kind, a, b, size, transfer_s)
        for (kind, a, b), (size, transfer_s) in sorted(seconds.items(), key=lambda item: item[0])
    ]

"""From a placement in stages to what each stage of a pipeline costs."""

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


# Memory that the updates of one stage's weights allocate at the end of a step.


def update_bytes(graph: OpGraph, updates: IntArray) -> tuple[int, int]:
    """Return the most bytes at once that the updates of a stage make, and those that stay.

    What stays is kept until all updates of the device are done. Weights, their gradients and the
    optimizer's state are not counted.

    Args:
        graph: a step of n operators.
        updates: those of the stage.

    """
    if not len(updates):
        return 0, 0
    values = np.flatnonzero(np.isin(graph.value_producer, updates))
    last = graph.value_producer.copy()
    np.maximum.at(last, graph.reads, graph.readers)
    last[graph.value_is_output] = graph.n_ops - 1
    birth, last, size = graph.value_producer[values], last[values], graph.value_alloc_bytes[values]
    stays = int(size[graph.value_is_output[values]].sum())
    return peak_of_intervals(birth, last, size, graph.n_ops), stays


# Gradients of tied weights: which values are a stage's part of a sum.


def tied_parts(graph: OpGraph, stage_of: IntArray) -> npt.NDArray[np.bool_]:
    """Return, for each value, whether it is one stage's part of a weight's gradient. Length V.

    In the graph of a training step a weight has one gradient: the parts of all stages that use it
    are added up where the last one is made. A part is what a backward makes and another stage reads
    there, with as many bytes as a weight that both of them use forward.
    """
    readers, maker = graph.readers, graph.value_producer[graph.reads]
    # Where the maker belongs to the backward, so does the reader.
    away = (maker >= graph.first_backward) & (stage_of[maker] != stage_of[readers])
    is_part = np.zeros(graph.n_values, dtype=np.bool_)
    if not away.any():
        return is_part
    weights = _weights_of_stages(graph, stage_of)
    for edge in np.flatnonzero(away).tolist():
        value = int(graph.reads[edge])
        both = weights[stage_of[maker[edge]]] & weights[stage_of[readers[edge]]]
        is_part[value] |= bool((graph.weight_bytes[both] == graph.value_bytes[value]).any())
    return is_part


def _weights_of_stages(graph: OpGraph, stage_of: IntArray) -> npt.NDArray[np.bool_]:
    """Return which weights each stage uses forward, by stage and weight."""
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
    """Return what a micro-batch costs each stage of a chain-like placement, and what they send.

    The graph is that of one micro-batch. Stages are the partitions in order, such as follow each
    other on one device as one; of a training step, what a device has of the forward without a break
    in graph order. A backward operator is of the stage of its forward operator.

    A value goes to each device once, straight to the first stage there that reads it. Parts of the
    gradient of a weight that two stages use are not timed: they can be added up once, after the
    last micro-batch. A value that two stages of one device hold counts for each. Updates of weights
    are no part of a micro-batch's backward: they are run once, at the end of the step.

    With `shards` replicas share weights: of those, what an optimizer keeps for them has the shards
    too, and updates are of shards.

    Raises:
        SpecError: for a placement with replicas, or whose stages do not go over the devices in
            turn, equally many on each; for a graph whose backward does not come last.

    """
    graph = problem.graph
    stage_of, devices = stages_of(graph, assignment)
    return PipelineCosts(
        tuple(_stages(problem, stage_of, devices, shards)),
        tuple(_links(problem, stage_of, devices)),
        graph.first_backward < graph.n_ops,
    )


def stages_of(graph: OpGraph, assignment: Assignment) -> tuple[IntArray, list[int]]:
    """Return the stage of each operator, and the device of each stage.

    Raises:
        SpecError: as `stage_costs`.

    """
    if assignment.replicas > 1:
        raise NotApplicableError(
            "a schedule needs each partition on one device, the placement has replicas; leave out"
            f" devices.saturate_host, or {_REMEDY}"
        )
    device_of, forward_of = assignment.device_of, graph.forward_of
    torn = np.flatnonzero(device_of != device_of[forward_of])
    if len(torn):
        op = int(torn[0])
        raise NotApplicableError(
            f"a schedule needs the backward on the device of its forward: {graph.names[op]} is on"
            f" device {device_of[op]}, {graph.names[int(forward_of[op])]} is not; {_REMEDY}"
        )
    # Partitions are in an order in which they can run. With a backward they may join what a
    # device runs forward in two turns: there it is the graph's own order.
    first_backward = graph.first_backward
    training = first_backward < graph.n_ops
    place = np.arange(graph.n_ops) if training else assignment.partition_of
    forward = np.arange(first_backward)
    order = forward[np.argsort(place[forward], kind="stable")]
    on = device_of[order]
    begins = np.concatenate([[True], on[1:] != on[:-1]])
    stage_of = np.empty(graph.n_ops, dtype=np.int64)
    stage_of[order] = np.cumsum(begins) - 1
    devices = on[begins].tolist()
    _refuse_other_than_turns(devices)
    return stage_of[forward_of], devices


def _refuse_other_than_turns(devices: list[int]) -> None:
    used = list(dict.fromkeys(devices))
    if len(devices) % len(used) or devices != used * (len(devices) // len(used)):
        shown = ", ".join(map(str, devices[:12])) + (", ..." if devices[12:] else "")
        raise NotApplicableError(
            f"a schedule needs stages that go over the devices in turn, equally many on each; the"
            f" {len(devices)} of this placement are on devices {shown}; {_REMEDY}"
        )


def _stages(
    problem: Problem, stage_of: IntArray, devices: list[int], shards: WeightShards | None
) -> list[StageCost]:
    graph, first = problem.graph, problem.graph.first_backward
    times = problem.costs.op_time_s[np.arange(graph.n_ops), np.array(devices)[stage_of]]
    is_forward, is_update = np.arange(graph.n_ops) < first, graph.is_update
    forward_s, backward_s, update_s = (
        np.bincount(stage_of, weights=np.where(those, times, 0.0), minlength=len(devices))
        for those in (is_forward, ~is_forward & ~is_update, is_update)
    )
    # The host of each stage's process starts its operators while its device computes.
    launches_s = launch_s(graph, problem.topology)
    forward_s, backward_s = (
        np.maximum(device_s, np.bincount(stage_of, launches_s * those, minlength=len(devices)))
        for device_s, those in ((forward_s, is_forward), (backward_s, ~is_forward))
    )
    seconds = (forward_s.tolist(), backward_s.tolist(), update_s.tolist())
    cut = _Cut(stage_of, devices, np.where(is_update, -1, stage_of), first)
    return [
        _stage(problem, cut, stage, of_stage, shards)
        for stage, of_stage in enumerate(zip(*seconds, strict=True))
    ]


class _Cut(NamedTuple):
    """Which stage each operator is of."""

    stage_of: IntArray
    devices: list[int]
    """Of each stage."""
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
    """Return the costs of a stage that takes `seconds` forward, backward and for updates."""
    graph, (stage_of, devices, before_updates, first_backward) = problem.graph, cut
    same = [s for s in range(stage + 1) if devices[s] == devices[stage]]
    weights = weight_bytes_of(problem.memory, np.flatnonzero(np.isin(stage_of, same)))
    before = weight_bytes_of(problem.memory, np.flatnonzero(np.isin(stage_of, same[:-1])))
    held = stage_bytes(problem.memory, before_updates, stage, first_backward)
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
            lifetimes=(held.forward, held.backward, held.first_backward),
        )
    return StageCost(
        device=devices[stage],
        forward_s=seconds[0],
        backward_s=seconds[1],
        weight_bytes=weights - before - (shards.whole_bytes if shards else 0),
        gradient_bytes=held.gradient,
        input_bytes=held.inputs,
        output_bytes=held.output,
        saved_bytes=held.saved,
        forward_peak_bytes=held.forward.peak(graph.n_ops),
        backward_peak_bytes=held.backward.peak(graph.n_ops),
        first_backward_peak_bytes=held.first_backward.peak(graph.n_ops),
        update_s=seconds[2],
        update_peak_bytes=update_peak_bytes,
        update_kept_bytes=update_kept_bytes,
        reduce_s=shards.reduce_s if shards else 0.0,
        shards=shards,
    )


def _links(problem: Problem, stage_of: IntArray, devices: list[int]) -> list[StageLink]:
    """Return what is sent, a link for each kind, source and target."""
    graph, topology = problem.graph, problem.topology
    home = np.array(devices, dtype=np.int64)
    reader, value = graph.readers, graph.reads
    made = graph.value_producer[value] >= 0
    reader, value = reader[made], value[made]
    maker = graph.value_producer[value]
    source, target = stage_of[maker], stage_of[reader]
    away = home[source] != home[target]
    forward = (maker < graph.first_backward) & (source < target)
    sent = away & (forward | (source > target)) & ~tied_parts(graph, stage_of)[value]
    order = np.flatnonzero(sent)
    # The first that needs it: forwards before backwards, the nearest stage before farther ones.
    distance = np.abs(source - target)
    order = order[np.lexsort((distance[order], ~forward[order]))]
    pairs = np.stack([value[order], home[target[order]]], axis=1)
    _, first = np.unique(pairs, axis=0, return_index=True)
    seconds: dict[tuple[str, int, int], tuple[int, float]] = {}
    for i in order[np.sort(first)].tolist():
        a, b, size = int(source[i]), int(target[i]), int(graph.value_bytes[value[i]])
        taken_s = size / topology.bytes_per_s[devices[a], devices[b]]
        taken_s += topology.latency_s[devices[a], devices[b]]
        key = ("F" if forward[i] else "B", a, b)
        before = seconds.get(key, (0, 0.0))
        seconds[key] = (before[0] + size, before[1] + float(taken_s))
    return [
        StageLink(kind, a, b, size, taken_s)
        for (kind, a, b), (size, taken_s) in sorted(seconds.items(), key=lambda item: item[0])
    ]

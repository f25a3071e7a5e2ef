"""Predictions of fxpart for a split model: peak bytes of one device, and its collectives."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.memory_case import peak_bytes
from fxpart.capture.api import capture_graph
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.training.joint import joint_graph
from fxpart.core.blocks import GATHER
from fxpart.core.graph import OpGraph
from fxpart.core.optimizer import Optimizer, with_optimizer
from fxpart.cost.collective_times import collective_bytes, collective_kinds
from fxpart.sharding.zero import SCATTER, with_zero

__all__ = ["Predicted", "predicted", "predicted_zero"]


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predictions for one device, from a capture on the meta device."""

    parameter_bytes: int
    forward_bytes: int
    step_bytes: int
    forward_collectives: Counter[tuple[str, int]]
    step_collectives: Counter[tuple[str, int]]
    """By kind and by input bytes of a device."""


def predicted(spec: ModelSpec, tensor_parallel: int = 1) -> Predicted:
    """Return the predictions for one device of a group of `tensor_parallel`."""
    split = replace(spec, tensor_parallel=tensor_parallel)
    size = max(tensor_parallel, spec.context_parallel)
    built = build_model(split)
    forward = capture_graph(built.module, built.args, built.kwargs)
    parameters = sum(parameter.nbytes for parameter in built.module.parameters())
    inputs = {**built.kwargs, "labels": built.kwargs["input_ids"]}
    # The first capture has filled the caches of the module.
    step = joint_graph(build_model(replace(split, loss="own")).module, (), inputs)
    return Predicted(
        parameters,
        peak_bytes(forward),
        peak_bytes(step),
        _collectives(forward, size),
        _collectives(step, size),
    )


def predicted_zero(
    spec: ModelSpec,
    replicas: int,
    stage: int,
    optimizer: str,
    reduce_dtype: str | None = None,
) -> Predicted:
    """Return the predictions for a step of one of `replicas` with ZeRO `stage`, 2 or 3."""
    built = build_model(spec)
    inputs = {**built.kwargs, "labels": built.kwargs["input_ids"]}
    step = joint_graph(built.module, (), inputs)
    graph = with_zero(step, stage, replicas, reduce_dtype=reduce_dtype).graph
    collectives: Counter[tuple[str, int]] = Counter()
    for op, target in enumerate(graph.targets):
        if target == GATHER:
            whole = int(graph.value_bytes[graph.value_producer == op].sum())
            collectives["all_gather", whole // replicas] += 1
        elif target == SCATTER:
            collectives["reduce_scatter", int(graph.value_bytes[graph.reads_of(op)[0]])] += 1
    updated = with_optimizer(graph, Optimizer(optimizer))
    parameters = np.union1d(graph.gradient_weights, graph.frozen_weights)
    shards = int(graph.weight_bytes[parameters].sum())
    return Predicted(shards, 0, peak_bytes(updated), Counter(), collectives)


def _collectives(graph: OpGraph, group: int) -> Counter[tuple[str, int]]:
    kinds, sizes = collective_kinds(graph), collective_bytes(graph)
    # The input of an all-gather is a part of its result.
    return Counter(
        (kind, sizes[op] // (group if kind == "all_gather" else 1)) for op, kind in kinds.items()
    )

"""Torch's partitioner and fxpart's behind one interface: the same question to both.

Answers are expressed in node names, as each side partitions its own copy of the graph.
"""

import contextlib
import io
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

import torch
from torch import fx

from benchmarks.static_case import NAME, Case, fresh_copy
from benchmarks.time_limit import OverLimitError, limited

__all__ = [
    "FXPART",
    "TORCH",
    "Answer",
    "Placed",
    "Question",
    "Side",
    "prepare",
    "solve",
]

Mode = Literal["size_based", "sparse_nn", "cost_aware", "kl_based", "aot_based"]


@dataclass(frozen=True, slots=True)
class Question:
    """A mode and its options, for a case."""

    mode: Mode
    aot: Mapping[str, int] = field(default_factory=dict)
    """Partition of each operator, by name; for aot_based."""
    aot_devices: Mapping[int, list[int]] = field(default_factory=dict)
    saturate_host: bool = False


@dataclass(frozen=True, slots=True)
class Side:
    """One implementation, and the modules of its functions."""

    name: str
    partitioner: str
    """Module with Partitioner, PartitionerConfig, Device, NodeLatency and PartitionMode."""
    sizes: str
    """Module with get_size_of_all_nodes."""


TORCH = Side(
    "torch",
    "torch.fx.experimental.accelerator_partitioner",
    "torch.fx.passes.graph_manipulation",
)
FXPART = Side("fxpart", "fxpart", "fxpart")


@dataclass(frozen=True, slots=True)
class Placed:
    """One partition of an answer."""

    number: int
    nodes: frozenset[str]
    """Names of all its nodes, placeholders and parameters included."""
    devices: tuple[int, ...]
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a side, without partitions if it raised an error."""

    seconds: float
    """Time of ``partition_graph``."""
    total_bytes: int
    """Static size of the whole graph as this side counts it."""
    partitions: tuple[Placed, ...] = ()
    partition_of: Mapping[str, int] = field(default_factory=dict)
    """Partition of each operator according to the partition objects."""
    emitted: Mapping[str, int] = field(default_factory=dict)
    """Partition of each operator according to the submodules of the emitted module."""
    same_outputs: bool = True
    """Whether the emitted module has bit-identical outputs."""
    error: str = ""
    runtime_error: bool = False


def _config(
    side: ModuleType, case: Case, question: Question, traced: fx.GraphModule
) -> tuple[object, ...]:
    """Return the side's PartitionerConfig, on the nodes of `traced`."""
    nodes = {node.name: node for node in traced.graph.nodes}
    devices = [side.Device(f"device {i}", b, i) for i, b in enumerate(case.memory_bytes)]
    config: tuple[object, ...] = side.PartitionerConfig(
        devices=devices,
        mode=side.PartitionMode[question.mode],
        transfer_rate_bytes_per_sec=case.bytes_per_s,
        node_to_latency_mapping={
            nodes[name]: side.NodeLatency(*latency) for name, latency in case.latency_s.items()
        },
        node_to_partition_mapping={nodes[name]: part for name, part in question.aot.items()},
        partition_to_logical_device_mapping=dict(question.aot_devices),
        saturate_host=question.saturate_host,
    )
    return config


def _emitted(module: fx.GraphModule) -> dict[str, int]:
    """Return the number of the submodule that runs each operator."""
    numbers: dict[str, int] = {}
    for name, part in module.named_children():
        if isinstance(part, fx.GraphModule) and name.startswith("submod_"):
            for node in part.graph.nodes:
                if node.op.startswith("call_"):
                    numbers[node.meta[NAME]] = int(name.rsplit("_", 1)[1])
    return numbers


def _same(left: object, right: object) -> bool:
    """Return whether two outputs, tensors or tuples of them, are bit-identical."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, tuple | list) and isinstance(right, tuple | list):
        return len(left) == len(right) and all(map(_same, left, right))
    return left == right


def _total_bytes(traced: fx.GraphModule) -> int:
    """Return the sum of the sizes that a side set on the nodes."""
    sized = (getattr(node, "size_bytes", None) for node in traced.graph.nodes)
    return sum(size.total_size for size in sized if size is not None)


def prepare(
    side: Side, case: Case, question: Question
) -> tuple[Callable[[], Any], Any, fx.GraphModule]:
    """Return the call that is timed, the partitioner, and its own copy of the graph."""
    module = import_module(side.partitioner)
    traced = fresh_copy(case)
    import_module(side.sizes).get_size_of_all_nodes(traced, list(case.inputs))
    config = _config(module, case, question, traced)
    partitioner = module.Partitioner()
    return lambda: partitioner.partition_graph(traced, case.module, config), partitioner, traced


def solve(side: Side, case: Case, question: Question, limit_s: float | None = None) -> Answer:
    """Return the answer of `side`; its errors become part of the answer.

    Raises:
        OverLimitError: if it takes longer than `limit_s`.

    """
    with torch.no_grad():
        run, partitioner, traced = prepare(side, case, question)
        begin = time.perf_counter()
        try:
            # Torch's saturate_host prints.
            with limited(limit_s), contextlib.redirect_stdout(io.StringIO()):
                result = run()
        except OverLimitError:
            raise
        except Exception as error:
            seconds = time.perf_counter() - begin
            message = f"{type(error).__name__}: {error}"
            refused = isinstance(error, RuntimeError)
            return Answer(seconds, _total_bytes(traced), error=message, runtime_error=refused)
        seconds = time.perf_counter() - begin
        expected = traced(*case.inputs)
        same = _same(expected, result.module_with_submodules(*case.inputs))
    placed = [
        Placed(
            number=part.partition_id,
            nodes=frozenset(node.name for node in part.nodes),
            devices=tuple(part.logical_device_ids),
            used_bytes=part.used_mem_bytes,
        )
        for part in partitioner.partitions
    ]
    operators = set(case.operators)
    return Answer(
        seconds,
        _total_bytes(traced),
        partitions=tuple(sorted(placed, key=lambda part: part.number)),
        partition_of={name: part.number for part in placed for name in part.nodes & operators},
        emitted=_emitted(result.module_with_submodules),
        same_outputs=same,
    )

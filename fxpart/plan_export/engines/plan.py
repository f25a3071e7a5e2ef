"""`EnginePlan`: what an engine has to be told of a plan, in numbers that all engines know."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.module_paths import block_of
from fxpart.errors import SpecError
from fxpart.plan_export.split_points import forward_operators

__all__ = ["EnginePlan", "Stages", "stages_of"]


@dataclass(frozen=True, slots=True)
class Stages:
    """The numbered layers of each stage of a pipeline, such as ``model.layers.0`` and so on."""

    layers: tuple[int, ...]
    """How many each has, in the model's order. What comes before the first layer is in the first
    stage, what comes after the last in the last."""
    devices: tuple[int, ...]
    """The device of each, or its tensor-parallel group."""

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.layers)

    @property
    def ranks(self) -> int:
        """Devices, or groups, that they are on."""
        return len(set(self.devices))


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """A plan for an engine."""

    training: bool
    """Whether a step of training is planned."""
    stages: Stages
    architecture: str | None = None
    """The model's class in transformers, if it is one."""
    model: Mapping[str, object] = field(default_factory=dict)
    """Fields of that class's configuration."""
    dtype: str = "bfloat16"
    batch_size: int = 1
    """Examples of one replica, in one microbatch."""
    tokens: int | None = None
    """Most tokens of an example: of a text in training, in the cache of a step of serving."""
    data_parallel: int = 1
    zero: int = 0
    """One of `fxpart.sharding.zero.STAGES`."""
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    expert_parallel: int = 1
    """Replicas that share the experts."""
    context_parallel: int = 1
    """Further replicas, each with a piece of every sequence."""
    schedule: str = "none"
    microbatches: int = 1
    checkpointing: str = "none"
    recomputes_some: bool = False
    """Whether that is of some of the layers only."""
    optimizer: str = "adamw"
    implementation: str = "foreach"
    """Of the optimizer: ``for_loop``, ``foreach`` or ``fused``."""
    same_dtype: bool = True
    """Whether the optimizer keeps state and weights in the dtype of the model only."""
    megatron: bool = False
    """Whether the step is planned as Megatron-LM computes it."""
    weights: str = "none"
    """The layout of weights in few bits, as in ``conf/weights``."""
    cache: str = "auto"
    """The dtype of a cache."""
    machines: int = 1
    replicas: tuple[tuple[int, ...], ...] = ()
    """For each replica, which of all devices, or groups, the devices of `stages` are; empty where
    the replicas have as many as there are stages, one after another."""

    @property
    def devices(self) -> int:
        """Devices of the whole plan."""
        return self.replica_count * self.tensor_parallel * self.stages.ranks

    @property
    def replica_count(self) -> int:
        """Replicas of the model."""
        return self.data_parallel * self.context_parallel

    def device_order(self, *, stages_first: bool = False) -> tuple[int, ...] | None:
        """Return the devices of an engine's ranks in turn; None where that is their own order.

        Ranks count the devices of a group first, then stages, then replicas; with `stages_first`
        replicas before stages, so that the first ranks are those of the first stage.
        """
        size, width = self.tensor_parallel, max(self.stages.devices) + 1
        turns = dict.fromkeys(self.stages.devices)
        replicas = self.replicas or [
            range(width * replica, width * (replica + 1)) for replica in range(self.replica_count)
        ]
        groups = [[replica[stage] for stage in turns] for replica in replicas]
        rows = zip(*groups, strict=True) if stages_first else groups
        order = tuple(group * size + i for row in rows for group in row for i in range(size))
        return None if order == tuple(range(len(order))) else order

    def visible_devices(self, *, stages_first: bool = False) -> str | None:
        """Return the `device_order` as ``CUDA_VISIBLE_DEVICES`` has it.

        Raises:
            SpecError: for an order over several machines, which none of them can be told.

        """
        order = self.device_order(stages_first=stages_first)
        if order and self.machines > 1:
            raise SpecError("its ranks would be on other devices than planned")
        return ",".join(map(str, order)) if order else None


def stages_of(graph: OpGraph, assignment: Assignment) -> Stages:
    """Return the stages of a plan that cuts between numbered layers, or not at all.

    Raises:
        SpecError: for a plan that is no row of stages, or cuts elsewhere.

    """
    ops = forward_operators(graph)
    stage = assignment.partition_of[ops]
    if (np.diff(stage) < 0).any() or (np.diff(stage) > 1).any() or stage[0] != 0:
        raise SpecError("the plan is no row of stages, one after another")
    blocks = _blocks([graph.modules[op] for op in ops.tolist()])
    count = int(stage[-1]) + 1
    homes = tuple(assignment.devices_of_partition[index][0] for index in range(count))
    stage_of: dict[str, int] = {}
    for block, index in zip(blocks, stage.tolist(), strict=True):
        if block and stage_of.setdefault(block, index) != index:
            raise SpecError(f"stage {index} begins inside {block}")
    layers = np.bincount(np.array(list(stage_of.values()), dtype=np.int64), minlength=count)
    if count > 1 and not layers.all():
        raise SpecError(f"stage {int(np.argmin(layers))} has no whole layer")
    return Stages(tuple(layers.tolist()), homes)


def _blocks(modules: list[str]) -> list[str]:
    """Return the layer that each operator is in, of the longest numbered list; empty for none."""
    blocks = [block_of(module) for module in modules]
    lists: dict[str, set[str]] = {}
    for block in blocks:
        if block:
            lists.setdefault(block.rpartition(".")[0], set()).add(block)
    if not lists:
        return blocks
    longest = max(lists, key=lambda prefix: len(lists[prefix]))
    return [block if block.rpartition(".")[0] == longest else "" for block in blocks]

"""`EnginePlan`: an engine-independent description of a plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.module_paths import block_of
from fxpart.errors import SpecError
from fxpart.plan_export.split_points import forward_operators

__all__ = ["EnginePlan", "Stages", "hosted_stages_of", "stages_of"]


@dataclass(frozen=True, slots=True)
class Stages:
    """The numbered layers (``model.layers.0`` and so on) of each stage of a pipeline."""

    layers: tuple[int, ...]
    """Number of layers per stage, in model order. Everything before the first layer is in the first
    stage, everything after the last in the last."""
    devices: tuple[int, ...]
    """The device, or tensor-parallel group, of each stage."""
    hosted: tuple[int, ...] = ()
    """Numbers of the layers that the host computes, which are in no stage."""
    hosts_output: bool = False
    """Whether the host computes what follows the last layer."""

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.layers)

    @property
    def ranks(self) -> int:
        """Number of devices, or groups, with stages."""
        return len(set(self.devices))


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """A plan for an engine."""

    training: bool
    """Whether this is a plan of a training step."""
    stages: Stages
    architecture: str | None = None
    """The model's transformers class, if any."""
    model: Mapping[str, object] = field(default_factory=dict)
    """Fields of its transformers configuration."""
    dtype: str = "bfloat16"
    batch_size: int = 1
    """Examples per replica and microbatch."""
    tokens: int | None = None
    """Tokens per example: sequence length in training, cache capacity in serving."""
    prefill_tokens: int | None = None
    """Most tokens of prompts in one pass while other texts wait; None if all prompts are in one."""
    data_parallel: int = 1
    zero: int = 0
    """One of `fxpart.sharding.zero.STAGES`."""
    reduce_dtype: str | None = None
    """Dtype in which gradients are scattered; None for that of the weights."""
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    async_tensor_parallel: bool = False
    """Whether collectives of tensor parallelism run during products."""
    compiled: Literal["none", "blocks", "blocks and loss", "whole"] = "none"
    """What is compiled: each block by itself, the loss too, or the whole model with its loss."""
    loss_parallel: bool = False
    """Whether the loss is computed from shards of the logits."""
    expert_parallel: int = 1
    """Number of replicas that share the experts."""
    context_parallel: int = 1
    """Number of further replicas, each with a piece of every sequence."""
    schedule: str = "none"
    microbatches: int = 1
    checkpointing: str = "none"
    recomputes_some: bool = False
    """Whether only some layers are checkpointed."""
    optimizer: str = "adamw"
    implementation: str = "foreach"
    """Implementation of the optimizer: ``for_loop``, ``foreach`` or ``fused``."""
    same_dtype: bool = True
    """Whether optimizer state and weights are only in the dtype of the model."""
    megatron: bool = False
    """Whether the plan is for Megatron-LM's kernels."""
    float8: str = "none"
    """The recipe of linear layers that multiply in 8 bits, as in ``conf/float8``."""
    filter_fqns: tuple[str, ...] = ()
    """Parts of the paths of linear layers that do not."""
    weights: str = "none"
    """The weight quantization, as in ``conf/weights``."""
    activations: str | None = None
    """Dtype to which the inputs of quantized products are cast; None for the model's."""
    group_size: int = 0
    """Quantized weights that share a scale; 0 without groups."""
    format_text: str = ""
    """The quantization in words: bits, groups and the modules that keep their dtype."""
    has_shipped_format: bool = True
    """Whether bits, and the modules that keep their dtype, are the usual ones of `weights`."""
    cache: str = "auto"
    """The dtype of the KV cache."""
    needed_share: float = 0.0
    """Largest share of a device's memory that the plan needs besides the driver's context; 0 if
    unknown."""
    free_share: float = 1.0
    """Smallest share of a device's memory besides that context."""
    machines: int = 1
    replicas: tuple[tuple[int, ...], ...] = ()
    """The global devices, or groups, that correspond to the devices of `stages` in each replica;
    empty if replicas occupy consecutive devices."""

    @property
    def devices(self) -> int:
        """Total number of devices."""
        return self.replica_count * self.tensor_parallel * self.stages.ranks

    @property
    def replica_count(self) -> int:
        """Number of replicas of the model."""
        return self.data_parallel * self.context_parallel

    def device_order(self, *, stages_first: bool = False) -> tuple[int, ...] | None:
        """Return the device of each of an engine's ranks; None for the identity.

        Ranks enumerate the devices of a group first, then stages, then replicas; with
        `stages_first`, replicas before stages, so that the first ranks have the first stage.
        """
        size, width = self.tensor_parallel, max(self.stages.devices) + 1
        stage_devices = dict.fromkeys(self.stages.devices)
        replicas = self.replicas or [
            range(width * replica, width * (replica + 1)) for replica in range(self.replica_count)
        ]
        groups = [[replica[stage] for stage in stage_devices] for replica in replicas]
        rows = zip(*groups, strict=True) if stages_first else groups
        order = tuple(group * size + i for row in rows for group in row for i in range(size))
        return None if order == tuple(range(len(order))) else order

    def visible_devices(self, *, stages_first: bool = False) -> str | None:
        """Return the `device_order` as a value of ``CUDA_VISIBLE_DEVICES``.

        Raises:
            SpecError: if an order other than the identity spans several machines.

        """
        order = self.device_order(stages_first=stages_first)
        if order and self.machines > 1:
            raise SpecError("its ranks would be on other devices than planned")
        return ",".join(map(str, order)) if order else None


def stages_of(graph: OpGraph, assignment: Assignment) -> Stages:
    """Return the stages of a plan that is cut between numbered layers, or not at all.

    Raises:
        SpecError: if the plan is not a sequence of stages, or is cut elsewhere.

    """
    ops = forward_operators(graph)
    stage = assignment.partition_of[ops]
    if (np.diff(stage) < 0).any() or (np.diff(stage) > 1).any() or stage[0] != 0:
        raise SpecError("the plan is not a chain of stages")
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


def hosted_stages_of(graph: OpGraph, device_of: IntArray) -> Stages:
    """Return the stages of a plan whose other layers the host computes, -1 in `device_of`.

    Raises:
        SpecError: if a layer is divided, no layer is on a device, or stages are not in order.

    """
    ops = forward_operators(graph)
    blocks = _blocks([graph.modules[op] for op in ops.tolist()])
    place_of: dict[str, int] = {}
    for block, device in zip(blocks, device_of[ops].tolist(), strict=True):
        if block and place_of.setdefault(block, device) != device:
            raise SpecError(f"{block} is divided")
    resident = [device for device in place_of.values() if device >= 0]
    homes = list(dict.fromkeys(resident))
    if not resident:
        raise SpecError("no layer is on a device")
    if resident != sorted(resident, key=homes.index):
        raise SpecError("the plan is not a chain of stages")
    output = int(graph.users[np.isin(graph.users, ops)].max())
    return Stages(
        tuple(resident.count(device) for device in homes),
        tuple(homes),
        hosted=tuple(layer for layer, device in enumerate(place_of.values()) if device < 0),
        hosts_output=int(device_of[output]) < 0,
    )


def _blocks(modules: list[str]) -> list[str]:
    """Return the layer of each operator within the longest numbered list; empty if outside."""
    blocks = [block_of(module) for module in modules]
    lists: dict[str, set[str]] = {}
    for block in blocks:
        if block:
            lists.setdefault(block.rpartition(".")[0], set()).add(block)
    if not lists:
        return blocks
    longest = max(lists, key=lambda prefix: len(lists[prefix]))
    return [block if block.rpartition(".")[0] == longest else "" for block in blocks]

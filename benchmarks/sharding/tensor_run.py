"""Run a tensor-parallel model with torch's own styles, on the plan of the model class."""

import gc
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.sharding.observer import Observer, local_parts
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.execution.device import seeded
from fxpart.sharding.tensor_plan import tensor_plan

__all__ = ["Counted", "counted_run", "parallelize", "tensor_run", "whole_run"]

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Counted:
    """Bytes and collectives of one process in a forward, and in a step of forward and backward."""

    weight_bytes: int
    forward_bytes: int
    step_bytes: int
    forward_collectives: tuple[tuple[str, int], ...]
    step_collectives: tuple[tuple[str, int], ...]
    result: Any
    """The first result of the forward, as a numpy array."""
    loss: float


def tensor_run(rank: int, size: int, spec: ModelSpec) -> Counted:
    """Return the counts of this process for the model of `spec`, split over the group."""
    with seeded(0, CPU):
        built = build_model(replace(spec, sequence_parallel=False, loss_parallel=False), CPU)
    mesh = init_device_mesh("cpu", (size,))
    if spec.sequence_parallel:
        _parallelize_sequences(built.module, mesh, splits_loss=spec.loss_parallel)
    else:
        parallelize(built.module, mesh)
    with loss_parallel() if spec.loss_parallel else nullcontext():
        return counted_run(built.module, built.kwargs, has_pieces=spec.sequence_parallel)


def whole_run(rank: int, size: int, spec: ModelSpec) -> Counted:
    """Return the same counts for the whole model in one process."""
    with seeded(0, CPU):
        built = build_model(spec, CPU)
    return counted_run(built.module, built.kwargs)


def parallelize(module: nn.Module, mesh: Any, excluded: tuple[str, ...] = ()) -> None:  # noqa: ANN401 - a DeviceMesh
    """Split `module` over `mesh` by its plan, except for paths that begin with `excluded`."""
    plan = tensor_plan(module)
    styles = {path: s for path, s in plan.items() if not f"{path}.".startswith(excluded)}
    if any(style.startswith(("moe", "packed")) for style in styles.values()):
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        # Torch has no style for experts.
        names = {n for n, _ in module.named_modules()} | {n for n, _ in module.named_parameters()}
        named = {path: style for path, style in styles.items() if path in names}
        weights = {
            f"{path}.{name}": style
            for path, style in named.items()
            if not path.endswith("experts") and path in {n for n, _ in module.named_modules()}
            for name, _ in module.get_submodule(path).named_parameters(recurse=False)
        }
        apply_tensor_parallelism(module, mesh, {**weights, **named})
        return
    torch_styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(module, mesh, {path: torch_styles[style] for path, style in styles.items()})


def _parallelize_sequences(
    module: nn.Module,
    mesh: Any,  # noqa: ANN401 - a DeviceMesh
    *,
    splits_loss: bool,
) -> None:
    """Split a model as torchtitan splits its Llama: norms run on pieces of the sequence.

    With `splits_loss`, logits stay split for `loss_parallel`.
    """
    styles, pieces = tensor_plan(module), Shard(1)
    logits = Shard(-1) if splits_loss else Replicate()
    torch_styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(output_layouts=pieces),
        "colwise_gather_output": ColwiseParallel(
            input_layouts=pieces, output_layouts=logits, use_local_output=not splits_loss
        ),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate(), output_layouts=pieces),
    }
    plan = {path: torch_styles[style] for path, style in styles.items()}
    for path, _ in module.named_modules():
        if path.endswith("norm"):
            plan[path] = SequenceParallel(use_local_output=True)
        elif path.endswith("self_attn"):
            plan[path] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": pieces},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
        elif path.endswith("mlp"):
            plan[path] = PrepareModuleInput(input_layouts=pieces, desired_input_layouts=Replicate())
    parallelize_module(module, mesh, plan)


def _sum_partial_gradients(module: nn.Module) -> None:
    """Sum the gradients of norms, which torch keeps partial until an optimizer reads them."""
    for parameter in module.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            parameter.grad = gradient.redistribute(placements=[Replicate()])


def counted_run(
    module: nn.Module, inputs: dict[str, Tensor], *, has_pieces: bool = False
) -> Counted:
    """Return the counts of this process for a forward and a step of `module`."""
    resident = [*module.parameters(), *module.buffers(), *inputs.values()]
    weights = sum(t.nbytes for t in local_parts(list(module.parameters())))
    # Computed here, as each process may have only a piece of the embeddings.
    positions = torch.arange(inputs["input_ids"].shape[1]).unsqueeze(0)
    inputs = {**inputs, "position_ids": positions} if has_pieces else inputs
    labelled_inputs = {**inputs, "labels": inputs["input_ids"]}
    with torch.no_grad():
        module(**inputs)
    module(**labelled_inputs)[0].backward()
    module.zero_grad(set_to_none=True)
    gc.collect()
    forward = Observer(resident)
    with torch.no_grad(), forward:
        result = module(**inputs)[0]
    step = Observer(resident)
    gc.collect()
    with step:
        loss = module(**labelled_inputs)[0]
        loss.backward()
        _sum_partial_gradients(module)
    (local_result,) = local_parts([result])
    return Counted(
        weights,
        forward.peak_bytes[0],
        step.peak_bytes[0],
        tuple(forward.collectives),
        tuple(step.collectives),
        local_result.detach().double().numpy(),
        float(loss.detach()),
    )

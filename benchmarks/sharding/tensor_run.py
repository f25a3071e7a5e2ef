"""A tensor-parallel model really run: torch's own styles on the plan that its class states."""

import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.sharding.observer import Observer, local_parts
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.execution.device import seeded
from fxpart.sharding.tensor_plan import tensor_plan

__all__ = ["Counted", "tensor_run", "whole_run"]

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Counted:
    """What one process held and sent in a forward, and in the forward and backward of a step."""

    weight_bytes: int
    forward_bytes: int
    step_bytes: int
    forward_collectives: tuple[tuple[str, int], ...]
    step_collectives: tuple[tuple[str, int], ...]
    result: Any
    """The first result of the forward, as a numpy array."""
    loss: float


def tensor_run(rank: int, size: int, spec: ModelSpec) -> Counted:
    """Return what this process counts of the model that `spec` names, split over the group."""
    with seeded(0, CPU):
        built = build_model(spec, CPU)
    mesh = init_device_mesh("cpu", (size,))
    _parallelized(built.module, mesh)
    return _counted(built.module, built.kwargs)


def whole_run(rank: int, size: int, spec: ModelSpec) -> Counted:
    """Return the same of the whole model in one process."""
    with seeded(0, CPU):
        built = build_model(spec, CPU)
    return _counted(built.module, built.kwargs)


def _parallelized(module: nn.Module, mesh: Any) -> None:  # noqa: ANN401 - a DeviceMesh
    styles = tensor_plan(module)
    if any(style.startswith(("moe", "packed")) for style in styles.values()):
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        # torch has no style for experts.
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
    made: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(module, mesh, {path: made[style] for path, style in styles.items()})


def _counted(module: nn.Module, inputs: dict[str, Tensor]) -> Counted:
    resident = [*module.parameters(), *module.buffers(), *inputs.values()]
    weights = sum(t.nbytes for t in local_parts(list(module.parameters())))
    labelled = {**inputs, "labels": inputs["input_ids"]}
    with torch.no_grad():
        module(**inputs)
    module(**labelled)[0].backward()
    module.zero_grad(set_to_none=True)
    gc.collect()
    forward = Observer(resident)
    with torch.no_grad(), forward:
        result = module(**inputs)[0]
    step = Observer(resident)
    gc.collect()
    with step:
        loss = module(**labelled)[0]
        loss.backward()
    (shown,) = local_parts([result])
    return Counted(
        weights,
        forward.peak_bytes[0],
        step.peak_bytes[0],
        tuple(forward.collectives),
        tuple(step.collectives),
        shown.detach().double().numpy(),
        float(loss.detach()),
    )

"""A mixture of experts really run with expert parallelism: transformers' own on its plan."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.sharding.tensor_run import CPU, Counted, counted_run
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.execution.device import seeded
from fxpart.sharding.tensor_plan import styles_of

__all__ = ["balance_routers", "expert_run", "share_of"]


def balance_routers(module: nn.Module) -> None:
    """Let each of two halves of the experts get one of the two that a token chooses."""
    for name, weight in module.named_parameters():
        if name.endswith("mlp.gate.weight"):
            with torch.no_grad():
                half = len(weight) // 2
                weight[half:] = weight[:half] * 0.5
                weight[1:half] = -weight[:1]
                weight[half + 1 :] = -weight[half : half + 1]


def share_of(inputs: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """Return the examples of `inputs` that the device `rank` of `size` has."""
    return {name: torch.chunk(value, size)[rank].clone() for name, value in inputs.items()}


def expert_run(rank: int, size: int, spec: ModelSpec) -> Counted:
    """Return what this process counts: `spec` is the whole model with the batch of all."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    with seeded(0, CPU):
        built = build_model(replace(spec, expert_parallel=1), CPU)
    module: Any = built.module
    inputs = built.kwargs
    balance_routers(module)
    if size > 1:
        mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("ep", "tp"))
        styles = styles_of(module, module.ep_plan)
        weights = dict(module.named_parameters())
        # Weights first: what dispatches tokens asks them how many experts there are.
        plan = dict(sorted(styles.items(), key=lambda item: item[0] not in weights))
        apply_expert_parallelism(module, mesh["ep"], mesh["tp"], plan)
        inputs = share_of(inputs, rank, size)
    return counted_run(module, inputs)

"""Run a mixture of experts with the expert parallelism of transformers, on the model's plan."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.sharding.tensor_run import CPU, Counted, counted_run, parallelize
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.execution.device import seeded
from fxpart.sharding.experts import expert_paths
from fxpart.sharding.tensor_plan import styles_of

__all__ = ["balance_routers", "expert_run", "share_of"]


def balance_routers(module: nn.Module) -> None:
    """Assign tokens to experts in turn, whatever the router scores, so that loads are equal."""
    for name, part in module.named_modules():
        if name.endswith("mlp.gate"):
            part.forward = partial(_route_in_turn, part.forward)


def _route_in_turn(forward: Callable[..., Any], *args: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
    logits, scores, chosen = forward(*args)
    experts, per_token = logits.shape[-1], chosen.shape[-1]
    first = torch.arange(len(chosen)).unsqueeze(-1) % (experts // per_token)
    return logits, scores, first + torch.arange(per_token) * (experts // per_token)


def share_of(inputs: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """Return the examples of `inputs` on device `rank` of `size`."""
    return {name: torch.chunk(value, size)[rank].clone() for name, value in inputs.items()}


def expert_run(rank: int, size: int, spec: ModelSpec, tensor: int = 1) -> Counted:
    """Return the counts of this process; `spec` is the whole model with the global batch.

    Experts are spread over all processes; all other layers are split over `tensor` neighbours.
    """
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    with seeded(0, CPU):
        built = build_model(replace(spec, expert_parallel=1), CPU)
    module: Any = built.module
    inputs = built.kwargs
    balance_routers(module)
    if size > 1:
        dense_mesh = init_device_mesh("cpu", (size // tensor, tensor), mesh_dim_names=("dp", "tp"))
        expert_mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
        if tensor > 1:
            expert_prefixes = tuple(f"{path}." for path in expert_paths(module))
            parallelize(module, dense_mesh["tp"], excluded=expert_prefixes)
        styles = styles_of(module, module.ep_plan)
        weights = dict(module.named_parameters())
        # Weights first: the token dispatcher reads the number of experts from them.
        plan = dict(sorted(styles.items(), key=lambda item: item[0] not in weights))
        apply_expert_parallelism(module, expert_mesh["ep"], dense_mesh["tp"], plan)
        inputs = share_of(inputs, rank // tensor, size // tensor)
    return counted_run(module, inputs)

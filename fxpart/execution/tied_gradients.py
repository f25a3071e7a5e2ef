"""Gradients of a weight that several stages have: each computes its part, all need the sum."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["SharedWeight", "add_tied_gradients", "shared_weights"]


@dataclass(frozen=True, eq=False, slots=True)
class SharedWeight:
    """A weight of this stage that other stages have too."""

    parameter: nn.Parameter
    group: dist.ProcessGroup
    """The processes of the stages that have it."""


def shared_weights(
    tied: Sequence[Sequence[tuple[int, str]]], stage: int, module: nn.Module
) -> list[SharedWeight]:
    """Return the weights of `module`, which is stage `stage`, that other stages have too.

    All processes must call this, with the same `tied`: they agree on groups here. `module` is
    stage number `stage`, whose rank is the same number.

    Args:
        tied: groups of (stage, name) that are one parameter, in the same order everywhere.
        stage: of this process.
        module: its stage, in which the names of one group are one parameter.

    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    mine = []
    for names in tied:
        stages = tuple(sorted({at for at, _ in names}))
        if len(stages) < 2:
            continue
        if stages not in groups:
            groups[stages] = dist.new_group(list(stages))
        name = next((name for at, name in names if at == stage), None)
        parameter = None if name is None else module.get_parameter(name)
        if parameter is not None and parameter.requires_grad:
            mine.append(SharedWeight(parameter, groups[stages]))
    return mine


def add_tied_gradients(shared: Sequence[SharedWeight]) -> None:
    """Give every shared weight the sum of its gradients over the stages that have it.

    A stage on which the loss does not depend adds nothing. Two parts are added exactly as one
    process would; of three and more, the order may be another.
    """
    for weight in shared:
        gradient = weight.parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(weight.parameter)
        total = gradient.to_dense() if gradient.is_sparse else gradient
        if total.is_cuda and dist.get_backend(weight.group) == "gloo":
            total = total.cpu()
        total = total.contiguous()
        dist.all_reduce(total, group=weight.group)
        weight.parameter.grad = total.to(weight.parameter.device)

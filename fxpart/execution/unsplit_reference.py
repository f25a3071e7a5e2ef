"""What a model computes in this process, to hold a pipeline's results against."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fxpart.capture.training.loss import training_loss
from fxpart.execution.device import torch_threads
from fxpart.execution.stages.chain import tied_parameters

if TYPE_CHECKING:
    from fxpart.execution.stages.chain import Chain

__all__ = ["Reference", "reference"]


@dataclass(frozen=True, eq=False, slots=True)
class Reference:
    """Results of every microbatch, and the gradients of a step of them all."""

    outputs: tuple[tuple[Tensor, ...], ...]
    """Of each microbatch, flat."""
    losses: tuple[float, ...]
    """Of each microbatch; empty without training."""
    gradients: Mapping[tuple[int, str], Tensor]
    """By stage and name in it: of the mean of the losses. Names of one parameter have its whole
    gradient; parameters that the losses do not depend on are not there."""


def reference(
    chain: "Chain", microbatches: Sequence[tuple[Tensor, ...]], *, training: bool, threads: int
) -> Reference:
    """Return what all stages of `chain` compute here, one after the other, on so many threads.

    Weights, their ``grad``, buffers, inputs and the random generators are left as they were.

    Raises:
        SpecError: when the model returns nothing to take a loss of.

    """
    with torch_threads(threads), torch.random.fork_rng(), _same_buffers(chain):
        if training:
            return _trained(chain, microbatches)
        with torch.no_grad():
            return Reference(tuple(_run(chain, inputs) for inputs in microbatches), (), {})


def _run(chain: "Chain", inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # A stage may write to what it is given.
    values = tuple(value.detach().clone() for value in inputs)
    for stage in chain.stages:
        values = stage.module(*values)
    return values


def _trained(chain: "Chain", microbatches: Sequence[tuple[Tensor, ...]]) -> Reference:
    names: dict[nn.Parameter, list[tuple[int, str]]] = {}
    for stage in chain.stages:
        for name, parameter in stage.module.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                names.setdefault(parameter, []).append((stage.index, name))
    parameters = list(names)
    sums: list[Tensor | None] = [None] * len(parameters)
    outputs, losses = [], []
    for inputs in microbatches:
        with torch.enable_grad():
            results = _run(chain, inputs)
            loss = training_loss(results)
            # Not `backward`, which would add to the gradients that the caller's weights have.
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
        outputs.append(tuple(result.detach() for result in results))
        losses.append(float(loss.detach()))
        sums = [_sum(old, new) for old, new in zip(sums, found, strict=True)]
    total = {
        name: gradient
        for parameter, gradient in zip(parameters, sums, strict=True)
        if gradient is not None
        for name in names[parameter]
    }
    _add_up_ties(chain, total)
    mean = {name: gradient / len(microbatches) for name, gradient in total.items()}
    return Reference(tuple(outputs), tuple(losses), mean)


def _sum(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    return old if new is None else new if old is None else old + new


def _add_up_ties(chain: "Chain", gradients: dict[tuple[int, str], Tensor]) -> None:
    """Add the gradients of parameters that share memory and yet are different objects."""
    objects = {
        (stage.index, name): parameter
        for stage in chain.stages
        for name, parameter in stage.module.named_parameters(remove_duplicate=False)
    }
    for group in tied_parameters(chain):
        parts = {objects[name]: gradients[name] for name in group if name in gradients}
        if len(parts) > 1:
            whole = torch.stack([part.to_dense() for part in parts.values()]).sum(0)
            gradients.update(dict.fromkeys(group, whole))


@contextmanager
def _same_buffers(chain: "Chain") -> Iterator[None]:
    """Undo what a run writes to buffers, as batch normalization in training does."""
    buffers = list({buffer: None for stage in chain.stages for buffer in stage.module.buffers()})
    copies = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in zip(buffers, copies, strict=True):
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)

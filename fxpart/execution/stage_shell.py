"""Wrap a stage for torch's pipeline engine, and sum gradients shared with other stages."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from fxpart.execution.pipeline_job import COMPUTING
from fxpart.execution.split.effects import SharedMemory, effects_of
from fxpart.execution.split.write_order import writes_in_place

__all__ = [
    "MicrobatchFeed",
    "SharedWeight",
    "StageShell",
    "add_tied_gradients",
    "mutated_inputs",
    "shared_weights",
]


def mutated_inputs(module: fx.GraphModule) -> tuple[int, ...]:
    """Return the positions of inputs written by an operator, directly or through a view.

    A possible view counts as a view; see `fxpart.execution.split.effects`.
    """
    ops = [node for node in module.graph.nodes if node.op.startswith("call_")]
    if not writes_in_place(module, ops):
        return ()
    memory, written = SharedMemory(), list[fx.Node]()
    for node in ops:
        effects = effects_of(module, node)
        memory.enter(node, effects.shared)
        written += effects.written
    roots = {memory.root(node) for node in written}
    inputs = module.graph.find_nodes(op="placeholder")
    return tuple(position for position, node in enumerate(inputs) if memory.root(node) in roots)


class StageShell(nn.Module):
    """A stage whose outputs meet the engine's requirements: contiguous, on one device."""

    def __init__(
        self,
        stage: fx.GraphModule,
        *,
        compute: torch.device,
        wire: torch.device,
        is_last: bool,
        report: Callable[[str], None],
        keep: int = 0,
    ) -> None:
        """Wrap `stage`.

        Args:
            stage: takes and returns flat tensors.
            compute: the device of the stage.
            wire: the device of sent and received tensors.
            is_last: whether this is the last stage, whose results are not sent and stay unchanged.
            report: called with a phase when a microbatch begins and ends.
            keep: number of the latest results to keep in `results`.

        """
        super().__init__()
        self.stage = stage
        self.results: deque[tuple[Tensor, ...]] = deque(maxlen=keep)
        self._compute, self._wire, self._is_last = compute, wire, is_last
        self._report = report
        self._mutated = frozenset(mutated_inputs(stage))

    def keep_no_more(self) -> None:
        """Drop the results kept so far, and keep none from now on."""
        self.results = deque(maxlen=0)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the results of the stage."""
        self._report(COMPUTING)
        inputs = [value.to(self._compute) for value in values]
        for index in self._mutated:
            # A received tensor is a leaf of this process's autograd, and a microbatch is used again
            # in the next step: neither may be written to.
            inputs[index] = inputs[index].clone()
        results: tuple[Tensor, ...] = self.stage(*inputs)
        if self.results.maxlen:
            self.results.append(tuple(result.detach() for result in results))
        if not self._is_last:
            results = tuple(result.to(self._wire).contiguous() for result in results)
        self._report("between two forwards: waiting, or in a backward")
        return results


class MicrobatchFeed(nn.Module):
    """The first stage, called with the number of a microbatch instead of its tensors.

    The engine cuts one batch into microbatches along a dimension that every input must have. Here
    it cuts a range of numbers, so that inputs need no batch dimension.
    """

    def __init__(self, shell: nn.Module, microbatches: Sequence[tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.shell = shell
        self._microbatches = tuple(microbatches)

    def forward(self, number: Tensor) -> tuple[Tensor, ...]:
        """Return the results for the microbatch with that number (int64, shape (1,))."""
        results: tuple[Tensor, ...] = self.shell(*self._microbatches[int(number)])
        return results


# Each stage computes part of the gradient of a shared weight, and all need the sum.


@dataclass(frozen=True, eq=False, slots=True)
class SharedWeight:
    """A weight of this stage that is also in other stages."""

    parameter: nn.Parameter
    group: dist.ProcessGroup
    """Process group of the stages that have the weight."""


def shared_weights(
    tied: Sequence[Sequence[tuple[int, str]]], stage: int, module: nn.Module
) -> list[SharedWeight]:
    """Return the trained weights of `module` that are also in other stages.

    Collective: all processes must call this with equal `tied`, since it creates process groups.

    Args:
        tied: groups of (stage, name) of one parameter, in the same order in every process.
        stage: number of this process's stage, which is also its rank.
        module: that stage, in which the names of a group refer to one parameter.

    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    shared = []
    for names in tied:
        stages = tuple(sorted({owner for owner, _ in names}))
        if len(stages) < 2:
            continue
        if stages not in groups:
            groups[stages] = dist.new_group(list(stages))
        name = next((name for owner, name in names if owner == stage), None)
        parameter = None if name is None else module.get_parameter(name)
        if parameter is not None and parameter.requires_grad:
            shared.append(SharedWeight(parameter, groups[stages]))
    return shared


def add_tied_gradients(shared: Sequence[SharedWeight]) -> None:
    """Sum the gradient of every shared weight over the stages that have it.

    A stage that does not affect the loss adds zeros. A sum of two parts equals that of a single
    process; three or more may be added in another order.
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

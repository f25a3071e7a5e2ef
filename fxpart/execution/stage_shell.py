"""A stage as torch's pipeline engine calls it: `StageShell` and `MicrobatchFeed`."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from fxpart.execution.pipeline_job import COMPUTING
from fxpart.execution.split.effects import SharedMemory, effects_of

__all__ = [
    "MicrobatchFeed",
    "SharedWeight",
    "StageShell",
    "add_tied_gradients",
    "mutated_inputs",
    "shared_weights",
]


# Which inputs of a stage its operators write to.


def mutated_inputs(module: fx.GraphModule) -> tuple[int, ...]:
    """Return the positions of the inputs that an operator writes to, itself or through a view.

    What may be a view counts as one; see `fxpart.execution.split.effects`.
    """
    memory, written = SharedMemory(), list[fx.Node]()
    for node in module.graph.nodes:
        if node.op.startswith("call_"):
            effects = effects_of(module, node)
            memory.enter(node, effects.shared)
            written += effects.written
    roots = {memory.root(node) for node in written}
    inputs = module.graph.find_nodes(op="placeholder")
    return tuple(at for at, node in enumerate(inputs) if memory.root(node) in roots)


class StageShell(nn.Module):
    """Stage module with what the engine asks of tensors that travel: contiguous, on one device."""

    def __init__(
        self,
        stage: fx.GraphModule,
        *,
        compute: torch.device,
        wire: torch.device,
        is_last: bool,
        say: Callable[[str], None],
        keep: int = 0,
    ) -> None:
        """Wrap `stage`.

        Args:
            stage: takes and returns flat tensors.
            compute: the device of the stage.
            wire: the device of the tensors that are sent and received.
            is_last: whether nothing is sent on: then results stay as they are.
            say: is told when a microbatch begins and ends.
            keep: how many of the latest results to keep in `results`.

        """
        super().__init__()
        self.stage = stage
        self.results: deque[tuple[Tensor, ...]] = deque(maxlen=keep)
        self._compute, self._wire, self._is_last = compute, wire, is_last
        self._say = say
        self._written_to = frozenset(mutated_inputs(stage))

    def keep_no_more(self) -> None:
        """Drop the results kept so far, and keep none from here on."""
        self.results = deque(maxlen=0)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return what the stage returns."""
        self._say(COMPUTING)
        here = [value.to(self._compute) for value in values]
        for index in self._written_to:
            # What was received is a leaf of this process's autograd, and a microbatch is used again
            # in the next step: neither may be written to.
            here[index] = here[index].clone()
        results: tuple[Tensor, ...] = self.stage(*here)
        if self.results.maxlen:
            self.results.append(tuple(result.detach() for result in results))
        if not self._is_last:
            results = tuple(result.to(self._wire).contiguous() for result in results)
        self._say("between two forwards: waiting, or in a backward")
        return results


class MicrobatchFeed(nn.Module):
    """The first stage, called with the number of a microbatch instead of with its tensors.

    The engine cuts microbatches from one batch, along a dimension that every input must have. Ours
    are there already, and inputs without a batch dimension are fine: it cuts their numbers.
    """

    def __init__(self, shell: nn.Module, microbatches: Sequence[tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.shell = shell
        self._microbatches = tuple(microbatches)

    def forward(self, number: Tensor) -> tuple[Tensor, ...]:
        """Return what the stage returns for the microbatch with that number (int64, shape 1)."""
        results: tuple[Tensor, ...] = self.shell(*self._microbatches[int(number)])
        return results


# Gradients of a weight that several stages have: each computes its part, all need the sum.


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

"""A stage as torch's pipeline engine calls it: `StageShell` and `MicrobatchFeed`."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx, nn

from fxpart.execution.mutated_inputs import mutated_inputs
from fxpart.execution.pipeline_job import COMPUTING

__all__ = ["MicrobatchFeed", "StageShell"]


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

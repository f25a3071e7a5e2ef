"""Measure the peak bytes of a forward, or of a whole training step, in this process.

`LiveBytes` counts the storages of tensors: weights, buffers, inputs, gradients, optimizer states
and results of operators. Memory that a kernel allocates internally and an allocator's rounding are
not counted.
"""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fxpart.capture.live_bytes import LiveBytes, storage_sizes
from fxpart.capture.training.loss import training_loss
from fxpart.core.optimizer import IMPLEMENTATIONS
from fxpart.errors import SpecError, nearest_names

__all__ = [
    "REAL_OPTIMIZERS",
    "StepPeak",
    "forward_peak_bytes",
    "real_optimizer",
    "step_peak_bytes",
    "training_step",
]

REAL_OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "sgd": lambda weights, **how: torch.optim.SGD(weights, lr=1e-3, **how),
    "momentum": lambda weights, **how: torch.optim.SGD(weights, lr=1e-3, momentum=0.9, **how),
    "adam": lambda weights, **how: torch.optim.Adam(weights, lr=1e-3, **how),
    "adamw": lambda weights, **how: torch.optim.AdamW(weights, lr=1e-3, **how),
}
"""Constructors of torch's optimizers, by their names in `fxpart.core.optimizer`."""

_PHASES = ("forward", "backward", "update")


@dataclass(frozen=True, slots=True)
class StepPeak:
    """Peak bytes of each part of a training step."""

    forward_bytes: int
    """Peak until the loss is computed."""
    backward_bytes: int
    """Peak from the loss until all gradients are computed."""
    update_bytes: int
    """Peak while the optimizer updates the weights; without one, live bytes after the backward."""
    resident_bytes: int
    """Bytes of weights, buffers, inputs and optimizer states, which are live throughout."""

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the whole step."""
        return max(self.forward_bytes, self.backward_bytes, self.update_bytes)

    @property
    def phase(self) -> str:
        """Phase of the peak: ``forward``, ``backward`` or ``update``; the first if tied."""
        peaks = (self.forward_bytes, self.backward_bytes, self.update_bytes)
        return _PHASES[peaks.index(self.peak_bytes)]


def real_optimizer(
    name: str, parameters: Iterable[nn.Parameter], implementation: str = "for_loop"
) -> Optimizer | None:
    """Return torch's optimizer of that name for the trainable parameters.

    Args:
        name: one of `REAL_OPTIMIZERS`; ``none`` gives None.
        parameters: the model's parameters; those that require no gradient are skipped.
        implementation: one of `IMPLEMENTATIONS`.

    Raises:
        SpecError: if the optimizer or the implementation is unknown.

    """
    if name == "none":
        return None
    if name not in REAL_OPTIMIZERS:
        raise SpecError(
            f"optimizer={name} is not known; {nearest_names(name, [*REAL_OPTIMIZERS, 'none'])}"
        )
    if implementation not in IMPLEMENTATIONS:
        near = nearest_names(implementation, IMPLEMENTATIONS)
        raise SpecError(f"implementation={implementation} of an optimizer is not known; {near}")
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    flags = {flag: implementation == flag for flag in ("foreach", "fused")}
    return REAL_OPTIMIZERS[name](trained, **flags)


def forward_peak_bytes(
    module: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> int:
    """Return the peak bytes of two calls of `module` without gradients.

    Weights, buffers and inputs count throughout, tied ones once. The module is called in its
    current mode: the second call has what the module keeps from the first, such as caches.
    """
    named = dict(kwargs or {})
    resident = _resident(module, args, named, None)  # kept alive: the first call may replace some
    counter = LiveBytes([storage_sizes(resident)])
    with torch.no_grad(), counter:
        module(*args, **named)
        gc.collect()
        module(*args, **named)
    return counter.peak_bytes[0]


def step_peak_bytes(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    optimizer: Optimizer | None = None,
) -> StepPeak:
    """Return the peak bytes of each part of one training step of `module`.

    The step is a `training_step` in the module's current mode, after an uncounted one in which the
    optimizer creates its state. Both update the weights.

    Args:
        module: the module to train.
        args: positional inputs.
        kwargs: named inputs.
        optimizer: optimizer of the module's parameters; None leaves the weights unchanged.

    Raises:
        SpecError: if no result can have a loss.

    """
    named = dict(kwargs or {})
    training_step(module, args, named, optimizer)
    _drop_gradients(module, optimizer)
    gc.collect()
    resident = storage_sizes(_resident(module, args, named, optimizer))
    peaks: list[int] = []
    counter = LiveBytes([resident])

    def end_of_phase() -> None:
        peaks.append(counter.peak_bytes[0])
        counter.forget_peak()

    with counter:
        training_step(module, args, named, optimizer, end_of_phase)
    forward, backward, update = peaks
    return StepPeak(forward, backward, update, sum(resident.values()))


def training_step(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    optimizer: Optimizer | None = None,
    end_of_phase: Callable[[], None] = lambda: None,
) -> None:
    """Run one step: drop old gradients, forward, loss, backward, update.

    The loss is `training_loss`; results are dropped as soon as it is computed, as in a function
    that returns only the loss. Gradients stay on the parameters. `end_of_phase` is called after
    the forward, the backward and the update.
    """
    _drop_gradients(module, optimizer)
    with torch.enable_grad():
        results = module(*args, **kwargs)
        loss = training_loss([leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)])
        del results
        end_of_phase()
        loss.backward()  # type: ignore[no-untyped-call]
        end_of_phase()
    if optimizer is not None:
        optimizer.step()
    end_of_phase()


def _drop_gradients(module: nn.Module, optimizer: Optimizer | None) -> None:
    module.zero_grad(set_to_none=True)
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)


def _resident(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    optimizer: Optimizer | None,
) -> list[Tensor]:
    """Return the tensors that are live throughout a step."""
    state = [] if optimizer is None else tree_leaves(list(optimizer.state.values()))
    leaves = [*tree_leaves((list(args), dict(kwargs))), *state]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [*module.parameters(), *module.buffers(), *tensors]

"""Run the unsplit model in this process, and compare a pipeline's results with it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpart.capture.training.loss import training_loss
from fxpart.execution.device import torch_threads
from fxpart.execution.difference import (
    gradient_share,
    loss_share,
    max_difference,
    refuse_more,
    result_share,
    rounding,
)
from fxpart.execution.outcome import Outcome, agreement, step_outcome, trained_parameters
from fxpart.execution.pipeline_job import gradient_key, output_key
from fxpart.execution.real_model import RealModel
from fxpart.execution.stages.chain import Chain, tied_parameters

__all__ = [
    "Reference",
    "gradient_differences",
    "loss_difference",
    "output_difference",
    "reference",
    "refuse_another_model",
    "refuse_other_results",
]


@dataclass(frozen=True, eq=False, slots=True)
class Reference:
    """Results of every microbatch, and gradients of a step over all of them."""

    outputs: tuple[tuple[Tensor, ...], ...]
    """Flat results of each microbatch."""
    losses: tuple[float, ...]
    """Loss of each microbatch; empty without training."""
    gradients: Mapping[tuple[int, str], Tensor]
    """Gradients of the mean loss, by stage and parameter name. Each name of a tied parameter has
    the full gradient; parameters that do not affect the losses are missing."""


def reference(
    chain: Chain, microbatches: Sequence[tuple[Tensor, ...]], *, training: bool, threads: int
) -> Reference:
    """Return the results of all stages of `chain`, run one after the other in this process.

    Weights, their ``grad``, buffers, inputs and the random generators are left unchanged.

    Raises:
        SpecError: if no result of the model can have a loss.

    """
    with torch_threads(threads), torch.random.fork_rng(), _restored_buffers(chain):
        if training:
            return _training_step(chain, microbatches)
        with torch.no_grad():
            return Reference(tuple(_run(chain, inputs) for inputs in microbatches), (), {})


def refuse_another_model(chain: Chain, real: RealModel, *, training: bool, threads: int) -> None:
    """Refuse a chain whose results differ from those of the user's module in eager mode.

    Results, and in training the loss and gradients, are compared for the inputs of `real`.

    Raises:
        ExecutionError: if they differ by more than rounding.

    """

    def run(model: Callable[..., Any]) -> Any:  # noqa: ANN401 - whatever the model returns
        # On copies, since a model may write into its inputs, such as a serving step into its cache.
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (real.args, real.kwargs))
        return model(*args, **kwargs)

    def outcome(model: Callable[..., Any]) -> Outcome:
        if training:
            parameters = trained_parameters(real.module)
            return step_outcome(lambda: run(model), parameters, keep_results=True)
        with torch.no_grad():
            return Outcome(run(model), None, None)

    with torch_threads(threads), torch.random.fork_rng(), _restored_buffers(chain):
        agreement(outcome(chain), outcome(real.module))


def _run(chain: Chain, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # A stage may write into its inputs.
    values = tuple(value.detach().clone() for value in inputs)
    for stage in chain.stages:
        values = stage.module(*values)
    return values


def _training_step(chain: Chain, microbatches: Sequence[tuple[Tensor, ...]]) -> Reference:
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
            # Not `backward`, which would accumulate into the ``grad`` of the caller's weights.
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        outputs.append(tuple(result.detach() for result in results))
        losses.append(float(loss.detach()))
        sums = [
            old if new is None else new if old is None else old + new
            for old, new in zip(sums, gradients, strict=True)
        ]
    total = {
        name: gradient
        for parameter, gradient in zip(parameters, sums, strict=True)
        if gradient is not None
        for name in names[parameter]
    }
    _sum_over_ties(chain, total)
    mean = {name: gradient / len(microbatches) for name, gradient in total.items()}
    return Reference(tuple(outputs), tuple(losses), mean)


def _sum_over_ties(chain: Chain, gradients: dict[tuple[int, str], Tensor]) -> None:
    """Sum the gradients of parameters that share memory but are distinct objects."""
    objects = {
        (stage.index, name): parameter
        for stage in chain.stages
        for name, parameter in stage.module.named_parameters(remove_duplicate=False)
    }
    for group in tied_parameters(chain):
        parts = {objects[name]: gradients[name] for name in group if name in gradients}
        if len(parts) > 1:
            total = torch.stack([part.to_dense() for part in parts.values()]).sum(0)
            gradients.update(dict.fromkeys(group, total))


@contextmanager
def _restored_buffers(chain: Chain) -> Iterator[None]:
    """Restore buffers on exit, such as those that batch normalization updates in training."""
    buffers = list({buffer: None for stage in chain.stages for buffer in stage.module.buffers()})
    copies = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in zip(buffers, copies, strict=True):
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)


def output_difference(computed: Mapping[str, Tensor], expected: Reference) -> float:
    """Return the largest difference of any result; see `max_difference`.

    Args:
        computed: results of the last stage, on the CPU.
        expected: reference for the same microbatches.

    """
    return max_difference(*_outputs(computed, expected))


def _outputs(computed: Mapping[str, Tensor], expected: Reference) -> tuple[Any, Any]:
    """Return the computed and the expected results of each microbatch, on the CPU."""
    outputs = [
        tuple(computed[output_key(m, i)] for i in range(len(results)))
        for m, results in enumerate(expected.outputs)
    ]
    return outputs, [tuple(t.cpu() for t in results) for results in expected.outputs]


def loss_difference(losses: Sequence[float], expected: Reference) -> float:
    """Return the largest difference of any microbatch's loss; see `max_difference`."""
    # As tensors, since plain numbers are only compared for equality.
    return max_difference(
        torch.tensor(losses, dtype=torch.float64),
        torch.tensor(expected.losses, dtype=torch.float64),
    )


def gradient_differences(
    chain: Chain, computed: Sequence[Mapping[str, Tensor]], expected: Reference
) -> tuple[float, float | None]:
    """Return the gradient differences of weights in a single stage, and of weights in several.

    See `gradient_share`. A gradient present on only one side is compared with zeros: a stage sums a
    weight's gradient over the other stages, even if it does not contribute to it.

    Args:
        chain: the stages.
        computed: gradients of each stage, on the CPU.
        expected: reference for the same microbatches.

    Returns:
        The second is None if no weight in several stages has a gradient.

    """
    shared = {
        name
        for group in tied_parameters(chain)
        if len({stage for stage, _ in group}) > 1
        for name in group
    }
    # Computed and expected gradients, by whether the weight is in several stages.
    pairs_by_sharing: dict[bool, tuple[dict[str, Tensor], dict[str, Tensor]]]
    pairs_by_sharing = {False: ({}, {}), True: ({}, {})}
    for stage in chain.stages:
        for name, parameter in stage.module.named_parameters(remove_duplicate=False):
            key = (stage.index, name)
            gradient = computed[stage.index].get(gradient_key(name))
            reference = expected.gradients.get(key)
            present = reference if gradient is None else gradient
            if present is None or not parameter.requires_grad:
                continue
            zeros = torch.zeros_like(present.to_dense(), device="cpu")
            all_computed, all_wanted = pairs_by_sharing[key in shared]
            all_computed[f"{stage.index}.{name}"] = zeros if gradient is None else gradient
            all_wanted[f"{stage.index}.{name}"] = zeros if reference is None else reference.cpu()
    tied = gradient_share(*pairs_by_sharing[True]) if pairs_by_sharing[True][0] else None
    return gradient_share(*pairs_by_sharing[False]), tied


def refuse_other_results(
    computed: Mapping[str, Tensor],
    losses: Sequence[float],
    gradient_difference: float | None,
    expected: Reference,
) -> None:
    """Refuse results that differ from the unsplit model's by more than reordering sums may cause.

    Args:
        computed: results of the last stage, on the CPU.
        losses: loss of each microbatch; empty without training.
        gradient_difference: largest difference of a gradient, as a share of the elements around it;
            None without training.
        expected: reference for the same microbatches.

    Raises:
        ExecutionError: if results, loss or gradients differ by more than that.

    """
    share = result_share(*_outputs(computed, expected))
    if losses:
        triples = zip(losses, expected.losses, expected.outputs, strict=True)
        share = max(share, *(loss_share(*triple) for triple in triples))
    refuse_more("results", share, rounding(expected.outputs))
    if gradient_difference is not None:
        allowed = rounding(list(expected.gradients.values()))
        refuse_more("gradients", gradient_difference, allowed)

"""`run_step`: run a placed training step in this process, in graph order.

Autograd chooses the order of a backward pass itself; a step with another order is run operator by
operator, backward as well as forward, and compared with autograd.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from fxpart.capture.live_bytes import LiveBytes
from fxpart.capture.training.joint import JointCapture
from fxpart.core.assignment import Assignment
from fxpart.errors import ExecutionError, FxpartError, SpecError, one_line
from fxpart.execution.device import device_name, timed_in_turns
from fxpart.execution.local import LocalRun, check_memory, resident_storages
from fxpart.execution.outcome import (
    Outcome,
    agreement,
    step_outcome,
    trained_parameters,
    undoable,
)
from fxpart.execution.real_model import RealModel
from fxpart.execution.split.placement import split_by_assignment
from fxpart.execution.split_run import split_run

__all__ = ["run_step"]


def run_step(
    real: RealModel,
    step: JointCapture,
    assignment: Assignment,
    n_devices: int,
    *,
    repeats: int = 5,
) -> LocalRun:
    """Return measurements of a training step run in graph order, on the CPU.

    Partitions run one after another. Loss and gradients are compared with those of the module
    in eager mode. A value is freed after its last reader; where autograd would hold saved tensors
    to the end of a formula, the peak can be below the prediction.

    Args:
        real: the model, with weights and inputs; its program is the forward of `step`.
        step: the training step of `real`, whose ``graph`` the assignment places.
        assignment: the logical device of each operator.
        n_devices: number of logical devices, used or not.
        repeats: number of timed runs of the step, and of the unsplit model under autograd.

    Raises:
        SpecError: if the assignment is of another graph, or the model is not on the CPU or its
            tensors do not fit.
        ExecutionError: if the step cannot be run, or its results differ.

    """
    if repeats < 1:
        raise SpecError(f"repeats={repeats} must be 1 or more: without a run nothing is measured")
    if real.device.type != "cpu":
        raise SpecError(
            f"a step in another order than autograd's runs on the CPU only, got {real.device}; set "
            "execute.device=cpu, or backward_order=autograd"
        )
    check_memory(real, training=True)
    try:
        return _measured(real, step, assignment, n_devices, repeats)
    except FxpartError:
        raise
    # A model's code may raise anything.
    except Exception as error:
        raise ExecutionError(
            f"the training step cannot be run on {real.device}: {one_line(error)}; make"
            " model.batch_size or the model smaller if it lacks memory"
        ) from error


def _measured(
    real: RealModel, step: JointCapture, assignment: Assignment, n_devices: int, repeats: int
) -> LocalRun:
    forward_module = real.program.module()

    def autograd(model: Callable[..., Any], parameters: Mapping[str, nn.Parameter]) -> Outcome:
        return step_outcome(lambda: model(*real.args, **real.kwargs), parameters)

    unsplit = partial(autograd, forward_module, trained_parameters(forward_module))

    split = split_by_assignment(_module(step), step.graph, assignment)
    homes = [devices[0] for devices in assignment.devices_of_partition]
    run = split_run(split, homes, (real.device,) * n_devices)
    leaves = tree_leaves((real.args, real.kwargs))
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def in_order(counter: LiveBytes | None = None) -> Outcome:
        with torch.no_grad():
            loss, *gradients = run.run(inputs, counter)
        return Outcome(None, loss, dict(zip(step.gradients, gradients, strict=True)))

    reference, restore = undoable(
        real, forward_module, lambda: autograd(real.module, trained_parameters(real.module))
    )
    restore()
    with LiveBytes(resident_storages(run, assignment, inputs, n_devices)) as counter:
        outcome = in_order(counter)
    difference, share = agreement(outcome, reference)
    loss = None if outcome.loss is None else float(outcome.loss)
    n_nan = reference.nan_elements
    del outcome, reference
    runs, unsplit_runs = timed_in_turns(in_order, unsplit, (real.device,), repeats)
    return LocalRun(
        runs_s=runs,
        unsplit_runs_s=unsplit_runs,
        peak_bytes=counter.peak_bytes,
        allocator_peak_bytes=(),
        max_difference=difference,
        loss=loss,
        gradient_difference=share,
        nan_elements=n_nan,
        device_name=device_name(real.device),
        threads=torch.get_num_threads(),
    )


def _module(step: JointCapture) -> fx.GraphModule:
    """Return the step as a module that takes its tensors one by one and returns a tuple."""
    module = step.program.module()
    assert isinstance(module, fx.GraphModule), "a program's module is a graph"
    # The program has the forward's signature, but the step returns other values.
    module.graph.set_codegen(fx.graph.CodeGen())
    module.recompile()
    return module

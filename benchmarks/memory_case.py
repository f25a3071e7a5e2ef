"""One model of ``benchmarks.memory``: bytes predicted from shapes and bytes counted in a run."""

from dataclasses import dataclass

import torch

from fxpart.capture.api import capture_graph
from fxpart.capture.inference.export import export_program
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.training.joint import joint_capture
from fxpart.core.graph import OpGraph, without_python
from fxpart.core.optimizer import Optimizer, with_optimizer
from fxpart.core.phases import StepOptions
from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import make_problem
from fxpart.cost.roofline import LatencyModel
from fxpart.execution.device import seeded
from fxpart.execution.real_step import (
    StepPeak,
    forward_peak_bytes,
    real_optimizer,
    step_peak_bytes,
)
from fxpart.placement.single import single

__all__ = ["Counted", "Predicted", "counted", "peak_bytes", "predicted", "predicted_step"]

_LARGE = DeviceSpec("large", 2**50, {"float32": 1e12}, 1e12)
"""A device with ample memory; its speed does not matter here."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Peaks on one device, predicted from a capture on the meta device without creating weights."""

    weight_bytes: int
    """Parameters and buffers, tied ones once."""
    graph_bytes: int
    """A forward pass of the captured graph, which drops a value after its last reader."""
    eager_bytes: int
    """A forward pass of the module, which keeps the values that its Python code refers to."""
    step_bytes: int
    """A training step with its optimizer."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The same peaks, counted over the live tensors of runs on this machine."""

    graph_bytes: int
    eager_bytes: int
    step: StepPeak


def predicted(spec: ModelSpec, optimizer: Optimizer, options: StepOptions) -> Predicted:
    """Return fxpart's predictions for the model of `spec`."""
    built = build_model(spec)
    eager = capture_graph(built.module, built.args, built.kwargs)
    return Predicted(
        eager.total_weight_bytes,
        peak_bytes(without_python(eager)),
        peak_bytes(eager),
        predicted_step(spec, optimizer, options),
    )


def predicted_step(spec: ModelSpec, optimizer: Optimizer, options: StepOptions) -> int:
    """Return the predicted peak bytes of a training step in train mode."""
    built = build_model(spec)
    step = joint_capture(built.module.train(), built.args, built.kwargs, options)
    return peak_bytes(with_optimizer(step.graph, optimizer))


def peak_bytes(graph: OpGraph) -> int:
    """Return the predicted peak bytes of `graph` on one device with ample memory."""
    problem = make_problem(graph, uniform_topology((_LARGE,), Link(1e9, 0.0)), LatencyModel())
    return evaluate(problem, single(problem)).devices[0].peak_bytes


def counted(spec: ModelSpec, optimizer: Optimizer) -> Counted:
    """Return the bytes counted in runs of the same model with random weights, on the CPU.

    The forward pass runs in eval mode; the step is the second one in train mode.
    """
    with seeded(0, torch.device("cpu")):
        built = build_model(spec, torch.device("cpu"))
        module, args, kwargs = built.module, built.args, built.kwargs
        eager = forward_peak_bytes(module, args, kwargs)
        graph = forward_peak_bytes(export_program(module, args, kwargs).module(), args, kwargs)
        module.train()
        updates = real_optimizer(optimizer.name, module.parameters(), optimizer.implementation)
        return Counted(graph, eager, step_peak_bytes(module, args, kwargs, updates))

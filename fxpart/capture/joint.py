"""A training step, loss and backward included, captured as one graph: `joint_capture`.

Memory that the step needs beyond it, such as an optimizer's state, is not in the graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from fxpart.capture.export import capture_failure, quiet
from fxpart.capture.from_export import op_graph
from fxpart.capture.joint_program import gradients_of, joint_program
from fxpart.capture.repeated_blocks import repeated_blocks
from fxpart.capture.step_graph import exported_names_of, step_graph
from fxpart.capture.unmasked_attention import unmasked_attention
from fxpart.capture.whole_slices import drop_whole_slices
from fxpart.errors import CaptureError, FxpartError
from fxpart.graph import OpGraph
from fxpart.phases import StepOptions

__all__ = [
    "JointCapture",
    "JointProgram",
    "StepOptions",
    "joint_capture",
    "joint_graph",
    "joint_programs",
]

_USUAL = StepOptions()


@dataclass(frozen=True, eq=False, slots=True)
class JointProgram:
    """A captured training step as torch runs it, before it is made into arrays."""

    program: ExportedProgram
    """Its `graph_module` takes, flat and in the order of ``graph_signature.input_specs``, the
    weights (tied ones once) and the inputs that are tensors; it returns the loss, then the
    gradients. All of it lies on the CPU."""
    gradients: Mapping[str, str]
    """Parameter, or input that requires a gradient, to the name of the value that is its gradient.
    One that the loss does not depend on is not there; tied ones are there by their first name."""
    forward: ExportedProgram
    """The module as it was exported, without its loss: what a step runs forward."""

    def arrays(self, operators: OpGraph) -> OpGraph:
        """Return `operators`, those of `program` at any sizes, told of partners and gradients."""
        return step_graph(operators, self.program, self.gradients)


@dataclass(frozen=True, eq=False, slots=True)
class JointCapture:
    """A captured training step, as torch runs it and as arrays."""

    program: ExportedProgram
    """See `JointProgram`."""
    graph: OpGraph
    gradients: Mapping[str, str]
    """See `JointProgram`."""
    forward: ExportedProgram
    """See `JointProgram`."""
    exported_names: tuple[str, ...]
    """For each operator the call node of `forward` that it is a part of; ``""`` for the loss and in
    the backward."""


def joint_graph(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: StepOptions = _USUAL,
) -> OpGraph:
    """Return the arrays alone; see `joint_capture`."""
    return joint_capture(module, args, kwargs, options).graph


def joint_capture(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: StepOptions = _USUAL,
    dynamic_shapes: Any = None,  # noqa: ANN401 - as torch.export takes it
) -> JointCapture:
    """Return forward, loss and backward of `module` for the shapes of the example inputs.

    The loss is the module's first real-valued result: that itself if it is one number (a model of
    transformers that is given ``labels`` returns its loss first), else its mean in float32.
    Gradients are taken of all parameters, and inputs, that require them. The module is captured in
    the mode that it is in: call ``train()`` first where dropout is to be in the graph. Parameters
    and inputs may be on the meta device; attention is captured as the fused call of the CPU, or,
    where it has dropout, as `options` say.

    Every operator carries the path of a module: one of the backward, that of the forward operator
    whose gradient it computes.

    Args:
        module: what is trained.
        args: example inputs by position.
        kwargs: example inputs by name.
        options: how the step is run.
        dynamic_shapes: which sizes of the inputs are symbols, as `torch.export.export` takes it;
            then `program` holds symbols, and `graph` is that at the sizes of the example.

    Raises:
        CaptureError: for a module that cannot be exported or differentiated, that takes no tensor,
            or that returns no real-valued one.
        SpecError: for checkpointing of a module that has no repeated blocks.

    """
    step = joint_programs(module, args, kwargs, options, dynamic_shapes)
    try:
        graph = step.arrays(op_graph(step.program))
    except FxpartError:
        raise
    except Exception as error:
        raise capture_failure(module, error) from error
    exported = exported_names_of(graph, step.program)
    return JointCapture(step.program, graph, step.gradients, step.forward, exported)


def joint_programs(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: StepOptions = _USUAL,
    dynamic_shapes: Any = None,  # noqa: ANN401 - as torch.export takes it
) -> JointProgram:
    """Return the step alone, without its arrays; see `joint_capture`."""
    blocks = repeated_blocks(module) if options.checkpointing == "block" else ()
    try:
        with quiet(), torch.enable_grad():
            inputs = dict(kwargs or {})
            with unmasked_attention(args, inputs):
                program = torch.export.export(
                    module, args, inputs, strict=False, dynamic_shapes=dynamic_shapes
                )
            if dynamic_shapes is not None:
                drop_whole_slices(program)
            joint = joint_program(program, _wanted_inputs(args, inputs), options, blocks)
        return JointProgram(joint, gradients_of(joint), program)
    except CaptureError as error:
        raise CaptureError(f"{type(module).__name__} cannot be trained: {error}") from error
    except FxpartError:
        raise
    except Exception as error:
        raise capture_failure(module, error) from error


def _wanted_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[bool]:
    """Return for each input, flat, whether its gradient is wanted."""
    leaves = tree_leaves((args, kwargs))
    return [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]

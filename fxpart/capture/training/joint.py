"""A training step, loss and backward included, captured as one graph: `joint_capture`.

Memory that the step needs beyond it, such as an optimizer's state, is not in the graph.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from fxpart.capture.inference.export import capture_failure, quiet, unmasked_attention
from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.symbolic.whole_slices import drop_whole_slices
from fxpart.capture.training.joint_program import gradients_of, joint_program
from fxpart.capture.training.step_graph import exported_names_of, step_graph
from fxpart.core.graph import OpGraph
from fxpart.core.phases import StepOptions
from fxpart.errors import CaptureError, FxpartError, SpecError

__all__ = [
    "JointCapture",
    "JointProgram",
    "StepOptions",
    "joint_capture",
    "joint_graph",
    "joint_programs",
    "repeated_blocks",
]


# The repeated blocks of a model, such as a transformer's layers, by their paths.

_LISTS = (nn.ModuleList, nn.Sequential)


def repeated_blocks(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the blocks that `module` repeats, in the order of its tree.

    A block is a member of a list (`ModuleList`, `Sequential`) that has another member of the same
    class. It is no single layer of torch, such as a Linear: a module with parts, or of a class of
    the model's own. Blocks do not lie in one another: the outermost are taken. A member that is
    nothing but a list of such blocks, as the stages of a ResNet are, gives way to what is in it.

    Raises:
        SpecError: when there are none.

    """
    found: list[str] = []
    waiting = [("", module)]
    while waiting:
        path, here = waiting.pop()
        inner: list[tuple[str, nn.Module]] = []
        alike = _repeated(here)
        for name, part in here.named_children():
            place = f"{path}.{name}" if path else name
            if name not in alike:
                inner.append((place, part))
            else:
                found += _unwrapped(place, part)
        waiting += reversed(inner)
    if not found:
        raise SpecError(
            f"checkpointing=block found no repeated blocks in {type(module).__name__}: no"
            " ModuleList or Sequential of it has two members of one class; set checkpointing=none"
        )
    order = {name: place for place, (name, _) in enumerate(module.named_modules())}
    return tuple(sorted((path for path in found if path in order), key=order.__getitem__))


def _repeated(module: nn.Module) -> dict[str, nn.Module]:
    """Return the members of a list that are of a class of which there are several."""
    if not isinstance(module, _LISTS):
        return {}
    parts = dict(module.named_children())
    count = Counter(type(part) for part in parts.values())
    return {name: part for name, part in parts.items() if count[type(part)] > 1 and _is_whole(part)}


def _is_whole(part: nn.Module) -> bool:
    """Tell whether `part` is more than a single layer of torch."""
    return next(part.children(), None) is not None or not type(part).__module__.startswith("torch.")


def _unwrapped(path: str, block: nn.Module) -> list[str]:
    """Return the path of `block`, or those of its members where it is nothing but their list."""
    while True:
        parts = dict(block.named_children())
        name, only = next(iter(parts.items()), ("", block))
        if isinstance(block, _LISTS) or len(parts) != 1 or not isinstance(only, _LISTS):
            return [path]
        members = dict(only.named_children())
        if len({type(member) for member in members.values()}) != 1:
            return [path]
        if not all(_is_whole(member) for member in members.values()):
            return [path]
        path = f"{path}.{name}"
        if len(members) > 1:
            return [f"{path}.{inner}" for inner in members]
        inner, block = next(iter(members.items()))
        path = f"{path}.{inner}"


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

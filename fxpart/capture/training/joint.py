"""`joint_capture`: capture forward, loss and backward of a training step as one graph.

Other memory of a step, such as optimizer states, is not in the graph.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from fxpart.capture.inference.eager_lifetimes import takes_gradients, watched_export
from fxpart.capture.inference.export import (
    by_known_values,
    capture_failure,
    check_call,
    only_graphs,
    quiet,
    unmasked_attention,
    without_transforms,
)
from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.models.user_code import user_errors
from fxpart.capture.symbolic.whole_slices import drop_whole_slices
from fxpart.capture.training.joint_labels import KEPT
from fxpart.capture.training.joint_program import gradients_of, joint_program
from fxpart.capture.training.own_checkpoints import checkpointed_calls, label_checkpoints
from fxpart.capture.training.step_graph import exported_names_of, step_graph
from fxpart.capture.training.user_functions import exported_functions
from fxpart.core.graph import OpGraph
from fxpart.core.phases import StepOptions
from fxpart.errors import CaptureError, SpecError, nearest_names

__all__ = [
    "JointCapture",
    "JointProgram",
    "StepOptions",
    "joint_capture",
    "joint_graph",
    "joint_programs",
    "repeated_blocks",
]


_LISTS = (nn.ModuleList, nn.Sequential)
_USUAL = StepOptions()


# Repeated blocks, such as the layers of a transformer.


def repeated_blocks(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the repeated blocks of `module`, in module order.

    A block is a member of a list (`ModuleList`, `Sequential`) with another member of the same
    class. It has submodules or a class that is not torch's, so a single layer such as a Linear does
    not count, and a ``forward``, unlike a `ModuleDict`. Of nested blocks, the outermost count. A
    member that only wraps a list of such blocks, like a stage of a ResNet, is replaced by them.

    Raises:
        SpecError: if there are none.

    """
    blocks: list[str] = []
    pending = [("", module)]
    while pending:
        path, parent = pending.pop()
        inner: list[tuple[str, nn.Module]] = []
        alike = _repeated(parent)
        for name, part in parent.named_children():
            inner_path = f"{path}.{name}" if path else name
            if name not in alike:
                inner.append((inner_path, part))
            else:
                blocks += _unwrapped(inner_path, part)
        pending += reversed(inner)
    if not blocks:
        raise SpecError(
            f"checkpointing found no repeated blocks in {type(module).__name__}: no"
            " ModuleList or Sequential of it has two members of one class that can be called;"
            " set checkpointing=none"
        )
    order = {name: position for position, (name, _) in enumerate(module.named_modules())}
    return tuple(sorted((path for path in blocks if path in order), key=order.__getitem__))


def _checkpointed(module: nn.Module, options: StepOptions) -> tuple[str, ...]:
    """Return the paths of the checkpointed blocks."""
    if options.checkpointing == "none":
        return ()
    blocks = repeated_blocks(module)
    for path in options.recomputed:
        if path not in blocks:
            raise SpecError(
                f"recomputed_blocks: {path} is no repeated block of {type(module).__name__};"
                f" {nearest_names(path, blocks)}"
            )
    return tuple(path for path in blocks if not options.recomputed or path in options.recomputed)


def _repeated(module: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks among the members of a list whose class occurs several times."""
    if not isinstance(module, _LISTS):
        return {}
    parts = dict(module.named_children())
    count = Counter(type(part) for part in parts.values())
    return {name: part for name, part in parts.items() if count[type(part)] > 1 and _is_block(part)}


def _is_block(part: nn.Module) -> bool:
    """Return whether `part` can be called and is more than a single layer of torch."""
    if type(part).forward is nn.Module.forward:  # of a container, such as a ModuleDict
        return False
    return next(part.children(), None) is not None or not type(part).__module__.startswith("torch.")


def _unwrapped(path: str, block: nn.Module) -> list[str]:
    """Return the path of `block`, or those of its members if it only wraps a list of them."""
    while True:
        parts = dict(block.named_children())
        name, only = next(iter(parts.items()), ("", block))
        if isinstance(block, _LISTS) or len(parts) != 1 or not isinstance(only, _LISTS):
            return [path]
        members = dict(only.named_children())
        if len({type(member) for member in members.values()}) != 1:
            return [path]
        if not all(_is_block(member) for member in members.values()):
            return [path]
        path = f"{path}.{name}"
        if len(members) > 1:
            return [f"{path}.{inner}" for inner in members]
        inner, block = next(iter(members.items()))
        path = f"{path}.{inner}"


# Captures.


@dataclass(frozen=True, eq=False, slots=True)
class JointProgram:
    """A captured training step as a torch program, without its arrays."""

    program: ExportedProgram
    """Its `graph_module` takes, flat and in the order of ``graph_signature.input_specs``, the
    weights (tied ones once) and the inputs that are tensors; it returns the loss, then the
    gradients. All tensors are on the CPU."""
    gradients: Mapping[str, str]
    """The name of the gradient of each parameter, and of each input that requires one. Tensors that
    do not affect the loss are missing; tied parameters have their first name."""
    forward: ExportedProgram
    """The exported module, without the loss."""

    def arrays(self, operators: OpGraph) -> OpGraph:
        """Return `operators`, those of `program` at some sizes, with partners and gradients."""
        return step_graph(operators, self.program, self.gradients)


@dataclass(frozen=True, eq=False, slots=True)
class JointCapture:
    """A captured training step, as a torch program and as arrays."""

    program: ExportedProgram
    """See `JointProgram`."""
    graph: OpGraph
    gradients: Mapping[str, str]
    """See `JointProgram`."""
    forward: ExportedProgram
    """See `JointProgram`."""
    exported_names: tuple[str, ...]
    """For each operator, its call node in `forward`; ``""`` for the loss and in the backward."""

    def kept_by_functions(self) -> frozenset[str]:
        """Return the operators whose results a user's Function or autograd holds.

        They outlive their last readers, even if no variable of the model holds them.
        """
        return frozenset(node.name for node in self.program.graph.nodes if KEPT in node.meta)


def joint_graph(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: StepOptions = _USUAL,
) -> OpGraph:
    """Return only the arrays of `joint_capture`."""
    return joint_capture(module, args, kwargs, options).graph


def joint_capture(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: StepOptions = _USUAL,
    dynamic_shapes: Any = None,  # noqa: ANN401 - as torch.export takes it
) -> JointCapture:
    """Return forward, loss and backward of `module` for the shapes of the example inputs.

    The loss is the module's first floating-point result: the result itself if it is a single number
    (a transformers model given ``labels`` returns its loss first), else its mean in float32.
    Gradients are computed for all parameters and inputs that require them. The module is captured
    in its current mode: call ``train()`` first to include dropout in the graph. Parameters and
    inputs may be on the meta device; attention is captured as the fused call of the CPU or, with
    dropout, by `options`.

    Every operator has a module path; in the backward, that of the forward operator whose gradient
    it computes.

    Args:
        module: the module to train.
        args: example inputs by position.
        kwargs: example inputs by name.
        options: options of the training step.
        dynamic_shapes: symbolic sizes of the inputs, as in `torch.export.export`; then `program`
            has symbols, and `graph` is evaluated at the example's sizes.

    Raises:
        CaptureError: if the module cannot be exported or differentiated, takes no tensor, or
            returns no floating-point tensor.
        SpecError: if checkpointing is set for a module without repeated blocks.

    """
    check_call(module, args)
    step = joint_programs(module, args, kwargs, options, dynamic_shapes)
    with user_errors(partial(capture_failure, module)):
        graph = step.arrays(op_graph(step.program))
    exported = exported_names_of(graph, step.program)
    return JointCapture(step.program, graph, step.gradients, step.forward, exported)


def joint_programs(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: StepOptions = _USUAL,
    dynamic_shapes: Any = None,  # noqa: ANN401 - as torch.export takes it
) -> JointProgram:
    """Return the step of `joint_capture` without its arrays."""
    blocks = _checkpointed(module, options)
    inputs = dict(kwargs or {})
    export = partial(_exported, module, args, inputs, dynamic_shapes)
    program = export() if dynamic_shapes is not None else by_known_values(module, inputs, export)
    with user_errors(partial(capture_failure, module)):
        try:
            with quiet(), only_graphs(), torch.enable_grad():
                if dynamic_shapes is not None:
                    drop_whole_slices(program)
                leaves = tree_leaves((args, inputs))
                needs_gradient = [
                    isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves
                ]
                own = label_checkpoints(program.graph_module)
                if own and (blocks or options.backward_order != "autograd"):
                    raise CaptureError(
                        "it calls torch.utils.checkpoint itself; turn that off in the model, or set"
                        " checkpointing=none backward_order=autograd"
                    )
                if own and takes_gradients(program):
                    raise CaptureError(
                        "it calls torch.utils.checkpoint and takes gradients (torch.autograd.grad)"
                        " in one forward; turn checkpointing off in the model"
                    )
                joint = joint_program(module, program, needs_gradient, options, own or blocks)
            return JointProgram(joint, gradients_of(joint), program)
        except CaptureError as error:
            raise _untrainable(module, error) from error


def _exported(
    module: nn.Module,
    args: tuple[Any, ...],
    inputs: dict[str, Any],
    dynamic_shapes: Any,  # noqa: ANN401
) -> ExportedProgram:
    """Return `module` exported with gradients, its own functions and checkpoints kept."""
    with user_errors(partial(capture_failure, module)), quiet(), only_graphs(), torch.enable_grad():
        try:
            with (
                unmasked_attention(module.forward, args, inputs),
                exported_functions(),
                checkpointed_calls(),
            ):
                return without_transforms(watched_export(module, args, inputs, dynamic_shapes))
        except CaptureError as error:
            raise _untrainable(module, error) from error


def _untrainable(module: nn.Module, error: CaptureError) -> CaptureError:
    return CaptureError(f"{type(module).__name__} cannot be trained: {error}")

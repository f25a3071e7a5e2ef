"""A training step, loss and backward included, captured as one graph: `joint_capture`.

Memory that the step needs beyond it, such as an optimizer's state, is not in the graph.
"""

from bisect import bisect_right
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils._pytree import tree_leaves

from fxpart.capture.export import capture_failure, quiet
from fxpart.capture.from_export import op_graph
from fxpart.capture.joint_trace import (
    EXPORTED,
    FORWARD,
    ORDER,
    StepTrace,
    cpu_twin,
    trace_step,
)
from fxpart.capture.storage import place_in_memory
from fxpart.errors import CaptureError, FxpartError
from fxpart.granularity import join_groups
from fxpart.graph import OpGraph

__all__ = ["JointCapture", "joint_capture", "joint_graph"]


@dataclass(frozen=True, eq=False, slots=True)
class JointCapture:
    """A captured training step, as torch runs it and as arrays."""

    program: ExportedProgram
    """Its `graph_module` takes, flat and in the order of ``graph_signature.input_specs``, the
    weights (tied ones once) and the inputs that are tensors; it returns the loss, then the
    gradients. All of it lies on the CPU."""
    graph: OpGraph
    gradients: Mapping[str, str]
    """Parameter, or input that requires a gradient, to the name of the value that is its gradient.
    One that the loss does not depend on is not there; tied ones are there by their first name."""
    forward: ExportedProgram
    """The module as it was exported, without its loss: what a step runs forward."""
    exported_names: tuple[str, ...]
    """For each operator the call node of `forward` that it is a part of; ``""`` for the loss and in
    the backward."""


def joint_graph(
    module: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> OpGraph:
    """Return the arrays alone; see `joint_capture`."""
    return joint_capture(module, args, kwargs).graph


def joint_capture(
    module: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> JointCapture:
    """Return forward, loss and backward of `module` for the shapes of the example inputs.

    The loss is the module's first real-valued result: that itself if it is one number (a model of
    transformers that is given ``labels`` returns its loss first), else its mean in float32.
    Gradients are taken of all parameters, and inputs, that require them. The module is captured in
    the mode that it is in: call ``train()`` first where dropout is to be in the graph. Parameters
    and inputs may be on the meta device; attention is captured as the fused call of the CPU, or,
    where it has dropout, as the products that it consists of.

    Every operator carries the path of a module: one of the backward, that of the forward operator
    whose gradient it computes.

    Raises:
        CaptureError: for a module that cannot be exported or differentiated, that takes no tensor,
            or that returns no real-valued one.

    """
    try:
        with quiet(), torch.enable_grad():
            inputs = dict(kwargs or {})
            program = torch.export.export(module, args, inputs, strict=False)
            joint = _joint_program(program, _wanted_inputs(args, inputs))
        return _as_arrays(joint, program)
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


@dataclass(eq=False, slots=True)
class _Inputs:
    """The tensors of a step: one for each storage that placeholders of a program share."""

    tensors: list[Tensor]
    specs: list[InputSpec]
    """Of the first placeholder of each tensor."""
    place_of: list[int | None]
    """Which tensor each placeholder is; None for a constant."""


def _joint_program(program: ExportedProgram, wanted: list[bool]) -> ExportedProgram:
    nodes = program.graph.find_nodes(op="placeholder")
    fakes = [node.meta.get("val") for node in nodes]
    mode = next((fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)), None)
    if mode is None:
        raise CaptureError("it has neither weights nor inputs that are tensors; give it some")
    with mode:
        inputs = _inputs(program, fakes, wanted)
    step = trace_step(program, inputs.tensors, inputs.place_of, mode)
    return _signed(program, step, inputs)


def _inputs(program: ExportedProgram, fakes: list[Any], wanted: list[bool]) -> _Inputs:
    """Return the tensors that the placeholders stand for, made in the ambient fake mode."""
    found, seen = _Inputs([], [], []), dict[Hashable, int]()
    by_user = iter(wanted)
    for index, (spec, fake) in enumerate(
        zip(program.graph_signature.input_specs, fakes, strict=True)
    ):
        is_input = spec.kind == InputKind.USER_INPUT
        # Placeholders of inputs come in the order of the inputs, flat.
        gradient = is_input and next(by_user)
        if not isinstance(fake, Tensor):
            found.place_of.append(None)
            continue
        key: Hashable = index
        real = program.state_dict.get(spec.target or "", program.constants.get(spec.target or ""))
        if isinstance(real, Tensor):
            # Non-strict export has a placeholder for each name of a tied weight.
            key = place_in_memory(real)
            gradient = spec.kind == InputKind.PARAMETER and real.requires_grad
        if key not in seen:
            seen[key] = len(found.tensors)
            found.tensors.append(cpu_twin(fake, requires_grad=gradient))
            found.specs.append(spec)
        found.place_of.append(seen[key])
    return found


def _signed(program: ExportedProgram, step: StepTrace, inputs: _Inputs) -> ExportedProgram:
    """Return the step as a program that knows its weights by name, and what its results are."""
    graph = step.graph_module.graph
    for node, spec in zip(graph.find_nodes(op="placeholder"), inputs.specs, strict=True):
        node.name = node.target = spec.arg.name
    step.graph_module.recompile()
    # Two parameters may have one gradient: results are not always different nodes.
    loss, *gradients = (str(result) for result in tree_leaves(graph.output_node().args[0]))
    results = [OutputSpec(OutputKind.LOSS_OUTPUT, TensorArgument(loss), None)]
    results += [
        _gradient_spec(inputs.specs[place], name)
        for place, name in zip(step.with_gradient, gradients, strict=True)
    ]
    return ExportedProgram(
        root=step.graph_module,
        graph=graph,
        graph_signature=ExportGraphSignature(inputs.specs, results),
        state_dict=program.state_dict,
        range_constraints={},
        module_call_graph=program.module_call_graph,
        constants=program.constants,
        verifiers=list(program.verifiers),
    )


def _gradient_spec(of: InputSpec, name: str) -> OutputSpec:
    if of.kind == InputKind.USER_INPUT:
        return OutputSpec(OutputKind.GRADIENT_TO_USER_INPUT, TensorArgument(name), of.arg.name)
    return OutputSpec(OutputKind.GRADIENT_TO_PARAMETER, TensorArgument(name), of.target)


def _as_arrays(program: ExportedProgram, forward: ExportedProgram) -> JointCapture:
    calls: list[fx.Node] = [n for n in program.graph.nodes if n.op == "call_function"]
    exported = tuple(node.meta.get(EXPORTED) or "" for node in calls)
    gradients = {
        str(spec.target): str(spec.arg.name)
        for spec in program.graph_signature.output_specs
        if spec.kind != OutputKind.LOSS_OUTPUT
    }
    graph = _with_gradients(_with_partners(op_graph(program), calls, exported), gradients)
    return JointCapture(
        program,
        graph,
        gradients,
        forward,
        exported,
    )


def _with_gradients(graph: OpGraph, gradients: Mapping[str, str]) -> OpGraph:
    """Return `graph` told which of its values are gradients of which of its weights.

    A gradient that is a constant of the graph, or of an input or an unused weight, is none.
    """
    value_of = {name: value for value, name in enumerate(graph.value_names)}
    weight_of = {name: weight for weight, name in enumerate(graph.weight_names)}
    pairs = [
        (value_of[value], weight_of[name])
        for name, value in gradients.items()
        if value in value_of and name in weight_of
    ]
    values, weights = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return replace(graph, gradient_values=values.copy(), gradient_weights=weights.copy())


def _with_partners(graph: OpGraph, calls: list[fx.Node], exported: tuple[str, ...]) -> OpGraph:
    """Return `graph` with the forward operator of each backward one.

    The two stay on one device, and so do the parts of one exported call.
    """
    forward_ops = [op for op, node in enumerate(calls) if node.meta.get(FORWARD) is None]
    orders = [calls[op].meta[ORDER] for op in forward_ops]
    forward_of = np.arange(graph.n_ops)
    first_part: dict[str, int] = {}
    label = np.arange(graph.n_ops)
    for op, node in enumerate(calls):
        of = node.meta.get(FORWARD)
        if of is not None and forward_ops:
            # That node may have been removed, having no user: the last one before it that was kept
            # stands in, or the first of all.
            forward_of[op] = forward_ops[max(bisect_right(orders, of) - 1, 0)]
        elif exported[op]:
            label[op] = first_part.setdefault(exported[op], op)
    group = join_groups(join_groups(graph.group, forward_of), label)
    return replace(graph, forward_of=forward_of, group=group)

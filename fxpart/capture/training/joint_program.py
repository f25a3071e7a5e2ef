"""A training step of an exported model, as a program that knows its weights by name."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
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

from fxpart.capture.calls import place_in_memory
from fxpart.capture.training.checkpointing import checkpoint_blocks
from fxpart.capture.training.joint_trace import StepTrace, cpu_twin, trace_step
from fxpart.core.phases import StepOptions
from fxpart.errors import CaptureError

__all__ = ["gradients_of", "joint_program"]


def joint_program(
    program: ExportedProgram,
    wanted: list[bool],
    options: StepOptions,
    blocks: Sequence[str] = (),
) -> ExportedProgram:
    """Return the training step of `program`; sizes that are symbols stay so.

    Args:
        program: the model, exported with gradients.
        wanted: for each input, flat, whether its gradient is.
        options: how the step is run.
        blocks: paths of modules inside which values are computed again instead of kept.

    Raises:
        CaptureError: for a model that takes no tensor or returns no real-valued one.

    """
    nodes = program.graph.find_nodes(op="placeholder")
    fakes = [node.meta.get("val") for node in nodes]
    mode = next((fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)), None)
    if mode is None:
        raise CaptureError("it has neither weights nor inputs that are tensors; give it some")
    with mode:
        inputs = _inputs(program, fakes, wanted)
    step = trace_step(program, inputs.tensors, inputs.place_of, mode, options)
    if blocks:
        checkpoint_blocks(step.graph_module.graph, blocks)
    return _signed(program, step, inputs)


def gradients_of(step: ExportedProgram) -> Mapping[str, str]:
    """Return weight, or input, to the name of the value of `step` that is its gradient."""
    return {
        str(spec.target): str(spec.arg.name)
        for spec in step.graph_signature.output_specs
        if spec.kind != OutputKind.LOSS_OUTPUT
    }


@dataclass(eq=False, slots=True)
class _Inputs:
    """The tensors of a step: one for each storage that placeholders of a program share."""

    tensors: list[Tensor]
    specs: list[InputSpec]
    """Of the first placeholder of each tensor."""
    place_of: list[int | None]
    """Which tensor each placeholder is; None for a constant."""


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
    taken = {spec.arg.name for spec in inputs.specs}
    for node in graph.nodes:
        # An input may be called as a call is: `t`, say.
        while node.op != "placeholder" and node.name in taken:
            node._rename(f"{node.name}_call")
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
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        constants=program.constants,
        verifiers=list(program.verifiers),
    )


def _gradient_spec(of: InputSpec, name: str) -> OutputSpec:
    if of.kind == InputKind.USER_INPUT:
        return OutputSpec(OutputKind.GRADIENT_TO_USER_INPUT, TensorArgument(name), of.arg.name)
    return OutputSpec(OutputKind.GRADIENT_TO_PARAMETER, TensorArgument(name), of.target)

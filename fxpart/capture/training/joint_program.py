"""`joint_program`: build the training step of an exported model, keeping weight names."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
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
from fxpart.capture.training.backward_order import delay_weight_gradients
from fxpart.capture.training.checkpointing import checkpoint_blocks
from fxpart.capture.training.gather_again import gather_again
from fxpart.capture.training.joint_trace import StepTrace, cpu_twin, trace_step
from fxpart.capture.training.user_functions import (
    functions_called,
    refuse_other_weights,
    refuse_unknown_sizes,
    traced_functions,
)
from fxpart.core.phases import StepOptions
from fxpart.errors import CaptureError

__all__ = ["gradients_of", "joint_program"]


def joint_program(
    module: nn.Module,
    program: ExportedProgram,
    needs_gradient: list[bool],
    options: StepOptions,
    blocks: Sequence[str] = (),
) -> ExportedProgram:
    """Return the training step of `program`; symbolic sizes stay symbolic.

    Args:
        module: the model; the code of its autograd Functions may read its weights.
        program: the model, exported with gradients.
        needs_gradient: for each flat input, whether its gradient is computed.
        options: options of the training step.
        blocks: paths of modules whose values are recomputed instead of kept.

    Raises:
        CaptureError: if the model takes no tensor or returns no floating-point tensor.

    """
    nodes = program.graph.find_nodes(op="placeholder")
    fakes = [node.meta.get("val") for node in nodes]
    mode = next((fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)), None)
    if mode is None:
        raise CaptureError("it has neither weights nor inputs that are tensors; give it some")
    with mode:
        inputs = _inputs(program, fakes, needs_gradient)
    functions = functions_called(program.graph_module)
    with traced_functions(module, functions, inputs.weights(program)):
        step = trace_step(
            program, inputs.tensors, inputs.tensor_of, mode, options, recomputes=bool(blocks)
        )
    refuse_other_weights(step.graph_module, functions)
    refuse_unknown_sizes(step.graph_module, functions)
    if blocks:
        checkpoint_blocks(step.graph_module.graph, blocks, how=options.checkpointing)
    gather_again(step.graph_module.graph)
    if options.backward_order == "late_weight_gradients":
        nodes = step.graph_module.graph.find_nodes(op="placeholder")
        kinds = [spec.kind for spec in inputs.specs]
        fed = [n for n, kind in zip(nodes, kinds, strict=True) if kind == InputKind.USER_INPUT]
        delay_weight_gradients(step.graph_module.graph, fed)
    return _signed(program, step, inputs)


def gradients_of(step: ExportedProgram) -> Mapping[str, str]:
    """Return the name of the gradient of each weight or input in `step`."""
    return {
        str(spec.target): str(spec.arg.name)
        for spec in step.graph_signature.output_specs
        if spec.kind != OutputKind.LOSS_OUTPUT
    }


@dataclass(eq=False, slots=True)
class _Inputs:
    """The tensors of a step; placeholders of one weight share a tensor."""

    tensors: list[Tensor]
    specs: list[InputSpec]
    """Specification of the first placeholder of each tensor."""
    tensor_of: list[int | None]
    """The tensor of each placeholder, by index; None for a constant."""

    def weights(self, program: ExportedProgram) -> dict[str, Tensor]:
        """Return the tensor of each parameter and buffer of the module, by all its names."""
        kinds = (InputKind.PARAMETER, InputKind.BUFFER)
        return {
            str(spec.target): self.tensors[index]
            for spec, index in zip(program.graph_signature.input_specs, self.tensor_of, strict=True)
            if spec.kind in kinds and index is not None
        }


def _inputs(program: ExportedProgram, fakes: list[Any], needs_gradient: list[bool]) -> _Inputs:
    """Return the tensors of the placeholders, created in the ambient fake mode."""
    inputs, index_of = _Inputs([], [], []), dict[Hashable, int]()
    by_user = iter(needs_gradient)
    for index, (spec, fake) in enumerate(
        zip(program.graph_signature.input_specs, fakes, strict=True)
    ):
        is_input = spec.kind == InputKind.USER_INPUT
        # Placeholders of inputs are in the order of the flat inputs.
        gradient = is_input and next(by_user)
        if not isinstance(fake, Tensor):
            inputs.tensor_of.append(None)
            continue
        key: Hashable = index
        real = program.state_dict.get(spec.target or "", program.constants.get(spec.target or ""))
        if isinstance(real, Tensor):
            # Non-strict export creates one placeholder per name of a tied weight.
            key = place_in_memory(real)
            gradient = spec.kind == InputKind.PARAMETER and real.requires_grad
        if key not in index_of:
            index_of[key] = len(inputs.tensors)
            inputs.tensors.append(cpu_twin(fake, requires_grad=gradient))
            inputs.specs.append(spec)
        inputs.tensor_of.append(index_of[key])
    return inputs


def _signed(program: ExportedProgram, step: StepTrace, inputs: _Inputs) -> ExportedProgram:
    """Return the step as a program with the names of its weights and the kinds of its results."""
    graph = step.graph_module.graph
    input_names = {spec.arg.name for spec in inputs.specs}
    for node in graph.nodes:
        # An input may have the name of a call, such as `t`.
        while node.op != "placeholder" and node.name in input_names:
            node._rename(f"{node.name}_call")
    for node, spec in zip(graph.find_nodes(op="placeholder"), inputs.specs, strict=True):
        node.name = node.target = spec.arg.name
    step.graph_module.recompile()
    # Two parameters may share one gradient, so results are not always distinct nodes.
    loss, *gradients = (str(result) for result in tree_leaves(graph.output_node().args[0]))
    results = [OutputSpec(OutputKind.LOSS_OUTPUT, TensorArgument(loss), None)]
    results += [
        _gradient_spec(inputs.specs[index], name)
        for index, name in zip(step.with_gradient, gradients, strict=True)
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


def _gradient_spec(spec: InputSpec, name: str) -> OutputSpec:
    if spec.kind == InputKind.USER_INPUT:
        return OutputSpec(OutputKind.GRADIENT_TO_USER_INPUT, TensorArgument(name), spec.arg.name)
    return OutputSpec(OutputKind.GRADIENT_TO_PARAMETER, TensorArgument(name), spec.target)

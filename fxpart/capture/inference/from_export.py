"""`op_graph`: convert an exported program into an `OpGraph`, with one operator per call node.

A region run under `torch.no_grad` or autocast is a call of its own graph if the mode differs from
the surrounding one. It becomes one operator, with the total cost of its calls.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxpart.capture.builder import GraphBuilder
from fxpart.capture.call_costs import CallCounter, CallCounts, moved_bytes
from fxpart.capture.calls import (
    REGIONS,
    body_of,
    keep_all_terms,
    storage_key,
    written_operands,
)
from fxpart.capture.inference.eager_lifetimes import HELD, positions_held, values_held
from fxpart.capture.sizes import Sizes, example_sizes
from fxpart.core.graph import OpGraph
from fxpart.core.operator_kinds import is_shrunk_loss
from fxpart.core.temporaries import with_temporaries
from fxpart.errors import CaptureError

__all__ = ["compute_dtype", "op_graph", "temporary_bytes"]


def op_graph(
    program: torch.export.ExportedProgram,
    sizes: Sizes | None = None,
    counter: CallCounter | None = None,
) -> OpGraph:
    """Return the `OpGraph` of an exported program, with one operator per call node.

    Calls that only compute symbolic sizes are left out, as a capture without symbols lacks them.

    Args:
        program: the exported program.
        sizes: numbers for its symbols; by default those of its example inputs.
        counter: counts calls and caches the counts; by default a new one.

    Raises:
        CaptureError: if there is control flow, or sizes are data-dependent.

    """
    placeholders = program.graph.find_nodes(op="placeholder")
    example = example_sizes(placeholders)
    reading = _Reading(sizes or example, example, counter or CallCounter())
    bodies = (m for m in program.graph_module.modules() if isinstance(m, fx.GraphModule))
    for node in (node for body in bodies for node in body.graph.nodes):
        if node.op == "call_function" and is_shrunk_loss(str(node.target)):
            keep_all_terms(reading.inputs(node), reading.sizes.of(node))
    for node in program.graph.nodes:
        if node.op == "placeholder":
            _add_placeholder(reading, program, node)
        elif node.op == "get_attr" and all(user.target in REGIONS for user in node.users):
            continue
        elif node.op == "call_function":
            if not reading.sizes.is_size(node):
                _add_call(reading, node)
        elif node.op == "output":
            reading.add_outputs(node)
        else:
            raise CaptureError(
                f"the model holds control flow that cannot be placed: {node.name} is a branch of"
                " torch.cond or a loop; export a model without it"
            )
    graph = reading.builder.finish()
    nodes = {node.name: node for node in program.graph.nodes if node.op == "call_function"}
    graph = replace(graph, value_held=values_held(graph, nodes))
    makers = np.array(list(reading.temporary_bytes), dtype=np.int64)
    sizes_bytes = np.array(list(reading.temporary_bytes.values()), dtype=np.int64)
    return with_temporaries(graph, makers, sizes_bytes)[0]


@dataclass(eq=False, slots=True)
class _Reading:
    """The graph of a program while it is being read."""

    sizes: Sizes
    example: Sizes
    """Those of the example inputs, which decide what operators have temporaries at any size."""
    counter: CallCounter
    builder: GraphBuilder = field(default_factory=GraphBuilder)
    weights: dict[fx.Node, int] = field(default_factory=dict)
    values: dict[fx.Node, list[int | None]] = field(default_factory=dict)
    temporary_bytes: dict[int, int] = field(default_factory=dict)
    """By operator."""

    def inputs(self, node: fx.Node) -> list[torch.Tensor]:
        """Return the tensors among the operands of a call."""
        operands = [self.sizes.of(operand) for operand in node.all_input_nodes]
        return [value for value in operands if torch.is_tensor(value)]

    def add_outputs(self, node: fx.Node) -> None:
        """Add the outputs of the program."""
        for result in node.all_input_nodes:
            self.builder.outputs.update(v for v in self.values.get(result, ()) if v is not None)


def _add_placeholder(
    reading: _Reading, program: torch.export.ExportedProgram, node: fx.Node
) -> None:
    """Add a parameter, buffer or constant as a weight, anything else as an input."""
    signature, value = program.graph_signature, reading.sizes.of(node)
    parameter = signature.inputs_to_parameters.get(node.name)
    name = (
        parameter
        or signature.inputs_to_buffers.get(node.name)
        or signature.inputs_to_lifted_tensor_constants.get(node.name)
    )
    if name is None:
        reading.values[node] = [reading.builder.add_value(node.name, -1, value)]
        return
    if name in signature.inputs_to_lifted_tensor_constants.values() and not node.users:
        return  # no tensor of the model
    tensor = program.state_dict.get(name, program.constants.get(name))
    if isinstance(tensor, torch.Tensor) and isinstance(value, torch.Tensor):
        reading.weights[node] = reading.builder.add_weight(
            name, tensor, value, is_buffer=parameter is None
        )


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next((entry[0] for entry in reversed(stack.values())), "")
    return str(path).removeprefix("L['self'].").removeprefix("L['self']")


def compute_dtype(outputs: list[Any], inputs: list[torch.Tensor]) -> str:
    """Return an operator's compute dtype: that of its first floating-point tensor."""
    tensors = [t for t in [*outputs, *inputs] if isinstance(t, torch.Tensor)]
    floating = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    chosen = (floating or tensors or [torch.empty((), device="meta")])[0]
    return str(chosen.dtype).removeprefix("torch.")


def _add_call(reading: _Reading, node: fx.Node) -> None:
    """Add one call node with its reads, results and costs."""
    builder, values = reading.builder, reading.values
    op, is_item = len(builder.names), getattr(node.target, "__name__", "") == "getitem"
    inputs = reading.inputs(node)
    source = node.args[0] if is_item else None
    if isinstance(source, fx.Node):
        reads = [values[source][node.args[1]]]  # type: ignore[index]
    else:
        reads = [v for i in node.all_input_nodes for v in values.get(i, ())]
    uses = [reading.weights[i] for i in node.all_input_nodes if i in reading.weights]
    result = reading.sizes.of(_passed_on(node))
    outputs = list(result) if isinstance(result, list | tuple) else [result]
    builder.names.append(node.name)
    builder.modules.append(_module_path(node))
    builder.targets.append(str(node.target) if not is_item else "getitem")
    builder.dtypes.append(compute_dtype(outputs, inputs))
    builder.reads.append(list(dict.fromkeys(v for v in reads if v is not None)))
    builder.uses.append(list(dict.fromkeys(uses)))
    mutated = _mutated(node, reading.sizes)
    for tensor in mutated:
        builder.mutate(op, tensor)
    single = len(outputs) == 1
    # Results may be missing, but items are addressed by index.
    values[node] = [
        None
        if out is None
        else builder.add_value(node.name if single else f"{node.name}.{i}", op, out)
        for i, out in enumerate(outputs)
    ]
    if _passed_on(node) is not node:
        # A view of the result is a view of the operand.
        builder.alias(values[node], reading.sizes.of(node))
    produced = [(out, v) for out, v in zip(outputs, values[node], strict=True) if v is not None]
    results = [out for out, v in produced if torch.is_tensor(out) and builder.alloc_bytes[v] > 0]
    _keep_together(builder, op, is_item, bool(mutated or produced))
    cost = _costs(reading, node, inputs, results, mutated)
    builder.flops.append(cost.flops)
    builder.moved.append(cost.moved_bytes)
    usual = cost.temporary_bytes
    if reading.sizes is not reading.example:
        usual = temporary_bytes(node, reading.example, reading.counter)
    if usual > 0:
        reading.temporary_bytes[op] = max(0, cost.temporary_bytes)
    if cost.flops and "attention" in builder.targets[op] and inputs and not cost.by_definition:
        builder.attention.append((op, int(inputs[0].shape[-1]), int(_is_causal(node))))


def _is_causal(node: fx.Node) -> bool:
    """Return whether an attention call is flagged as causal."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return arguments.get("is_causal") is True


def _passed_on(node: fx.Node) -> fx.Node:
    """Return the operand that a call returns unchanged, or `node` if it creates a result.

    Dropout that drops nothing returns its operand, although it appears as a copy in an export.
    """
    if node.target is not torch.ops.aten.dropout.default:
        return node
    operand, share, is_training = node.args
    drops = is_training and share
    return operand if isinstance(operand, fx.Node) and not drops else node


def _keep_together(builder: GraphBuilder, op: int, is_item: bool, has_effect: bool) -> None:
    """Tie an item to its tuple, and a check without a result to its operand."""
    producers = [builder.producers[v] for v in builder.reads[op]]
    if is_item or not has_effect:
        builder.together.extend((p, op) for p in producers[:1] if p >= 0)
    if not has_effect and not any(p >= 0 for p in producers) and op > 0:
        builder.together.append((op - 1, op))


def _mutated(node: fx.Node, sizes: Sizes) -> list[torch.Tensor]:
    """Return the tensors written by a call."""
    written = [sizes.of(operand) for operand in written_operands(node)]
    return [tensor for tensor in written if isinstance(tensor, torch.Tensor)]


@dataclass(frozen=True, slots=True)
class _Costs:
    """What a call computes, moves and allocates for itself."""

    flops: int
    moved_bytes: int
    temporary_bytes: int
    by_definition: bool = False
    """Whether it is attention that no fused kernel takes."""


def _costs(
    reading: _Reading,
    node: fx.Node,
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    mutated: list[torch.Tensor],
) -> _Costs:
    if node.target in REGIONS:
        return _region_costs(reading, node)
    bare = getattr(getattr(node.target, "_schema", None), "name", "").rpartition("::")[2]
    every_expert = reading.sizes.are_symbolic
    moved = moved_bytes(bare, inputs, outputs, mutated, every_expert=every_expert)
    counts = _counts(reading, node)
    if counts.moved_bytes is not None:
        return _Costs(counts.flops, counts.moved_bytes, counts.temporary_bytes, True)
    return _Costs(counts.flops, moved, counts.temporary_bytes)


def temporary_bytes(node: fx.Node, sizes: Sizes, counter: CallCounter) -> int:
    """Return the peak of what a call allocates and frees again, at some sizes."""
    return _costs(_Reading(sizes, sizes, counter), node, [], [], []).temporary_bytes


def _region_costs(reading: _Reading, node: fx.Node) -> _Costs:
    """Return the total cost of the calls inside the region that `node` calls.

    Its temporaries are those at the call where they peak in the example: as a maximum over calls
    they would be no polynomial in the sizes.
    """
    flops, moved, temporary = _region_totals(reading, node)
    usual = temporary
    if reading.sizes is not reading.example:
        at_example = _Reading(reading.example, reading.example, reading.counter)
        _, _, usual = _region_totals(at_example, node)
    peak = max(range(len(usual)), key=usual.__getitem__, default=-1)
    return _Costs(flops, moved, temporary[peak] if usual else 0)


def _region_totals(reading: _Reading, node: fx.Node) -> tuple[int, int, list[int]]:
    """Return the FLOPs and moved bytes of a region, and what is live at each of its calls.

    These are the results of its calls, each until its last reader or until Python releases it,
    beside those that the region returns.
    """
    body = body_of(next(i for i in node.all_input_nodes if i.op == "get_attr"))
    calls = [call for call in body.graph.nodes if call.op == "call_function"]
    calls = [call for call in calls if not reading.sizes.is_size(call)]
    last_call = _last_calls(reading, calls)
    (end,) = body.graph.find_nodes(op="output")
    returned = {storage_key(tensor) for tensor in reading.inputs(end)}
    live: dict[int, int] = {}
    flops = moved = 0
    totals: list[int] = []
    for position, call in enumerate(calls):
        operands, results = reading.inputs(call), _tensors(reading.sizes.of(call))
        known = {storage_key(tensor) for tensor in operands}
        fresh = {storage_key(t): t for t in results if storage_key(t) not in known}
        cost = _costs(reading, call, operands, list(fresh.values()), _mutated(call, reading.sizes))
        flops, moved = flops + cost.flops, moved + cost.moved_bytes
        live |= {key: int(t.untyped_storage().nbytes()) for key, t in fresh.items()}
        totals.append(sum(live.values()) + cost.temporary_bytes)
        live = {k: size for k, size in live.items() if k in returned or last_call[k] > position}
    kept = sum(live.values())
    return flops, moved, [total - kept for total in totals]


def _last_calls(reading: _Reading, calls: list[fx.Node]) -> dict[int, int]:
    """Return the position of the last of `calls` that reads each storage, or that Python holds."""
    last: dict[int, int] = {}
    held_until = positions_held(calls)
    for position, call in enumerate(calls):
        results = _tensors(reading.sizes.of(call))
        releases = call.meta.get(HELD)
        held = max(position, held_until(releases) if releases else position)
        for tensor in reading.inputs(call):
            last[storage_key(tensor)] = max(last.get(storage_key(tensor), 0), position)
        for tensor in results:
            last[storage_key(tensor)] = max(last.get(storage_key(tensor), 0), held)
    return last


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _counts(reading: _Reading, node: fx.Node) -> CallCounts:
    def value(argument: Any) -> Any:  # noqa: ANN401 - as torch types the leaves of a call
        return reading.sizes.of(argument) if isinstance(argument, fx.Node) else argument

    if not callable(node.target):
        raise CaptureError(f"call node {node.name} has no function to call: {node.target}")
    args = fx.node.map_aggregate(node.args, value)
    kwargs = fx.node.map_aggregate(node.kwargs, value)
    return reading.counter.count(node.target, args, kwargs)

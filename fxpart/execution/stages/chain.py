"""`chain_stages`: turn a split module into stages that each receive tensors only from the previous.

A pipeline engine runs each stage in a process and sends tensors from one process to the next. So a
stage takes flat tensors, forwards values that later stages need, and returns a tuple of tensors.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from fxpart.capture.calls import place_in_memory
from fxpart.errors import SpecError, one_line
from fxpart.execution.split.graph_module import DeferredGraphModule
from fxpart.execution.stages.flat_graph import FlatGraph, copied, flatten
from fxpart.execution.stages.shared_writes import check_writes, crossings
from fxpart.execution.stages.values import find_scalars, move_items_to_their_tuple, unpack_tuples

__all__ = [
    "Chain",
    "StageModule",
    "TiedName",
    "chain_stages",
    "tied_parameters",
]


TiedName = tuple[int, str]
"""A stage and the name of a parameter in it."""


@dataclass(frozen=True, eq=False, slots=True)
class StageModule:
    """A stage: flat tensors in, a tuple of tensors out, even for a single result."""

    index: int
    """Number of the stage, from 0."""
    module: fx.GraphModule
    """Takes the tensors of `inputs` by position. Its parameters are those of the split module."""
    inputs: tuple[str, ...]
    """Names of the nodes that produce its inputs; for stage 0, the model inputs used by any
    stage."""
    outputs: tuple[str, ...]
    """Its outputs, including forwarded values; for the last stage, the tensors of the model's
    result, each once, in order of appearance."""


@dataclass(frozen=True, eq=False, slots=True)
class Chain:
    """All stages, with the conversions into the first and out of the last."""

    stages: tuple[StageModule, ...]
    _enter: fx.GraphModule = field(repr=False)
    _leave: fx.GraphModule = field(repr=False)
    _result_spec: pytree.TreeSpec | None = field(repr=False)
    _fixed: Mapping[str, Any] = field(repr=False)

    def flat_inputs(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, ...]:
        """Return the inputs of stage 0 for a call of the model with `args` and `kwargs`.

        Runs the checks that an exported module makes of its inputs.

        Raises:
            SpecError: if the model does not take these inputs, an input used by a stage is not a
                tensor, or a value fixed when the stages were cut has changed.

        """
        try:
            tensors, values = self._enter(*args, **dict(kwargs or {}))
        # The model's input checks may raise anything.
        except Exception as error:
            raise SpecError(
                f"the stages were cut for other inputs than these: {one_line(error)}; give inputs"
                " as in the call that was captured"
            ) from error
        for (name, fixed), value in zip(self._fixed.items(), values, strict=True):
            if not _is_same(value, fixed):
                raise SpecError(
                    f"input {name}={_shown(value)} was fixed to {fixed!r} when the stages were cut;"
                    " leave it out, or cut a model with another default"
                )
        for name, tensor in zip(self.stages[0].inputs, tensors, strict=True):
            if not isinstance(tensor, Tensor):
                raise SpecError(
                    f"input {name} is {type(tensor).__name__}, and stages take tensors only; pass"
                    " a tensor, or export the model with this value"
                )
        return tuple(tensors)

    def results(self, flat: Sequence[Tensor]) -> Any:  # noqa: ANN401 - as the model returns
        """Return the results of the model, from the outputs of the last stage.

        Raises:
            SpecError: if the last stage has another number of outputs.

        """
        output_names = self.stages[-1].outputs
        if len(flat) != len(output_names):
            raise SpecError(
                f"{len(flat)} tensors are no result of the last stage, which returns"
                f" {len(output_names)} ({', '.join(output_names)}); give what it returned"
            )
        result = self._leave(*flat)
        if self._result_spec is None:
            return result
        return pytree.tree_unflatten(list(result), self._result_spec)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the model
        """Run all stages in this process, one after the other."""
        values = self.flat_inputs(args, kwargs)
        for stage in self.stages:
            values = stage.module(*values)
        return self.results(values)


def chain_stages(split: fx.GraphModule) -> Chain:
    """Return the stages of `split` as a chain, in the order of their numbers.

    `split` has children ``submod_0``, ``submod_1``, ... that only read from earlier ones, as
    returned by `split_module`, `split_by_assignment` and `generate_pipeline_partition`. It is not
    changed.

    Values for a later stage are forwarded by the stages in between. Numbers, shapes and dtypes used
    by another stage are recomputed there, from forwarded tensors. A tuple is passed item by item. A
    default of the model that is not a tensor is fixed. Inputs that no stage uses are left out.

    Parameters and buffers are the same objects. Stages may run in separate processes, which share
    no memory: in-place writes that would then be lost are refused, as far as they are detected.

    Raises:
        SpecError: if `split` has no such children, a value other than a tensor would be passed, or
            a stage writes into memory of another.
        CycleError: if a stage reads from a later one.

    """
    flat = flatten(split)
    fixed = _fix_defaults(flat)
    _return_weights_from_the_last_stage(flat)
    move_items_to_their_tuple(flat.graph, flat.stage_of)
    unpack_tuples(flat)
    passed = crossings(flat, find_scalars(flat.graph))
    check_writes(flat, passed)
    names = [tuple(node.name for node in values) for values in passed.boundaries]
    stages = []
    for index in range(flat.n_stages):
        inputs, outputs = passed.boundaries[index : index + 2]
        module = _stage_module(flat, passed.nodes[index + 1], inputs, outputs)
        # The training mode of the split module; each leaf module keeps its own.
        module.training = split.training
        stages.append(StageModule(index, module, names[index], names[index + 1]))
    codegen = split.graph._codegen
    return Chain(
        tuple(stages),
        _entry_module(flat, split, passed.nodes[0], passed.boundaries[0], fixed),
        _result_module(flat, passed.nodes[-1], passed.boundaries[-1]),
        codegen.pytree_info.out_spec if isinstance(codegen, _PyTreeCodeGen) else None,
        {node.name: node.args[0] for node in fixed},
    )


def tied_parameters(chain: Chain) -> tuple[tuple[TiedName, ...], ...]:
    """Return groups of names of one parameter, within a stage or across stages."""
    names: dict[tuple[object, ...], list[TiedName]] = {}
    for stage in chain.stages:
        for name, parameter in stage.module.named_parameters(remove_duplicate=False):
            names.setdefault(place_in_memory(parameter), []).append((stage.index, name))
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def _is_same(value: object, fixed: object) -> bool:
    """Return whether an argument equals the fixed default; a tensor never does."""
    if value is fixed:
        return True
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
        return False
    try:
        return bool(value == fixed)
    except ValueError:  # arrays compare elementwise
        return False


def _shown(value: object) -> str:
    """Return an argument on one line, tensors and arrays by type only."""
    text = repr(value)
    return f"<{type(value).__name__}>" if "\n" in text or "tensor(" in text else text


def _fix_defaults(flat: FlatGraph) -> list[fx.Node]:
    """Replace inputs by their non-tensor defaults, and return these inputs."""
    fixed = []
    for node in flat.graph.find_nodes(op="placeholder"):
        if not node.args or node.args[0] is None or isinstance(node.args[0], Tensor):
            continue
        default = node.args[0]
        fixed.append(node)
        for user in list(node.users):
            user.args = _replaced(user.args, node, default)
            user.kwargs = _replaced(user.kwargs, node, default)
    return fixed


def _return_weights_from_the_last_stage(flat: FlatGraph) -> None:
    """Make the last stage return the weights that are part of the result."""
    for weight in [n for n in flat.output.all_input_nodes if n.op == "get_attr"]:
        with flat.graph.inserting_before(flat.output):
            copy = flat.graph.node_copy(weight)
        flat.stage_of[copy] = flat.n_stages - 1
        flat.output.args = _replaced(flat.output.args, weight, copy)


def _replaced(arguments: Any, node: fx.Node, value: Any) -> Any:  # noqa: ANN401 - fx arguments
    return fx.map_arg(arguments, lambda n: value if n is node else n)


# Modules built from nodes of the flat graph.


def _stage_module(
    flat: FlatGraph,
    nodes: Iterable[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
) -> fx.GraphModule:
    """Return a module that takes `inputs` by position, computes `nodes` and returns `outputs`."""
    graph, env = _copied(inputs, nodes)
    graph.output(tuple(env[node] for node in outputs))
    return DeferredGraphModule(_holder(flat.attributes, graph), graph, "Stage")


def _result_module(
    flat: FlatGraph, nodes: Iterable[fx.Node], inputs: Sequence[fx.Node]
) -> fx.GraphModule:
    """Return a module that assembles the result of the flat graph from `inputs`."""
    graph, _ = _copied(inputs, nodes)
    return fx.GraphModule(_holder(flat.attributes, graph), graph, "Result")


def _entry_module(
    flat: FlatGraph,
    split: fx.GraphModule,
    nodes: Iterable[fx.Node],
    outputs: Sequence[fx.Node],
    fixed: Sequence[fx.Node],
) -> fx.GraphModule:
    """Return a module with the signature of `split` that returns `outputs` and `fixed` inputs."""
    graph, env = _copied((), nodes)
    for guard in flat.guards:
        copied(graph, guard, env)
    graph.output((tuple(env[n] for n in outputs), tuple(env[n] for n in fixed)))
    codegen = split.graph._codegen
    if isinstance(codegen, _PyTreeCodeGen):
        info = codegen.pytree_info
        graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(info.orig_args, info.in_spec, None)))
    return fx.GraphModule(_holder(flat.attributes, graph), graph, "Entry")


def _copied(
    inputs: Iterable[fx.Node], nodes: Iterable[fx.Node]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return a graph with `inputs` as placeholders and copies of `nodes`, and the copy of each."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta.update(node.meta)
    for node in nodes:
        env[node] = copied(graph, node, env)
    return graph, env


def _holder(attributes: Mapping[str, Any], graph: fx.Graph) -> nn.Module:
    """Return a module with the attributes named by nodes of `graph`, under the same paths."""
    root = nn.Module()
    paths = {str(n.target) for n in graph.nodes if n.op in {"get_attr", "call_module"}}
    # Outer modules first, since they may already own weights that are also named.
    for path in sorted(paths, key=lambda path: (path.count("."), path)):
        *prefix, name = path.split(".")
        parent = root
        for part in prefix:
            if not hasattr(parent, part):
                setattr(parent, part, nn.Module())
            parent = getattr(parent, part)
        value = attributes[path]
        if getattr(parent, name, None) is value:
            continue
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            parent.register_buffer(name, value)
        else:
            setattr(parent, name, value)
    return root

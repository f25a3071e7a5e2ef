"""`analyze_batch_dims`: an answer for every node of a whole graph, by the rules of its operators.

The question is what ``N`` processes compute that run the graph each on its even part of the batch,
with the same weights, and without talking to each other except where the answers say so. Unlike
`BatchDimAnalyzer`, whose contract it extends:

- A reduction over the batch is partial, whatever else it reduces. So is a product that sums over
  the batch: gradients of weights are partial.
- What a node is, is said by its operator's rule; sizes are compared only where there is none. With
  the batch a symbol no size can be the batch's by chance.
- A mean over the batch is partial with scale 1, an average of the parts, and the gradients of a
  mean loss are larger on each process by the number of processes, see `Layout.scale`.
- ``ones_like`` of a partial loss is replicated: it is made of the shape alone.
- A partial value that is read by an operator that is not linear in it must be all-reduced first;
  from then on it is replicated. Linear operators (sums, products with replicated values, views,
  casts) hand it on partial.
- What each process computes differently is marked with the reason: positions within the batch,
  random numbers, statistics of a training batch norm, an order along the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_leaves

from fxpart.capture.batch_dim.call import Call, call_of
from fxpart.capture.batch_dim.extent import extents
from fxpart.capture.batch_dim.layout import Batch, BatchDimError, Layout
from fxpart.capture.batch_dim.rules import rule_of
from fxpart.capture.batch_dim.views import VIEWS
from fxpart.capture.calls import REGIONS, body_of
from fxpart.core.graph import IntArray
from fxpart.errors import nearest_names

__all__ = [
    "BatchDimReport",
    "NodeBatchDim",
    "analyze_batch_dims",
    "input_batch_dims",
    "value_batch_dims",
]


# `BatchDimReport`: the answers for every node of a graph.


@dataclass(frozen=True, eq=False, slots=True)
class NodeBatchDim:
    """The answer for one node."""

    name: str
    target: str
    """What the node calls; ``""`` for an input."""
    layouts: tuple[Layout, ...]
    """One for a tensor, one for each item of a tuple; what is no tensor counts as replicated."""
    is_tuple: bool
    all_reduced: tuple[str, ...] = ()
    """Partial values that must be all-reduced before the node runs, and are replicated from then
    on. Each is named by its first reader only."""
    by_size: bool = False
    """Whether the answer rests on an equality of sizes, no rule being known."""

    @property
    def dims(self) -> tuple[int, ...]:
        """For each item a dimension, -1 (replicated) or -2 (partial)."""
        return tuple(layout.dim for layout in self.layouts)


@dataclass(frozen=True, eq=False, slots=True)
class BatchDimReport:
    """The answers for all inputs and calls of a graph, in the order of the graph."""

    nodes: tuple[NodeBatchDim, ...]
    outputs: tuple[str, ...]
    """Names of the nodes that the graph returns, in order."""

    def of(self, name: str) -> NodeBatchDim:
        """Return the answer for the node of that name.

        Raises:
            BatchDimError: when there is none.

        """
        found = next((node for node in self.nodes if node.name == name), None)
        if found is None:
            near = nearest_names(name, (node.name for node in self.nodes))
            raise BatchDimError(f"the graph has no node {name}; {near}")
        return found


def value_batch_dims(report: BatchDimReport, value_names: Sequence[str]) -> IntArray:
    """Return the answer for each value of an `OpGraph`, int64, as long as `value_names`.

    Args:
        report: of the graph that the values were captured from.
        value_names: ``name`` for what a node makes, ``name.i`` for item i of a tuple.

    Raises:
        BatchDimError: for a name that the graph does not have.

    """
    dims: dict[str, int] = {}
    for node in report.nodes:
        dims[node.name] = node.dims[0]
        dims.update((f"{node.name}.{i}", dim) for i, dim in enumerate(node.dims))
    return np.array([_dim(dims, name) for name in value_names], dtype=np.int64)


def _dim(dims: Mapping[str, int], name: str) -> int:
    if name not in dims:
        raise BatchDimError(
            f"the analyzed graph has no value {name}; {nearest_names(name, dims)}; analyze the"
            " program that the OpGraph was made from"
        )
    return dims[name]


State = dict[fx.Node, list[Layout]]
_KEEP_EXTREMES = frozenset({"getitem", "alias", "clone", "contiguous", "detach"})


def input_batch_dims(program: ExportedProgram) -> dict[str, int]:
    """Return the batch dimension of each tensor that the user gives: 0, where its size fits.

    The first input's first dimension says the batch size; inputs with another size there, or
    without dimensions, are taken to be the same for all examples. A symbolic size that holds the
    batch's symbol, such as ``3*batch``, fits.
    """
    names = {
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind == InputKind.USER_INPUT
    }
    found: dict[str, int] = {}
    batch: Batch | None = None
    for node in program.graph.find_nodes(op="placeholder"):
        made = node.meta.get("val")
        if node.name not in names or not isinstance(made, torch.Tensor) or made.dim() == 0:
            continue
        size = extents(made.shape)[0]
        batch = Batch([size]) if batch is None else batch
        if batch.is_in(size):
            found[node.name] = 0
    return found


def analyze_batch_dims(
    program: ExportedProgram | fx.GraphModule | fx.Graph,
    batch_dims: Mapping[str, int] | None = None,
) -> BatchDimReport:
    """Return for every node of the graph which dimension of it the batch is.

    Args:
        program: an exported program, or an ATen graph whose nodes have ``meta["val"]``; captured
            with sizes of the whole batch or of any part, or with symbols. With numbers, choose a
            batch size that no other size of the model equals; a number that the model computed of
            its sizes is then a constant like any other.
        batch_dims: the batch dimension of each placeholder that has one, by name; the others are
            replicated. By default `input_batch_dims` of an exported program.

    Raises:
        BatchDimError: for a placeholder that there is not or that has no such dimension, for a
            graph without ``meta["val"]``, and when no placeholder has a batch dimension.

    """
    graph = program if isinstance(program, fx.Graph) else program.graph
    if batch_dims is None:
        if not isinstance(program, ExportedProgram):
            raise BatchDimError(
                "which inputs have a batch dimension is not known of a graph alone; give"
                " batch_dims={placeholder: dimension}"
            )
        batch_dims = input_batch_dims(program)
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    batch = _batch(inputs, batch_dims)
    state: State = {
        node: [Layout(batch_dims[name])] if name in batch_dims else _replicated(node)
        for name, node in inputs.items()
    }
    answers = _walk(graph, batch, state)
    results = tree_leaves(graph.output_node().args)
    return BatchDimReport(
        tuple(answers), tuple(result.name for result in results if isinstance(result, fx.Node))
    )


def _batch(inputs: Mapping[str, fx.Node], batch_dims: Mapping[str, int]) -> Batch:
    """Return the sizes of the batch, having checked that the dimensions are there."""
    if not batch_dims:
        raise BatchDimError(
            "no input has a batch dimension, so that nothing can be split; name one in batch_dims:"
            f" {nearest_names('', inputs)}"
        )
    sizes = []
    for name, dim in batch_dims.items():
        if name not in inputs:
            raise BatchDimError(f"the graph has no input {name}; {nearest_names(name, inputs)}")
        made = inputs[name].meta.get("val")
        if not isinstance(made, torch.Tensor) or not 0 <= dim < made.dim():
            has = f"{made.dim()} dimensions" if isinstance(made, torch.Tensor) else "no tensor"
            raise BatchDimError(
                f"input {name} has {has}, its dimension {dim} was named as the batch; choose one"
                " from 0 on that it has"
            )
        sizes.append(extents(made.shape)[dim])
    return Batch(sizes)


def _replicated(node: fx.Node) -> list[Layout]:
    made = node.meta.get("val")
    return [Layout() for _ in made] if isinstance(made, list | tuple) and made else [Layout()]


def _walk(graph: fx.Graph, batch: Batch, state: State) -> list[NodeBatchDim]:
    answers = []
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op == "call_function":
            answers.append(_answered(node, batch, state))
            continue
        state.setdefault(node, _replicated(node))
        answers.append(NodeBatchDim(node.name, "", tuple(state[node]), is_tuple=False))
    return answers


def _answered(node: fx.Node, batch: Batch, state: State) -> NodeBatchDim:
    is_tuple = isinstance(node.meta.get("val"), list | tuple)
    if node.target in REGIONS:
        state[node] = _region(node, batch, state)
        return NodeBatchDim(node.name, str(node.target), tuple(state[node]), is_tuple)
    if "val" not in node.meta and node.users:
        raise BatchDimError(
            f"node {node.name} does not say what it makes; trace with fake tensors, as torch.export"
            ' and make_fx do, so that meta["val"] is there'
        )
    call = call_of(node, batch, state)
    _settle_extremes(call, state)
    found = rule_of(node)(call)
    reasons = [state[operand] for operand in call.operands if operand not in call.apart]
    why = next((x.differs for layouts in reasons for x in layouts[:1] if x.differs), "")
    if node.target is not None and call.name != "getitem":
        found = [replace(x, differs=x.differs or why) for x in found]
    for operand in call.reduced:
        state[operand] = [Layout(differs=state[operand][0].differs)]
    state[node] = found
    for sizes, layout in zip(call.results, found, strict=False):
        if layout.is_split and sizes and layout.dim < len(sizes):
            batch.see(sizes[layout.dim])
    _write(node, found, state)
    return NodeBatchDim(
        node.name,
        str(node.target),
        tuple(found),
        is_tuple,
        tuple(operand.name for operand in call.reduced),
        call.by_size,
    )


def _settle_extremes(call: Call, state: State) -> None:
    """All-reduce the largest and smallest of parts before anything but a view reads them.

    What rules say of linear operators holds of sums.
    """
    if call.name in VIEWS or call.name in _KEEP_EXTREMES:
        return
    for operand in call.operands:
        if state[operand][0].is_partial and state[operand][0].reduction != "sum":
            state[operand] = [call.whole(operand)]


def _write(node: fx.Node, found: Sequence[Layout], state: State) -> None:
    """Let what an operator writes into its first argument be known of that from here on."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.arguments or schema.arguments[0].alias_info is None:
        return
    into = node.args[0] if node.args else None
    if schema.arguments[0].alias_info.is_write and isinstance(into, fx.Node) and found:
        state[into] = [found[0]]


def _region(node: fx.Node, batch: Batch, state: State) -> list[Layout]:
    """Return the layouts of what a region under ``no_grad`` or autocast hands out."""
    given = list(node.args)
    place = next(i for i, a in enumerate(given) if isinstance(a, fx.Node) and a.op == "get_attr")
    body = body_of(given[place]).graph  # type: ignore[arg-type]
    inner: State = {}
    for inside, outside in zip(body.find_nodes(op="placeholder"), given[place + 1 :], strict=True):
        inner[inside] = state[outside] if isinstance(outside, fx.Node) else [Layout()]
    _walk(body, batch, inner)
    results = tree_leaves(body.output_node().args)
    return [inner[r][0] if isinstance(r, fx.Node) else Layout() for r in results]

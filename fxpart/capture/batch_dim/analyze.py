"""`analyze_batch_dims`: find the batch dimension of every node of a graph, by operator rules.

The answers describe ``N`` processes that each run the graph on an equal part of the batch, with the
same weights, and communicate only where the answers say so. In contrast to `BatchDimAnalyzer`,
whose contract it extends:

- A reduction over the batch is partial, whatever else it reduces. So is a product that sums over
  the batch, such as a gradient of a weight.
- Answers come from operator rules; sizes are compared only for operators without a rule. With a
  symbolic batch, no other size can equal that of the batch by chance.
- A mean over the batch is partial with scale 1, an average of the parts, and the gradients of a
  mean loss are larger on each process by the number of processes; see `Layout.scale`.
- ``ones_like`` of a partial loss is replicated, since it depends on the shape alone.
- A partial value must be all-reduced before an operator that is not linear in it reads it; from
  then on it is replicated. The result of a linear operator (sum, product with replicated values,
  view, cast) stays partial.
- Values that each process computes differently are marked with the reason: positions within the
  batch, random numbers, statistics of a training batch norm, an order along the batch.
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
from fxpart.capture.batch_dim.layout import REPLICATED, Batch, BatchDimError, Layout
from fxpart.capture.batch_dim.rules import rule_of
from fxpart.capture.batch_dim.views import VIEWS
from fxpart.capture.calls import REGIONS, body_of
from fxpart.core.graph import IntArray
from fxpart.core.temporaries import TEMPORARY
from fxpart.errors import nearest_names

__all__ = [
    "BatchDimReport",
    "NodeBatchDim",
    "analyze_batch_dims",
    "input_batch_dims",
    "value_batch_dims",
]


State = dict[fx.Node, list[Layout]]
"""Layouts of the results of each node visited so far."""

_KEEP_EXTREMES = frozenset({"getitem", "alias", "clone", "contiguous", "detach"})


# The report.


@dataclass(frozen=True, eq=False, slots=True)
class NodeBatchDim:
    """The answer for one node."""

    name: str
    target: str
    """The called operator; ``""`` for an input."""
    layouts: tuple[Layout, ...]
    """One layout for a tensor, one per item for a tuple; other values count as replicated."""
    is_tuple: bool
    all_reduced: tuple[str, ...] = ()
    """Partial values that must be all-reduced before the node runs, and are replicated from then
    on. Listed at their first reader only."""
    by_size: bool = False
    """Whether the answer relies on equal sizes, for lack of a rule."""

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimension of each item: 0 or more, -1 (replicated) or -2 (partial)."""
        return tuple(layout.dim for layout in self.layouts)


@dataclass(frozen=True, eq=False, slots=True)
class BatchDimReport:
    """The answers for all inputs and calls of a graph, in graph order."""

    nodes: tuple[NodeBatchDim, ...]
    outputs: tuple[str, ...]
    """Names of the nodes returned by the graph, in order."""

    def of(self, name: str) -> NodeBatchDim:
        """Return the answer for the node of that name.

        Raises:
            BatchDimError: if there is no such node.

        """
        answer = next((node for node in self.nodes if node.name == name), None)
        if answer is None:
            near = nearest_names(name, (node.name for node in self.nodes))
            raise BatchDimError(f"the graph has no node {name}; {near}")
        return answer


def value_batch_dims(report: BatchDimReport, value_names: Sequence[str]) -> IntArray:
    """Return the answer for each value of an `OpGraph`, int64, of the length of `value_names`.

    Temporaries of operators count as replicated.

    Args:
        report: report of the graph from which the values were captured.
        value_names: ``name`` for the result of a node, ``name.i`` for item i of a tuple.

    Raises:
        BatchDimError: if the graph has no such name.

    """
    dims: dict[str, int] = {}
    for node in report.nodes:
        dims[node.name] = node.dims[0]
        dims.update((f"{node.name}.{i}", dim) for i, dim in enumerate(node.dims))
    return np.array([_dim(dims, name) for name in value_names], dtype=np.int64)


def _dim(dims: Mapping[str, int], name: str) -> int:
    if name.endswith(TEMPORARY):
        return REPLICATED  # no operator reads it
    if name not in dims:
        raise BatchDimError(
            f"the analyzed graph has no value {name}; {nearest_names(name, dims)}; analyze the"
            " program that the OpGraph was made from"
        )
    return dims[name]


# The analysis.


def input_batch_dims(program: ExportedProgram) -> dict[str, int]:
    """Return the batch dimension of each user input that has one: 0 if its size fits.

    The first input's first dimension is the batch size; inputs with another size there, or without
    dimensions, count as the same for all examples. A symbolic size with the batch's symbol, such as
    ``3*batch``, fits.
    """
    names = {
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind == InputKind.USER_INPUT
    }
    dims: dict[str, int] = {}
    batch: Batch | None = None
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if node.name not in names or not isinstance(value, torch.Tensor) or value.dim() == 0:
            continue
        size = extents(value.shape)[0]
        batch = Batch([size]) if batch is None else batch
        if batch.is_in(size):
            dims[node.name] = 0
    return dims


def analyze_batch_dims(
    program: ExportedProgram | fx.GraphModule | fx.Graph,
    batch_dims: Mapping[str, int] | None = None,
) -> BatchDimReport:
    """Return the batch dimension of every node of a graph.

    Args:
        program: an exported program, or an ATen graph whose nodes have ``meta["val"]``; captured
            with sizes of the whole batch or of any part, or with symbols. With numbers, choose a
            batch size different from every other size of the model; a number computed by the model
            from its sizes is then a constant like any other.
        batch_dims: the batch dimension of each placeholder that has one, by name; the others are
            replicated. By default `input_batch_dims` of an exported program.

    Raises:
        BatchDimError: if a placeholder is missing or lacks its dimension, the graph has no
            ``meta["val"]``, or no placeholder has a batch dimension.

    """
    graph = program if isinstance(program, fx.Graph) else program.graph
    if batch_dims is None:
        if not isinstance(program, ExportedProgram):
            raise BatchDimError(
                "a graph alone does not tell which inputs have a batch dimension; give "
                "batch_dims={placeholder: dimension}"
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
    """Return the sizes of the batch, after checking that the dimensions exist."""
    if not batch_dims:
        raise BatchDimError(
            "no input has a batch dimension, so nothing can be split; name one in batch_dims: "
            f"{nearest_names('', inputs)}"
        )
    sizes = []
    for name, dim in batch_dims.items():
        if name not in inputs:
            raise BatchDimError(f"the graph has no input {name}; {nearest_names(name, inputs)}")
        value = inputs[name].meta.get("val")
        if not isinstance(value, torch.Tensor) or not 0 <= dim < value.dim():
            has = f"{value.dim()} dimensions" if isinstance(value, torch.Tensor) else "no tensor"
            raise BatchDimError(
                f"input {name} has {has}, but dimension {dim} was named as its batch; choose an "
                "existing one, from 0"
            )
        sizes.append(extents(value.shape)[dim])
    return Batch(sizes)


def _replicated(node: fx.Node) -> list[Layout]:
    value = node.meta.get("val")
    return [Layout() for _ in value] if isinstance(value, list | tuple) and value else [Layout()]


def _walk(graph: fx.Graph, batch: Batch, state: State) -> list[NodeBatchDim]:
    answers = []
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op == "call_function":
            answers.append(_answer(node, batch, state))
            continue
        state.setdefault(node, _replicated(node))
        answers.append(NodeBatchDim(node.name, "", tuple(state[node]), is_tuple=False))
    return answers


def _answer(node: fx.Node, batch: Batch, state: State) -> NodeBatchDim:
    is_tuple = isinstance(node.meta.get("val"), list | tuple)
    if node.target in REGIONS:
        state[node] = _region(node, batch, state)
        return NodeBatchDim(node.name, str(node.target), tuple(state[node]), is_tuple)
    if "val" not in node.meta and node.users:
        raise BatchDimError(
            f'node {node.name} has no meta["val"], which describes its result; trace with fake'
            " tensors, as torch.export and make_fx do"
        )
    call = call_of(node, batch, state)
    _settle_extremes(call, state)
    layouts = rule_of(node)(call)
    reasons = [state[operand] for operand in call.operands if operand not in call.apart]
    reason = next((x.differs for of_operand in reasons for x in of_operand[:1] if x.differs), "")
    if node.target is not None and call.name != "getitem":
        layouts = [replace(x, differs=x.differs or reason) for x in layouts]
    for operand in call.reduced:
        state[operand] = [Layout(differs=state[operand][0].differs)]
    state[node] = layouts
    for sizes, layout in zip(call.results, layouts, strict=False):
        if layout.is_split and sizes and layout.dim < len(sizes):
            batch.see(sizes[layout.dim])
    _write(node, layouts, state)
    return NodeBatchDim(
        node.name,
        str(node.target),
        tuple(layouts),
        is_tuple,
        tuple(operand.name for operand in call.reduced),
        call.by_size,
    )


def _settle_extremes(call: Call, state: State) -> None:
    """All-reduce maxima and minima of parts before anything but a view reads them.

    Rules of linear operators only hold for sums.
    """
    if call.name in VIEWS or call.name in _KEEP_EXTREMES:
        return
    for operand in call.operands:
        if state[operand][0].is_partial and state[operand][0].reduction != "sum":
            state[operand] = [call.whole(operand)]


def _write(node: fx.Node, layouts: Sequence[Layout], state: State) -> None:
    """Set the layout of a written first operand to that of the result."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.arguments or schema.arguments[0].alias_info is None:
        return
    target = node.args[0] if node.args else None
    if schema.arguments[0].alias_info.is_write and isinstance(target, fx.Node) and layouts:
        state[target] = [layouts[0]]


def _region(node: fx.Node, batch: Batch, state: State) -> list[Layout]:
    """Return the layouts of the results of a region under ``no_grad`` or autocast."""
    args = list(node.args)
    position = next(i for i, a in enumerate(args) if isinstance(a, fx.Node) and a.op == "get_attr")
    body = body_of(args[position]).graph  # type: ignore[arg-type]
    inner: State = {}
    for inside, outside in zip(
        body.find_nodes(op="placeholder"), args[position + 1 :], strict=True
    ):
        inner[inside] = state[outside] if isinstance(outside, fx.Node) else [Layout()]
    _walk(body, batch, inner)
    results = tree_leaves(body.output_node().args)
    return [inner[r][0] if isinstance(r, fx.Node) else Layout() for r in results]

"""The nodes of a training step by the blocks of the model that they belong to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from fxpart.capture.joint_labels import FORMULA, FORWARD, ORDER
from fxpart.capture.storage import storage_key
from fxpart.capture.written_operands import written_operands

__all__ = ["BlockRun", "StepNodes"]

_NOBODY = -1
"""Reads a storage in the backward, and is of no block."""


@dataclass(frozen=True, eq=False, slots=True)
class BlockRun:
    """One run through a block in the forward: calls that come one after another."""

    number: int
    path: str
    nodes: list[fx.Node]


class StepNodes:
    """Who makes, reads and writes which storage of a training step, and in which block."""

    def __init__(self, graph: fx.Graph, blocks: Sequence[str]) -> None:
        """Sort the nodes of `graph`; `blocks` are paths that do not lie in one another."""
        self.place = {node: place for place, node in enumerate(graph.nodes)}
        self.maker: dict[int, fx.Node] = {}
        """The first node that has a storage."""
        self.writers: dict[int, list[fx.Node]] = {}
        """Calls that write into a storage, in order."""
        self.runs: list[BlockRun] = []
        self.run_of: dict[fx.Node, BlockRun] = {}
        """Of the calls of the forward that are in a block."""
        self.backward: list[list[fx.Node]] = []
        """For each run, the calls of the backward that compute its gradients."""
        self._blocks = dict.fromkeys(blocks)
        self._readers: dict[int, set[int]] = {}
        """Numbers of the runs whose backward reads a storage."""
        for node in graph.nodes:
            for key in self.storages(node):
                self.maker.setdefault(key, node)
            for key in self.written(node):
                self.writers.setdefault(key, []).append(node)
        self.mode = _fake_mode(graph)
        """Where the tensors without memory were made."""
        self._sort_forward(graph)
        self._sort_backward(graph)

    def storages(self, node: fx.Node) -> list[int]:
        """Return the storages of what `node` gives."""
        tensors = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
        return list(dict.fromkeys(storage_key(tensor) for tensor in tensors))

    def written(self, node: fx.Node) -> list[int]:
        """Return the storages that the call writes into."""
        return [key for operand in written_operands(node) for key in self.storages(operand)]

    def needed_outside(self, run: BlockRun) -> set[int]:
        """Return the storages of `run` that the backward of others needs: they stay in memory."""
        mine = (key for node in run.nodes for key in self.storages(node))
        return {key for key in mine if self._readers.get(key, set()) - {run.number}}

    def is_read_back(self, node: fx.Node, run: BlockRun) -> bool:
        """Tell whether the backward of `run` reads what `node` gives."""
        return any(self._backward_of.get(user) is run for user in node.users)

    def keep_inputs(self, again: Sequence[fx.Node], run: BlockRun) -> None:
        """Remember that `again`, to be computed a second time, needs what it is made from."""
        chosen = set(again)
        for node in again:
            for i in node.all_input_nodes:
                if i not in chosen:
                    for key in self.storages(i):
                        self._readers.setdefault(key, set()).add(run.number)

    def first_formula(self, run: BlockRun) -> fx.Node:
        """Return the node before which all that the backward of `run` reads has to be there.

        The first node of its first formula that reads a value of the forward, or a weight.
        """
        calls = self.backward[run.number]
        first = next(n for n in calls if any(map(self._is_saved, n.all_input_nodes)))
        formula = first.meta[FORMULA]
        if formula is None:
            return first
        return next(node for node in calls if node.meta[FORMULA] == formula)

    def saving(self, run: BlockRun) -> list[fx.Node]:
        """Return the nodes of those formulas of its backward that saved something of the forward.

        As long as one of them is to come, `torch.utils.checkpoint` keeps what it was given.
        """
        calls = self.backward[run.number]
        saved = [n.meta[FORMULA] for n in calls if any(map(self._is_saved, n.all_input_nodes))]
        formulas = dict.fromkeys(number for number in saved if number is not None)
        return [node for node in calls if node.meta[FORMULA] in formulas]

    def _is_saved(self, node: fx.Node) -> bool:
        # Sizes are numbers, which nobody has to make again.
        return self._is_forward(node) and bool(self.storages(node))

    def _is_forward(self, node: fx.Node) -> bool:
        return node.meta.get(FORWARD) is None

    def _sort_forward(self, graph: fx.Graph) -> None:
        before: str | None = None
        for node in _calls(graph):
            if not self._is_forward(node) or not self.storages(node):
                continue
            path = self._block_of(node)
            if path is not None:
                if path != before:
                    self.runs.append(BlockRun(len(self.runs), path, []))
                self.runs[-1].nodes.append(node)
                self.run_of[node] = self.runs[-1]
            before = path

    def _sort_backward(self, graph: fx.Graph) -> None:
        self.backward = [[] for _ in self.runs]
        self._backward_of: dict[fx.Node, BlockRun] = {}
        by_path: dict[str, list[BlockRun]] = {}
        for run in self.runs:
            by_path.setdefault(run.path, []).append(run)
        for node in _calls(graph):
            if self._is_forward(node):
                continue
            runs = by_path.get(self._block_of(node) or "", ())
            begun = [run for run in runs if run.nodes[0].meta[ORDER] <= node.meta[FORWARD]]
            if begun:
                self.backward[begun[-1].number].append(node)
                self._backward_of[node] = begun[-1]
            self._note_reads(node, begun[-1].number if begun else _NOBODY)
        self._note_reads(graph.output_node(), _NOBODY)

    def _note_reads(self, reader: fx.Node, number: int) -> None:
        for node in reader.all_input_nodes:
            for key in self.storages(node):
                self._readers.setdefault(key, set()).add(number)

    def _block_of(self, node: fx.Node) -> str | None:
        """Return the block that a call belongs to, by the modules that it was made in."""
        stack = node.meta.get("nn_module_stack") or {}
        paths = (str(entry[0]) for entry in stack.values())
        plain = (path.removeprefix("L['self'].") for path in paths)
        return next((path for path in plain if path in self._blocks), None)


def _fake_mode(graph: fx.Graph) -> FakeTensorMode:
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    return next(value.fake_mode for value in values if isinstance(value, FakeTensor))


def _calls(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op == "call_function")

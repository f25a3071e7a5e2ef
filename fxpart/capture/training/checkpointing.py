"""Activation checkpointing: what is made inside a block is computed again for its backward.

Between forward and backward a block keeps what came into it; the rest of what its backward reads is
made a second time, right before the first formula of the block's backward that needs anything of
the forward. That is when `torch.utils.checkpoint` does it too, and like there it stops once all is
made that is read.

Reference: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016,
arXiv:1604.06174.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from fxpart.capture.calls import storage_key, written_operands
from fxpart.capture.training.joint_labels import BLOCK, EXPORTED, FORMULA, FORWARD, ORDER

__all__ = ["BlockRun", "StepNodes", "checkpoint_blocks"]


# The nodes of a training step by the blocks of the model that they belong to.

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


def checkpoint_blocks(graph: fx.Graph, blocks: Sequence[str]) -> None:
    """Let a training step compute again what is made inside of `blocks`, paths of modules.

    A value that is read outside its block stays as it is, in memory for whoever needs it. So does
    one that cannot be made a second time: what it is made from has been written to since. Random
    numbers are drawn again, so that memory and cost are right and dropout, if the graph is run, is
    not that of the forward. Batch normalization in training counts its batch twice, as it does
    under torch's own checkpointing. A block that is called several times in a row is one.

    Args:
        graph: as `fxpart.capture.training.joint_trace.trace_step` makes it; it is changed.
        blocks: paths that do not lie in one another.

    """
    nodes = StepNodes(graph, blocks)
    plans: list[tuple[BlockRun, list[fx.Node]]] = []
    # Later blocks say which results of earlier ones are kept for them.
    for run in reversed(nodes.runs):
        again = _Plan(nodes, run).again()
        if again:
            plans.append((run, again))
            nodes.keep_inputs(again, run)
    for run, again in plans:
        _insert(graph, nodes, run, again)
    graph.lint()


@dataclass(eq=False)
class _Plan:
    """Which nodes of one run of a block are computed again."""

    nodes: StepNodes
    run: BlockRun
    kept: set[int] = field(default_factory=set)
    """Storages made in the block that stay in memory."""
    fixed: set[fx.Node] = field(default_factory=set)
    """Nodes that cannot be computed again."""

    def again(self) -> list[fx.Node]:
        """Return the nodes in their order; none where nothing has to be."""
        self.kept = self.nodes.needed_outside(self.run)
        while True:
            chosen = self._closure()
            stuck = [node for node in chosen if self._is_stuck(node)]
            if not stuck:
                return sorted(chosen, key=self.nodes.place.__getitem__)
            self.fixed.update(stuck)
            self.kept.update(key for node in stuck for key in self.nodes.storages(node))

    def _closure(self) -> dict[fx.Node, None]:
        """Return what the block's backward reads and all that it is made from, in the block."""
        read = [node for node in self.run.nodes if self.nodes.is_read_back(node, self.run)]
        waiting = [node for node in read if self._is_remade(node)]
        chosen: dict[fx.Node, None] = {}
        while waiting:
            node = waiting.pop()
            if node in chosen:
                continue
            chosen[node] = None
            waiting += [i for i in node.all_input_nodes if self._is_remade(i)]
            remade = [key for key in self.nodes.storages(node) if self._is_free(key)]
            # What wrote into the storage in the block, through a view perhaps, writes again. What
            # wrote into it later did not change what autograd saved: it would have refused.
            writers = (w for key in remade for w in self.nodes.writers.get(key, ()))
            waiting += [w for w in writers if self.nodes.run_of.get(w) is self.run]
        return chosen

    def _is_remade(self, node: fx.Node) -> bool:
        inside = self.nodes.run_of.get(node) is self.run and node not in self.fixed
        return inside and any(self._is_free(key) for key in self.nodes.storages(node))

    def _is_free(self, key: int) -> bool:
        """Tell whether a storage is made in the block and not kept."""
        return self.nodes.run_of.get(self.nodes.maker[key]) is self.run and key not in self.kept

    def _is_stuck(self, node: fx.Node) -> bool:
        """Tell whether `node` would read, or change, another state of what stays in memory."""
        if any(not self._is_free(key) for key in self.nodes.written(node)):
            return True
        place = self.nodes.place
        stays = (
            key
            for i in node.all_input_nodes
            for key in self.nodes.storages(i)
            if not self._is_free(key)
        )
        return any(
            place[writer] > place[node]
            for key in stays
            for writer in self.nodes.writers.get(key, ())
        )


def _insert(graph: fx.Graph, nodes: StepNodes, run: BlockRun, again: list[fx.Node]) -> None:
    """Compute `again` before the backward of `run`, which reads the new values."""
    made: dict[fx.Node, fx.Node] = {}
    for node in nodes.saving(run):
        node.meta[BLOCK] = run.number
    with graph.inserting_before(nodes.first_formula(run)):
        for node in again:
            args = fx.node.map_arg(node.args, lambda i: made.get(i, i))
            kwargs = fx.node.map_arg(node.kwargs, lambda i: made.get(i, i))
            name = f"{node.name}_again"
            made[node] = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
            made[node].meta = {
                **node.meta,
                "val": _value(made[node], nodes.mode),
                FORWARD: node.meta[ORDER],
                EXPORTED: None,
                FORMULA: None,
                BLOCK: run.number,
            }
    for reader in nodes.backward[run.number]:
        for node in reader.all_input_nodes:
            if node in made:
                reader.replace_input_with(node, made[node])


def _value(node: fx.Node, mode: FakeTensorMode) -> object:
    """Return what a call gives, on tensors without memory: in storages of its own."""
    assert callable(node.target), "only calls are computed again"
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda i: i.meta["val"])
    with mode, torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        return node.target(*args, **kwargs)

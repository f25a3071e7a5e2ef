"""Activation checkpointing: what is made inside a block is computed again for its backward.

Between forward and backward a block keeps what came into it; the rest of what its backward reads is
made a second time, right before the first formula of the block's backward that needs anything of
the forward. That is when `torch.utils.checkpoint` does it too, and like there it stops once all is
made that is read.

Reference: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016,
arXiv:1604.06174.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fxpart.capture.block_runs import BlockRun, StepNodes
from fxpart.capture.joint_labels import BLOCK, EXPORTED, FORMULA, FORWARD, ORDER

__all__ = ["checkpoint_blocks"]


def checkpoint_blocks(graph: fx.Graph, blocks: Sequence[str]) -> None:
    """Let a training step compute again what is made inside of `blocks`, paths of modules.

    A value that is read outside its block stays as it is, in memory for whoever needs it. So does
    one that cannot be made a second time: what it is made from has been written to since. Random
    numbers are drawn again, so that memory and cost are right and dropout, if the graph is run, is
    not that of the forward. Batch normalization in training counts its batch twice, as it does
    under torch's own checkpointing. A block that is called several times in a row is one.

    Args:
        graph: as `fxpart.capture.joint_trace.trace_step` makes it; it is changed.
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

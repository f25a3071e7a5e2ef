"""`checkpoint_blocks`: activation checkpointing, recomputing a block for its backward.

Between forward and backward a block keeps its inputs. Its calls up to the last one that saves a
value run again right before the first formula of the block's backward that needs any, as in
`torch.utils.checkpoint`.

Selective checkpointing also keeps the results of fused attention, of every second matrix product,
and of reduce-scatters; these are kept until the block's backward has finished, even if unread.
Megatron-LM's selective recomputation covers only the core of attention, between its two products,
as a separate run in each block.

References: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016,
arXiv:1604.06174; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", MLSys 2023, arXiv:2205.05198.
"""

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from fxpart.capture.calls import storage_key, written_operands
from fxpart.capture.inference.eager_lifetimes import CALL, NO_CALL
from fxpart.capture.training.joint_labels import (
    BLOCK,
    EXPORTED,
    FORMULA,
    FORWARD,
    KEPT,
    ORDER,
    SAVED,
)
from fxpart.core.graph import AGAIN
from fxpart.errors import NotApplicableError

__all__ = ["WHOLE", "BlockRun", "StepNodes", "checkpoint_blocks", "compute_again"]

WHOLE = "whole "
"""Paths of blocks that are recomputed as by ``use_reentrant=True``: whole, to the results, which
are kept until the block's backward has finished."""


@dataclass(frozen=True, eq=False, slots=True)
class BlockRun:
    """One pass through a block in the forward: consecutive calls."""

    number: int
    path: str
    nodes: list[fx.Node]

    @property
    def is_whole(self) -> bool:
        """Whether all of it is recomputed, with its results; see `WHOLE`."""
        return self.path.startswith(WHOLE)


class StepNodes:
    """The nodes that produce, read and write the storages of a training step, by block."""

    def __init__(self, graph: fx.Graph, blocks: Sequence[str], *, cores_only: bool = False) -> None:
        """Sort the nodes of `graph`; `blocks` are non-nested paths.

        With `cores_only`, a run is the core of an attention in a block instead of the block.
        """
        self.position = {node: position for position, node in enumerate(graph.nodes)}
        self.maker: dict[int, fx.Node] = {}
        """The first node of each storage."""
        self.writers: dict[int, list[fx.Node]] = {}
        """Calls that write into each storage, in order."""
        self.runs: list[BlockRun] = []
        self.run_of: dict[fx.Node, BlockRun] = {}
        """The run of each forward call in a block."""
        self.backward: list[list[fx.Node]] = []
        """Backward calls that compute the gradients of each run."""
        self._backward_of: dict[fx.Node, BlockRun] = {}
        """The run of each backward call in a block."""
        self._blocks = dict.fromkeys(blocks)
        for node in graph.nodes:
            for key in self.storages(node):
                self.maker.setdefault(key, node)
            for key in self.written(node):
                self.writers.setdefault(key, []).append(node)
        values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
        self.mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
        """The mode of the fake tensors in the graph."""
        self._sort_forward(graph, cores_only=cores_only)
        self._sort_backward(graph, cores_only=cores_only)

    def storages(self, node: fx.Node) -> list[int]:
        """Return the storages of the value of `node`."""
        tensors = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
        return list(dict.fromkeys(storage_key(tensor) for tensor in tensors))

    def written(self, node: fx.Node) -> list[int]:
        """Return the storages written by a call."""
        return [key for operand in written_operands(node) for key in self.storages(operand)]

    def results(self, run: BlockRun) -> list[fx.Node]:
        """Return the nodes of `run` that the forward reads after it."""
        return [
            node
            for node in run.nodes
            if any(self._is_forward(u) and self.run_of.get(u) is not run for u in node.users)
        ]

    def gradients_into(self, run: BlockRun) -> list[fx.Node]:
        """Return the nodes of later calls' gradients that the backward of `run` reads."""
        operands = (node for reader in self.backward[run.number] for node in reader.all_input_nodes)
        return [
            node
            for node in dict.fromkeys(operands)
            if not self._is_forward(node)
            and self._backward_of.get(node) is not run
            and not (BLOCK in node.meta and node.meta[FORMULA] is None)
        ]

    def is_read_back(self, node: fx.Node, run: BlockRun) -> bool:
        """Return whether the backward of `run` reads the value of `node`."""
        return any(self._backward_of.get(user) is run for user in node.users)

    def first_formula(self, run: BlockRun) -> fx.Node:
        """Return the node before which the values for the backward of `run` are recomputed.

        That is the first node of its first formula that reads a value of the forward, or a weight;
        if none does, the first node of its backward.
        """
        calls = self.backward[run.number]
        readers = (n for n in calls if any(map(self._is_saved, n.all_input_nodes)))
        first = next(readers, calls[0])
        formula = first.meta[FORMULA]
        if formula is None:
            return first
        return next(node for node in calls if node.meta[FORMULA] == formula)

    def saving(self, run: BlockRun) -> list[fx.Node]:
        """Return the nodes of the run's backward formulas that saved values of the forward.

        `torch.utils.checkpoint` keeps the inputs of a block until the last of these nodes.
        """
        calls = self.backward[run.number]
        saved = [n.meta[FORMULA] for n in calls if any(map(self._is_saved, n.all_input_nodes))]
        formulas = dict.fromkeys(number for number in saved if number is not None)
        return [node for node in calls if node.meta[FORMULA] in formulas]

    def _is_saved(self, node: fx.Node) -> bool:
        # Sizes are numbers and need not be recomputed.
        return self._is_forward(node) and bool(self.storages(node))

    def _is_forward(self, node: fx.Node) -> bool:
        return node.meta.get(FORWARD) is None

    def _sort_forward(self, graph: fx.Graph, *, cores_only: bool) -> None:
        previous_path: str | None = None
        for node in _calls(graph):
            if not self._is_forward(node) or not self.storages(node):
                continue
            path = self._block_of(node)
            if path is not None:
                if path != previous_path:
                    self.runs.append(BlockRun(len(self.runs), path, []))
                self.runs[-1].nodes.append(node)
            previous_path = path
        if cores_only:
            cores = [(run.path, core) for run in self.runs for core in _attention_cores(run.nodes)]
            self.runs = [BlockRun(n, path, core) for n, (path, core) in enumerate(cores)]
        self.run_of = {node: run for run in self.runs for node in run.nodes}

    def _sort_backward(self, graph: fx.Graph, *, cores_only: bool) -> None:
        self.backward = [[] for _ in self.runs]
        by_path: dict[str, list[BlockRun]] = {}
        for run in self.runs:
            by_path.setdefault(run.path, []).append(run)
        for node in _calls(graph):
            if self._is_forward(node):
                continue
            runs = by_path.get(self._block_of(node) or "", ())
            begun = [run for run in runs if run.nodes[0].meta[ORDER] <= node.meta[FORWARD]]
            if cores_only and begun and begun[-1].nodes[-1].meta[ORDER] < node.meta[FORWARD]:
                begun = []
            if begun:
                self.backward[begun[-1].number].append(node)
                self._backward_of[node] = begun[-1]

    def _block_of(self, node: fx.Node) -> str | None:
        """Return the block of a call, from its module stack."""
        stack = node.meta.get("nn_module_stack") or {}
        paths = (str(entry[0]) for entry in stack.values())
        plain = (path.removeprefix("L['self'].") for path in paths)
        return next((path for path in plain if path in self._blocks), None)


def _calls(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op == "call_function")


_SOFTMAX = re.compile(r"\b_?(causal_|safe_)?softmax\b")
_PRODUCT = torch.ops.aten.bmm.default
"""The products of queries and keys, and of probabilities and values."""
_MIXING = (_PRODUCT, torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
"""Operators that cannot be inside the core of an attention."""


def _attention_cores(calls: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return the calls of each attention from the product before its softmax to the one after it.

    The view that shapes the sum belongs to the same formula in the backward. A softmax that does
    not read one product and feed another, such as a router's, is not an attention.
    """
    place_of = {node: position for position, node in enumerate(calls)}
    cores = []
    for node in calls:
        if not _SOFTMAX.search(str(node.target)):
            continue
        before = [place_of[p] for p in _nearest_products(node, place_of, "all_input_nodes")]
        after = [place_of[p] for p in _nearest_products(node, place_of, "users")]
        if before and after:
            last = min(after)
            is_shaped = any(user in calls[last + 1 : last + 2] for user in calls[last].users)
            cores.append(list(calls[max(before) : last + 1 + is_shaped]))
    return cores


def _nearest_products(node: fx.Node, among: Container[fx.Node], towards: str) -> list[fx.Node]:
    """Return the nearest batched products from `node`, without any other product in between."""
    pending, visited, products = list(getattr(node, towards)), {node}, []
    while pending:
        neighbour = pending.pop()
        if neighbour in visited or neighbour not in among:
            continue
        visited.add(neighbour)
        if neighbour.target is _PRODUCT:
            products.append(neighbour)
        elif neighbour.target not in _MIXING:
            pending += getattr(neighbour, towards)
    return products


def checkpoint_blocks(graph: fx.Graph, blocks: Sequence[str], *, how: str = "block") -> None:
    """Change a training step to recompute the values inside `blocks`, given as module paths.

    A value that is also read outside its block stays in memory, and is still recomputed for the
    block's own backward. A value is kept if it cannot be recomputed because an operand has been
    overwritten. Random numbers are drawn again, so memory and cost are right, but if the graph is
    run, dropout differs from that of the forward. Batch normalization in training counts its batch
    twice, as under torch's own checkpointing. Consecutive calls of a block form one run.

    Args:
        graph: graph from `fxpart.capture.training.joint_trace.trace_step`, modified in place.
        blocks: non-nested paths.
        how: ``block``; ``selective``: keep the values kept by `torch.utils.checkpoint` under
            torchtitan's policy ``selective_ac_option="op"``: fused attention, ``reduce_scatter``
            and every second ``mm`` product of a block, starting with the first;
            ``core_attention``: keep all but the attention scores and values derived from them
            before the product with the values.

    Raises:
        NotApplicableError: if ``core_attention`` is set and no block computes attention as
            products.

    """
    nodes = StepNodes(graph, blocks, cores_only=how == "core_attention")
    if how == "core_attention" and not nodes.runs:
        raise NotApplicableError(
            "checkpointing=core_attention recomputes attention scores, but no block of this model "
            "has any: its attention is one kernel, which saves none; use checkpointing=none, or "
            "+model.config.attn_implementation=eager"
        )
    for run in nodes.runs if how == "selective" else ():
        for node in _saved_by_policy(run):
            node.meta[SAVED] = run.number
    cores_only = how == "core_attention"
    plans = [(run, _Plan(nodes, run, cores_only=cores_only).again()) for run in nodes.runs]
    for run, recomputed in plans:
        if recomputed:
            _insert(graph, nodes, run, recomputed)
    graph.lint()


@dataclass(eq=False)
class _Plan:
    """Chooses the nodes of one run of a block to recompute."""

    nodes: StepNodes
    run: BlockRun
    cores_only: bool = field(kw_only=True)
    """Whether the run is the core of an attention, of which only what is needed runs again."""
    kept: set[int] = field(default_factory=set)
    """Storages created in the block that stay in memory."""
    fixed: set[fx.Node] = field(default_factory=set)
    """Nodes that cannot be recomputed."""

    def again(self) -> list[fx.Node]:
        """Return the nodes to recompute, in order; none without a backward."""
        if not self.nodes.backward[self.run.number]:
            return []
        saved = [node for node in self.run.nodes if SAVED in node.meta]
        self.kept = {key for node in saved for key in self.nodes.storages(node)}
        while True:
            chosen = self._closure()
            stuck = [node for node in chosen if self._is_stuck(node)]
            if not stuck:
                return sorted(chosen, key=self.nodes.position.__getitem__)
            self.fixed.update(stuck)
            self.kept.update(key for node in stuck for key in self.nodes.storages(node))

    def _closure(self) -> dict[fx.Node, None]:
        """Return the nodes in the block that its backward depends on."""
        read = [node for node in self.run.nodes if self.nodes.is_read_back(node, self.run)]
        if self.run.is_whole:
            read += self.nodes.results(self.run)
        elif not self.cores_only:
            read += self._before_last_saved()
        pending = [node for node in read if self._is_recomputed(node)]
        chosen: dict[fx.Node, None] = {}
        while pending:
            node = pending.pop()
            if node in chosen:
                continue
            chosen[node] = None
            pending += [i for i in node.all_input_nodes if self._is_recomputed(i)]
            freed = [key for key in self.nodes.storages(node) if self._is_freed(key)]
            # Calls in the block that wrote into the storage, even through a view, are repeated.
            # Later writes did not change saved values, since autograd would have refused them.
            writers = (w for key in freed for w in self.nodes.writers.get(key, ()))
            pending += [w for w in writers if self.nodes.run_of.get(w) is self.run]
        return chosen

    def _before_last_saved(self) -> list[fx.Node]:
        """Return the nodes before the last call whose backward saved a value.

        A call saves its operands before it computes, and then recomputation stops. Its backward is
        labelled with the last of its parts.
        """
        orders = (node.meta[FORWARD] for node in self.nodes.saving(self.run))
        last = max(orders, default=-1)
        nodes = self.run.nodes
        call = next((node.meta[EXPORTED] for node in nodes if node.meta[ORDER] == last), None)
        for position, node in enumerate(nodes):
            makes = any(self.nodes.maker[key] is node for key in self.nodes.storages(node))
            if node.meta[ORDER] == last or (makes and node.meta[EXPORTED] == call):
                return nodes[:position]
        return []

    def _is_recomputed(self, node: fx.Node) -> bool:
        inside = self.nodes.run_of.get(node) is self.run and node not in self.fixed
        return inside and any(self._is_freed(key) for key in self.nodes.storages(node))

    def _is_freed(self, key: int) -> bool:
        """Return whether a storage is created in the block and not kept."""
        return self.nodes.run_of.get(self.nodes.maker[key]) is self.run and key not in self.kept

    def _is_stuck(self, node: fx.Node) -> bool:
        """Return whether `node` would read another state of a kept storage, or change one."""
        if any(not self._is_freed(key) for key in self.nodes.written(node)):
            return True
        position = self.nodes.position
        kept_storages = (
            key
            for operand in node.all_input_nodes
            for key in self.nodes.storages(operand)
            if not self._is_freed(key)
        )
        return any(
            position[writer] > position[node]
            for key in kept_storages
            for writer in self.nodes.writers.get(key, ())
        )


_ATTENTIONS = ("_scaled_dot_product", "context_attention")


def _saved_by_policy(run: BlockRun) -> list[fx.Node]:
    """Return the calls of a run whose results a selective checkpoint saves."""
    products = [node for node in run.nodes if node.target is torch.ops.aten.mm.default]
    attentions = [n for n in run.nodes if any(name in str(n.target) for name in _ATTENTIONS)]
    sums = [n for n in run.nodes if getattr(n.target, "name", str)() == "fxpart::reduce_scatter"]
    return [*products[::2], *attentions, *sums]


def _insert(graph: fx.Graph, nodes: StepNodes, run: BlockRun, recomputed: list[fx.Node]) -> None:
    """Recompute `recomputed` before the backward of `run`, which then reads the new values."""
    for node in nodes.saving(run):
        node.meta[BLOCK] = run.number
    for node in run.nodes:
        # What a user's Function saved is dropped, and saved again by its copy.
        node.meta.pop(KEPT, None)
    first, readers = nodes.first_formula(run), nodes.backward[run.number]
    again = compute_again(
        graph, nodes.mode, recomputed, before=first, readers=readers, block=run.number
    )
    if run.is_whole:
        results = set(nodes.results(run))
        held = [copy for node, copy in zip(recomputed, again, strict=True) if node in results]
        held += nodes.gradients_into(run)
        for node in held:
            node.meta[KEPT] = readers[-1].meta[ORDER]


def compute_again(
    graph: fx.Graph,
    mode: FakeTensorMode,
    recomputed: Sequence[fx.Node],
    *,
    before: fx.Node,
    readers: Iterable[fx.Node],
    block: int | None,
) -> list[fx.Node]:
    """Insert copies of `recomputed` before a node, redirect `readers`, and return the copies.

    The copies belong to the backward of their calls and, if given, to a block's run.
    """
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(before):
        for node in recomputed:
            args = fx.node.map_arg(node.args, lambda i: copies.get(i, i))
            kwargs = fx.node.map_arg(node.kwargs, lambda i: copies.get(i, i))
            name = f"{node.name}{AGAIN}"
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
            copies[node].meta = {
                **node.meta,
                "val": _fake_value(copies[node], mode),
                FORWARD: node.meta[ORDER],
                EXPORTED: None,
                CALL: NO_CALL,
                FORMULA: None,
                BLOCK: block,
            }
    for reader in readers:
        for node in reader.all_input_nodes:
            if node in copies:
                reader.replace_input_with(node, copies[node])
    return list(copies.values())


def _fake_value(node: fx.Node, mode: FakeTensorMode) -> object:
    """Return the fake value of a call, in new storages."""
    assert callable(node.target), "only calls are recomputed"
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda i: i.meta["val"])
    with mode, torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        return node.target(*args, **kwargs)

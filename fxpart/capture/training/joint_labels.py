"""Labels of the nodes in a training step's graph, written while the graph is traced."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from fxpart.capture.calls import storage_key
from fxpart.capture.inference.eager_lifetimes import CALL, NO_CALL
from fxpart.capture.training.python_calls import PythonCalls

__all__ = [
    "BLOCK",
    "EXPORTED",
    "FORMULA",
    "FORWARD",
    "KEPT",
    "NOWHERE",
    "ORDER",
    "SAVED",
    "Label",
    "Labels",
]

BLOCK = "fxpart_block"
"""Key of a node's ``meta``, only in the backward of a checkpointed block: the number of the run
through it. Set on recomputed nodes, and on formulas that saved values of the forward."""
EXPORTED = "fxpart_exported"
"""Key of a node's ``meta``: in the forward, the name of its exported node; None in the backward and
for the loss."""
ORDER = "fxpart_order"
"""Key of a node's ``meta``: the number of nodes traced before it, including removed ones; for a
recomputed node, that of the original."""
FORWARD = "fxpart_forward"
"""Key of a node's ``meta``: the `ORDER` of the last node of the forward call whose gradient the
node computes; None in the forward."""
FORMULA = "fxpart_formula"
"""Key of a node's ``meta``: number of the autograd formula that created it; None for other nodes,
such as sums of gradients between two formulas."""
KEPT = "fxpart_kept"
"""Key of a node's ``meta``: the `ORDER` of the last node during which something other than a call
holds its result: a user's Function (`fxpart.capture.training.python_calls`), the backward of a
block that is recomputed whole (`fxpart.capture.training.checkpointing.WHOLE`), or a formula that
saved it for its size alone."""
SAVED = "fxpart_saved"
"""Key of a node's ``meta``, only in the forward of a checkpointed block: the number of the run
through it for which its result is kept, whether or not it is read. See `checkpoint_blocks`."""


@dataclass(frozen=True, eq=False, slots=True)
class Label:
    """The labels of a node."""

    stack: dict[str, Any]
    """The module stack, as `torch.export` writes it."""
    forward: int | None = None
    """In the backward; see `FORWARD`."""
    exported: str | None = None
    """In the forward; see `EXPORTED`."""
    formula: int | None = None
    """In the backward; see `FORMULA`."""
    call: int | None = None
    """In the forward; see `fxpart.capture.inference.eager_lifetimes.CALL`."""


NOWHERE = Label({})


@dataclass(eq=False)
class Labels:
    """Labels the nodes of a graph while it is traced."""

    graph: fx.Graph
    label: Label = NOWHERE
    done: fx.Node | None = None
    """The last labelled node."""
    count: int = 0
    """Number of labelled nodes."""
    formulas: int = 0
    """Number of autograd formulas begun."""
    tagged: dict[Node, Label] = field(default_factory=dict)
    """Labels of autograd's nodes, those of the calls that created them."""
    hooks: list[RemovableHandle] = field(default_factory=list)
    saved: list[tuple[fx.Node, int, fx.Node]] = field(default_factory=list)
    """Nodes whose results an autograd formula saved, its number, and its last node."""
    python: PythonCalls = field(init=False)
    """Watches the users' Functions; entered by the caller if there are any."""

    def __post_init__(self) -> None:
        self.python = PythonCalls(self.graph)

    def begin(self, label: Label) -> None:
        """Label the nodes since the last call; the next nodes get `label`."""
        fresh = []
        for node in reversed(self.graph.nodes):
            if node is self.done:
                break
            fresh.append(node)
        for node in reversed(fresh):
            node.meta["nn_module_stack"] = self.label.stack
            node.meta[FORWARD] = self.label.forward
            node.meta[EXPORTED] = self.label.exported
            node.meta[FORMULA] = self.label.formula
            node.meta[CALL] = self.label.call if self.label.forward is None else NO_CALL
            node.meta[ORDER] = self.count
            self.count += 1
        self.done = fresh[0] if fresh else self.done
        self.label = label

    def tag(self, result: object, stack: dict[str, Any]) -> None:
        """Assign `stack` to the autograd nodes behind `result` that have no label yet."""
        self.begin(self.label)
        label = Label(stack, self.count - 1)
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        pending = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
        while pending:
            node = pending.pop()
            if node not in self.tagged:
                self.tagged[node] = label
                pending.extend(parent for parent, _ in node.next_functions if parent is not None)

    def start_backward(self) -> None:
        """Register hooks that report which call's gradient autograd is computing."""
        self.begin(Label({}, self.count - 1))
        maker_of: dict[int, fx.Node] = {}
        for maker in self.graph.nodes:
            for key in _storages(maker):
                maker_of.setdefault(key, maker)
        for node, label in self.tagged.items():
            begin = _Begin(self, node, label, maker_of)
            self.hooks += [node.register_prehook(begin), node.register_hook(_End(begin))]

    def finish(self) -> None:
        """Label the remaining nodes, and drop autograd's graph."""
        self.begin(NOWHERE)
        self.tagged.clear()
        for hook in self.hooks:  # a hook refers to its node, which refers to the hook
            hook.remove()
        self.python.hold_to_the_end()
        self._keep_unread()
        for node, last in self.python.last.items():
            node.meta[KEPT] = last.meta[ORDER]

    def _keep_unread(self) -> None:
        """Set `KEPT` on what formulas saved and do not read, such as the operand of a gather."""
        read: dict[int, set[int]] = {}
        for node in self.graph.nodes:
            number = node.meta.get(FORMULA)
            if number is not None:
                operands = read.setdefault(number, set())
                operands.update(key for i in node.all_input_nodes for key in _storages(i))
        for node, number, last in self.saved:
            if node.op == "call_function" and not _storages(node) & read.get(number, set()):
                node.meta[KEPT] = max(node.meta.get(KEPT, -1), last.meta[ORDER])


def _storages(node: fx.Node) -> set[int]:
    """Return the storages of a node's results."""
    leaves = tree_leaves(node.meta.get("val"))
    return {storage_key(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


def _saved_storages(node: Node) -> set[int]:
    """Return the storages of the tensors that one of autograd's nodes saved."""
    names = (name for name in dir(node) if name.startswith("_saved_"))
    leaves = tree_leaves([getattr(node, name) for name in names])
    if isinstance(node, BackwardCFunction):
        # By a user's `save_for_backward`. Overwritten since, only a backward that reads it fails.
        with suppress(RuntimeError):
            leaves += tree_leaves(node.saved_tensors)
    return {storage_key(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


@dataclass(eq=False)
class _Begin:
    """Hook that autograd calls right before one of its nodes runs."""

    labels: Labels
    node: Node
    label: Label
    maker_of: dict[int, fx.Node]
    """The first node of the graph with each storage."""
    saved: list[fx.Node] = field(default_factory=list)
    """Nodes whose results autograd's node saved, once it runs."""

    @property
    def is_python(self) -> bool:
        """Whether autograd's node is a user's Function."""
        return isinstance(self.node, BackwardCFunction)

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Label the next nodes as a formula of the call being differentiated."""
        number = self.labels.formulas
        self.labels.formulas += 1
        self.labels.begin(Label(self.label.stack, self.label.forward, formula=number))
        # Not before: what a node that never runs has saved may have been overwritten.
        keys = _saved_storages(self.node)
        self.saved = [self.maker_of[key] for key in keys if key in self.maker_of]
        if self.is_python:
            self.labels.python.begin()


@dataclass(eq=False)
class _End:
    """Hook that autograd calls right after one of its nodes has run."""

    begin: _Begin

    def __call__(self, results: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Label the next nodes, sums of the results, with the call but without a formula."""
        labels = self.begin.labels
        if self.begin.is_python:
            labels.python.end(results)
        number = labels.label.formula
        labels.begin(self.begin.label)
        if labels.done is not None and number is not None:
            labels.saved += [(node, number, labels.done) for node in self.begin.saved]

"""What the nodes of a training step's graph belong to, written down while the graph is made."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

__all__ = ["BLOCK", "EXPORTED", "FORMULA", "FORWARD", "NOWHERE", "ORDER", "Label", "Labels"]

BLOCK = "fxpart_block"
"""Key of a node's ``meta``, only in the backward of a checkpointed block: the number of the run
through it. What is computed again has it, and formulas that saved something of the forward."""
EXPORTED = "fxpart_exported"
"""Key of a node's ``meta``: the name of the exported node that it is a call of, in the forward;
None in the backward and for the loss."""
ORDER = "fxpart_order"
"""Key of a node's ``meta``: how many nodes were written down before it, removed ones included. Of a
node that computes something again, the number of what it computes again."""
FORWARD = "fxpart_forward"
"""Key of a node's ``meta``: the `ORDER` of the last node of the forward call whose gradient the
node computes; None in the forward."""
FORMULA = "fxpart_formula"
"""Key of a node's ``meta``: number of the formula of autograd that made it; None for all others,
such as the sums of gradients between two formulas."""


@dataclass(frozen=True, eq=False, slots=True)
class Label:
    """What a node of the graph being made belongs to."""

    stack: dict[str, Any]
    """The module, as `torch.export` writes it."""
    forward: int | None = None
    """Of a node of the backward, see `FORWARD`."""
    exported: str | None = None
    """Of a node of the forward, see `EXPORTED`."""
    formula: int | None = None
    """Of a node of the backward, see `FORMULA`."""


NOWHERE = Label({})


@dataclass(eq=False)
class Labels:
    """Writes into the nodes of a graph that is being made what they belong to."""

    graph: fx.Graph
    label: Label = NOWHERE
    done: fx.Node | None = None
    """The last node that has its label."""
    count: int = 0
    """Nodes that have one."""
    formulas: int = 0
    """Formulas of autograd that have begun."""
    tagged: dict[Node, Label] = field(default_factory=dict)
    """Autograd's nodes, and the calls that made them."""

    def begin(self, label: Label) -> None:
        """Label what was made since the last call; what is made next belongs to `label`."""
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
            node.meta[ORDER] = self.count
            self.count += 1
        self.done = fresh[0] if fresh else self.done
        self.label = label

    def tag(self, result: object, stack: dict[str, Any]) -> None:
        """Remember that what autograd recorded for `result`, and nobody has yet, is of `stack`."""
        self.begin(self.label)
        label = Label(stack, self.count - 1)
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        waiting = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node not in self.tagged:
                self.tagged[node] = label
                waiting.extend(before for before, _ in node.next_functions if before is not None)

    def start_backward(self) -> None:
        """From here on, autograd says which call's gradient is being computed."""
        self.begin(Label({}, self.count - 1))
        for node, label in self.tagged.items():
            node.register_prehook(_Begin(self, label))
            node.register_hook(_End(self, label))

    def finish(self) -> None:
        """Label the rest, and let go of autograd's graph."""
        self.begin(NOWHERE)
        self.tagged.clear()


@dataclass(eq=False)
class _Begin:
    """Called by autograd right before one of its nodes runs."""

    labels: Labels
    label: Label

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Let what is made next belong to the call whose gradient is next."""
        number = self.labels.formulas
        self.labels.formulas += 1
        self.labels.begin(Label(self.label.stack, self.label.forward, formula=number))


@dataclass(eq=False)
class _End:
    """Called by autograd right after one of its nodes has run."""

    labels: Labels
    label: Label

    def __call__(self, results: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Let what is made next, sums of the results, be of the call but of no formula."""
        self.labels.begin(self.label)

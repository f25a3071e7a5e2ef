"""`delay_weight_gradients`: reorder a training step to compute weight gradients last.

Autograd computes all gradients of a call together, that of its weight before or after that of its
input, although earlier layers only wait for the latter. Here the backward first computes everything
that earlier layers depend on and then, in the same order, everything that only contributes to
weight gradients. This is how a zero-bubble pipeline runs a stage on a device: first the input
gradient, sent at once, then the weight gradients, for which activations and gradients stay alive.

Reference: Qi, Wan, Huang, Lin: Zero bubble pipeline parallelism. ICLR 2024, arXiv:2401.10241.
"""

import operator
from bisect import bisect_right
from collections.abc import Collection

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from fxpart.capture.calls import storage_key, written_operands
from fxpart.capture.training.joint_labels import FORMULA, FORWARD, ORDER

__all__ = ["delay_weight_gradients"]


def delay_weight_gradients(graph: fx.Graph, inputs: Collection[fx.Node]) -> None:
    """Move nodes that only lead to weight gradients to the end of the backward, in order.

    In-place writes keep their position among the readers of the tensor, and a call that computes
    both gradients at once, such as that of a convolution, is not moved. An autograd formula whose
    weight part is moved is split in two, so that each part frees the tensors saved for it alone.

    Args:
        graph: graph of a training step from `fxpart.capture.training.joint_trace.trace_step`,
            modified in place.
        inputs: the placeholders that are the user's inputs, not weights.

    """
    weight_orders, staying = _from_weights(graph, inputs), set[fx.Node]()
    while True:
        late = _weight_gradients(graph, weight_orders, staying)
        # A node that stays forces its operands to stay, so repeat until nothing changes.
        stuck = _stuck(graph, late)
        if not stuck:
            break
        staying |= stuck
    moved = [node for node in graph.nodes if node in late]
    formulas = {node.meta[FORMULA] for node in graph.nodes if node.meta.get(FORMULA) is not None}
    first = max(formulas, default=0) + 1
    output = graph.output_node()
    for node in moved:
        output.prepend(node)
        if node.meta[FORMULA] is not None:
            node.meta[FORMULA] += first
    graph.lint()


def _from_weights(graph: fx.Graph, inputs: Collection[fx.Node]) -> list[int]:
    """Return the sorted `ORDER` of forward nodes not reachable from an input, such as casts."""
    reached, orders = set(inputs), list[int]()
    for node in graph.nodes:
        if node.op != "call_function" or node.meta.get(FORWARD) is not None:
            continue
        if any(operand in reached for operand in node.all_input_nodes):
            reached.add(node)
        else:
            orders.append(node.meta[ORDER])
    return sorted(orders)


def _weight_gradients(
    graph: fx.Graph, weight_orders: list[int], staying: Collection[fx.Node]
) -> set[fx.Node]:
    """Return the backward nodes whose results only reach weight gradients, no earlier layer.

    A result read by another call's formula reaches earlier layers, unless that call only prepared a
    weight. Nodes in `staying` are excluded.
    """

    def stays(user: fx.Node, node: fx.Node) -> bool:
        formula, forward = user.meta[FORMULA], user.meta[FORWARD]
        if formula is None or formula == node.meta[FORMULA] or forward == node.meta[FORWARD]:
            return True
        position = bisect_right(weight_orders, forward)
        return position > 0 and weight_orders[position - 1] == forward

    late: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.meta.get(FORWARD) is None or not node.users:
            continue
        if node in staying:
            continue
        if all(u.op == "output" or (u in late and stays(u, node)) for u in node.users):
            late.add(node)
    return late


def _stuck(graph: fx.Graph, late: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes of `late` that cannot be moved.

    They share a written tensor with other nodes of the backward, or are an item of a call that also
    produces an item for earlier layers.
    """
    touching: dict[int, list[fx.Node]] = {}
    written: set[int] = set()
    for node in graph.nodes:
        if node.meta.get(FORWARD) is None:
            continue
        for near in (node, *node.all_input_nodes):
            for key in _storages(near):
                touching.setdefault(key, []).append(node)
        written.update(key for operand in written_operands(node) for key in _storages(operand))
    stuck = {
        node
        for node in late
        if node.target is operator.getitem and not late.issuperset(node.all_input_nodes)
    }
    for key in sorted(written):
        inside = [node for node in touching.get(key, ()) if node in late]
        if len(inside) < len(touching.get(key, ())):
            stuck.update(inside)
    return stuck


def _storages(node: fx.Node) -> list[int]:
    tensors = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    return list(dict.fromkeys(storage_key(tensor) for tensor in tensors))

"""Which inputs of an exported module its operators write to."""

import operator

from torch import fx, nn
from torch._ops import OpOverload

__all__ = ["mutated_inputs"]


def mutated_inputs(module: fx.GraphModule) -> tuple[int, ...]:
    """Return the positions of the inputs that an operator writes to, itself or through a view.

    By the operators' schemas: an operator that may return a view of an operand counts as one.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    roots: dict[fx.Node, frozenset[int]] = {
        node: frozenset([position]) for position, node in enumerate(placeholders)
    }
    written: set[int] = set()
    regions_write = any(_writes(inner) for inner in module.modules() if inner is not module)
    for node in module.graph.nodes:
        if node.op != "call_function" or node in roots:
            continue
        if not isinstance(node.target, OpOverload):
            # An item of a tuple; or a region run under another mode, which is not looked into.
            shares = frozenset().union(*(roots.get(n, ()) for n in node.all_input_nodes))
            roots[node] = shares
            if regions_write and node.target is not operator.getitem:
                written |= shares
            continue
        shares = frozenset()
        for operand, writes in _aliased(node, node.target):
            shares |= roots.get(operand, frozenset())
            if writes:
                written |= roots.get(operand, frozenset())
        roots[node] = shares
    return tuple(sorted(written))


def _writes(inner: nn.Module) -> bool:
    return isinstance(inner, fx.GraphModule) and any(
        isinstance(node.target, OpOverload) and node.target._schema.is_mutable
        for node in inner.graph.nodes
    )


def _aliased(node: fx.Node, target: OpOverload) -> list[tuple[fx.Node, bool]]:
    """Return the operands that share memory with a result or are written to, and whether so."""
    found = []
    for position, argument in enumerate(target._schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is None or given is None:
            continue
        operands = given if isinstance(given, list | tuple) else [given]
        writes = argument.alias_info.is_write
        found += [(operand, writes) for operand in operands if isinstance(operand, fx.Node)]
    return found

"""Which results of an operator lie in the memory of an operand, by what its schema says."""

from functools import cache

from torch import fx
from torch._C import DispatchKey
from torch._ops import OpOverload

__all__ = ["operand_of_result"]


def operand_of_result(node: fx.Node, result: int, item: int) -> fx.Node | None:
    """Return the operand that result number `result` of a node is a view of, or written into.

    Where results or operands are lists, `item` is the place there. None where the schema does not
    say so for certain: ``reshape`` or ``to`` return what they were given, or a copy.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return None
    sources = _sources(target)
    if result >= len(sources) or sources[result] is None:
        return None
    place, name = sources[result] or (0, "")
    operand = node.args[place] if place < len(node.args) else node.kwargs.get(name)
    if isinstance(operand, list | tuple):
        operand = operand[item] if item < len(operand) else None
    return operand if isinstance(operand, fx.Node) else None


@cache
def _sources(operator: OpOverload) -> tuple[tuple[int, str] | None, ...]:
    """Return for each result the place and the name of the operand that lends its memory."""
    schema = operator._schema
    operands = [
        (place, argument.name, argument.alias_info)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
    ]
    composite = operator.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
    view = operator.is_view and not composite and len(operands) == 1
    found: list[tuple[int, str] | None] = []
    for result in schema.returns:
        alias = result.alias_info
        source = None
        if alias is not None and alias.is_write:
            same = [o for o in operands if o[2].before_set & alias.before_set]
            source = same[0][:2] if same else None
        elif alias is not None and view:
            source = operands[0][:2]
        found.append(source)
    return tuple(found)

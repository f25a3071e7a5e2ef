"""Rules for matrix products, which are partial if they sum over the batch.

Each dimension of the operands has a label, as in Einstein notation.
"""

from collections.abc import Sequence
from dataclasses import replace

from fxpart.capture.batch_dim.call import Call
from fxpart.capture.batch_dim.layout import PARTIAL, Layout
from fxpart.capture.batch_dim.rules.neighbours import ALONG
from fxpart.capture.batch_dim.rules.per_example import PAIRS, SCALES, per_example

__all__ = ["addmm", "einsum", "grouped_product", "linear", "matmul"]


def _product(
    call: Call, values: Sequence[object], labels: Sequence[Sequence[str]], out: Sequence[str]
) -> Layout:
    """Return the layout of a product of two tensors with labelled dimensions."""
    layouts = [call.layout(value) for value in values]
    if any(x.is_partial for x in layouts) and (
        sum(x.is_partial for x in layouts) > 1 or any(x.is_split for x in layouts)
    ):
        layouts = [call.whole(value) for value in values]
    scale = sum(layout.scale for layout in layouts)
    zero = any(layout.is_zero for layout in layouts)
    partial = next((layout for layout in layouts if layout.is_partial), None)
    if partial is not None:
        return replace(partial, scale=scale, is_zero=zero)
    along = {labels[i][layout.dim]: layout for i, layout in enumerate(layouts) if layout.is_split}
    if not along:
        return Layout(scale=scale, is_zero=zero)
    label, first = next(iter(along.items()))
    differs = PAIRS if len(along) > 1 else ""
    if label in out:
        return Layout(out.index(label), first.outer, scale, differs=differs, is_zero=zero)
    return Layout(PARTIAL, scale=scale, differs=differs, is_zero=zero)


def _matmul_labels(first: int, second: int) -> tuple[list[str], list[str], list[str]]:
    """Return the labels of two operands of the given ranks, and of their product."""
    if first == 1 and second == 1:
        return ["k"], ["k"], []
    rows, columns = (["m"] if first > 1 else []), (["n"] if second > 1 else [])
    wide = max(first, second) - 2
    lead = [f"b{i}" for i in range(max(wide, 0))]
    left = [*lead[len(lead) - max(first - 2, 0) :], *rows, "k"]
    right = [*lead[len(lead) - max(second - 2, 0) :], "k", *columns]
    return left, right, lead + rows + columns


def matmul(call: Call) -> list[Layout]:
    """Return the layout of ``mm``, ``bmm``, ``mv``, ``dot`` and ``matmul``."""
    values = call.operands[:2]
    if len(values) == 1:
        values *= 2
    left, right, out = _matmul_labels(*(len(call.sizes(value)) for value in values))
    return [_product(call, values, [left, right], out)]


def addmm(call: Call) -> list[Layout]:
    """Return the layout of ``addmm``, ``baddbmm`` and ``addmv``: a product plus a tensor."""
    names = list(call.arguments)
    values = [call.arguments[name] for name in names[1:3]]
    left, right, out = _matmul_labels(*(len(call.sizes(value)) for value in values))
    product = _product(call, values, [left, right], out)
    return [_plus(call, product, call.arguments["self"])]


def linear(call: Call) -> list[Layout]:
    """Return the layout of ``linear``, which sums over the last dimensions of input and weight."""
    values = [call.arguments["input"], call.arguments["weight"]]
    lead = [f"b{i}" for i in range(len(call.sizes(values[0])) - 1)]
    out = ["o"] if len(call.sizes(values[1])) > 1 else []
    product = _product(call, values, [[*lead, "k"], [*out, "k"]], [*lead, *out])
    bias = call.arguments.get("bias")
    return [product if bias is None else _plus(call, product, bias)]


def _plus(call: Call, product: Layout, term: object) -> Layout:
    """Return the layout of a product plus `term`."""
    term_layout = call.layout(term)
    if term_layout.is_zero or (product.is_partial and term_layout == product):
        return product
    if product.is_partial:
        # A complete term must not be added to each part.
        return (
            product if term_layout.scale + 1 == product.scale else replace(product, differs=SCALES)
        )
    term_layout = call.aligned(term, call.rank(), call.whole(term))
    differs = product.differs or (SCALES if term_layout.scale != product.scale else "")
    if product.is_split and term_layout.is_split and term_layout.dim != product.dim:
        differs = differs or PAIRS
    return replace(
        product if product.is_split else term_layout, scale=product.scale, differs=differs
    )


def einsum(call: Call) -> list[Layout]:
    """Return the layout of ``einsum`` of two tensors without an ellipsis."""
    equation = str(call.arguments["equation"]).replace(" ", "")
    values = call.arguments["tensors"]
    operand_labels, arrow, out = equation.partition("->")
    labels = operand_labels.split(",")
    if not arrow or "." in equation or len(values) != 2:
        return per_example(call)
    return [_product(call, values, labels, list(out))]


def grouped_product(call: Call) -> list[Layout]:
    """Return the layouts of products of groups of rows with one matrix each, or their gradients.

    As in a mixture of experts, with the tokens of all examples sorted by expert. Each process
    counts the ends of its own groups; the counts are partial, and read without all-reduce.
    """
    rows = next((n for n in call.operands if call.layout(n).is_split), None)
    if rows is None:
        return [Layout() for _ in call.results]
    row_layout = call.layout(rows)
    scale = max(call.layout(n).scale for n in call.operands if call.layout(n).is_split)
    layouts = []
    for sizes in call.results:
        if sizes is None:
            layouts.append(Layout())
        elif sizes[0] == call.sizes(rows)[0]:
            layouts.append(replace(row_layout, scale=scale, differs=row_layout.differs or ALONG))
        else:
            layouts.append(Layout(PARTIAL, scale=scale))
    return layouts

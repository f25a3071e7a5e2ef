"""Rules of a mixture of experts: tokens of all examples in the order of their experts."""

from dataclasses import replace

from fxpart.batch_dim.call import Call
from fxpart.batch_dim.layout import Layout
from fxpart.batch_dim.placement import PARTIAL
from fxpart.batch_dim.rules.ordering import ALONG

__all__ = ["grouped_product"]


def grouped_product(call: Call) -> list[Layout]:
    """Return the layouts of products of runs of rows with a matrix each, or of their gradients.

    Where the runs of a process end, it counts itself: that count is partial, and read as it is.
    """
    rows = next((n for n in call.operands if call.layout(n).is_split), None)
    if rows is None:
        return [Layout() for _ in call.results]
    at = call.layout(rows)
    scale = max(call.layout(n).scale for n in call.operands if call.layout(n).is_split)
    found = []
    for sizes in call.results:
        if sizes is None:
            found.append(Layout())
        elif sizes[0] == call.sizes(rows)[0]:
            found.append(replace(at, scale=scale, differs=at.differs or ALONG))
        else:
            found.append(Layout(PARTIAL, scale=scale))
    return found

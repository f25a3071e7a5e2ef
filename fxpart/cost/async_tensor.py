"""Asynchronous tensor parallelism: collectives that run during the products beside them.

As torch's inductor does with ``_micro_pipeline_tp`` over symmetric memory: an all-gather whose
result goes into products, and a product whose result is reduce-scattered, are split into as many
pieces as there are ranks, so that one piece is sent while another is multiplied. What is left to
wait for is the time by which the collective is longer than its products.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from fxpart.core.graph import AGAIN, MOST_KEPT_GRAPHS, FloatArray, OpGraph
from fxpart.core.operator_kinds import operator_name
from fxpart.core.topology import Topology
from fxpart.cost.collective_times import collective_axis, collective_kinds
from fxpart.cost.tables import LatencySource

__all__ = ["AsyncTensorTimes", "products_beside"]

_VIEWS = ("_unsafe_view", "alias", "expand", "permute", "reshape", "squeeze", "t", "transpose")
_PIECES = ("cat", "chunk", "clone", "contiguous", "getitem", "split", "stack", "unbind")
_MOVES = frozenset((*_VIEWS, *_PIECES, "unsqueeze", "view"))
"""Operators that change no element: views, and what a gather along the sequence becomes around one
along the batch."""
_PRODUCTS = ("mm", "addmm", "linear")


@dataclass(frozen=True, eq=False, slots=True)
class AsyncTensorTimes:
    """Operator times in which a collective takes what it is longer than its products."""

    others: LatencySource
    """Source of the times, with collectives that run by themselves."""

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D)."""
        times = self.others.op_time_s(graph, topology).copy()
        for collective, products in products_beside(graph).items():
            times[collective] = np.maximum(times[collective] - times[products].sum(axis=0), 0.0)
        return times


@lru_cache(maxsize=MOST_KEPT_GRAPHS)
def products_beside(graph: OpGraph) -> Mapping[int, list[int]]:
    """Return the products of each collective of a tensor-parallel group that has any.

    They read the result of an all-gather, or the reduce-scatter reads theirs, through operators
    that change no element. A product is beside one collective only.
    """
    readers: dict[int, list[int]] = {}
    for op in range(graph.n_ops):
        for value in graph.reads_of(op).tolist():
            readers.setdefault(int(graph.value_producer[value]), []).append(op)
    products_of: dict[int, list[int]] = {}
    assigned = set[int]()
    for op, kind in collective_kinds(graph).items():
        if collective_axis(graph.targets[op]) != "tensor":
            continue
        if kind == "all_gather":
            products = _after(graph, op, readers)
        elif kind == "reduce_scatter":
            products = _before(graph, op)
        else:
            continue
        products = [product for product in products if product not in assigned]
        assigned.update(products)
        if products:
            products_of[op] = products
    return MappingProxyType(products_of)


def _is_product(graph: OpGraph, op: int) -> bool:
    return bool(graph.flops[op]) and operator_name(graph.targets[op]) in _PRODUCTS


def _after(graph: OpGraph, gather: int, readers: dict[int, list[int]]) -> list[int]:
    """Return the products, of the same pass, that read the result of an all-gather."""
    products, queue, known = list[int](), [gather], {gather}
    while queue:
        for op in readers.get(queue.pop(), []):
            if op in known or graph.is_backward[op] != graph.is_backward[gather]:
                continue
            known.add(op)
            if _is_product(graph, op):
                products.append(op)
            elif _keeps_elements(graph, op):
                queue.append(op)
    # What was gathered again is also read by later products, which do not wait for it.
    again = [op for op in products if graph.names[op].endswith(AGAIN)]
    return sorted(again or products)


def _before(graph: OpGraph, scatter: int) -> list[int]:
    """Return the product whose result a reduce-scatter sums, if it sums that of one alone."""
    op = scatter
    while True:
        value = int(graph.reads_of(op)[0])
        op = int(graph.value_producer[value])
        if op < 0:
            return []
        if _is_product(graph, op):
            return [op]
        if not _keeps_elements(graph, op):
            return []


def _keeps_elements(graph: OpGraph, op: int) -> bool:
    """Return whether an operator only moves elements, such as a view or a concatenation."""
    return operator_name(graph.targets[op]) in _MOVES

"""The peak memory of each device as a formula in the symbols of a captured model.

Lifetimes do not depend on sizes, so the live bytes at each operator are a polynomial in the
symbols, and the peak is the maximum of these.
"""

from collections.abc import Iterator

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray
from fxpart.core.symbolic_graph import OF_OPERATORS, OF_VALUES, SymbolicGraph, on_graph
from fxpart.cost.holding import weight_bytes_of
from fxpart.cost.kernels import device_memory
from fxpart.cost.symbolic.formula import MaxFormula, max_formula
from fxpart.cost.tables import MemoryTables, memory_tables
from fxpart.errors import SpecError, nearest_names

__all__ = ["cost_formula", "peak_formulas"]


def peak_formulas(
    symbolic: SymbolicGraph, assignment: Assignment, n_devices: int
) -> tuple[MaxFormula, ...]:
    """Return the peak bytes of each of `n_devices` devices as formulas.

    The peak counts weights, optimizer state, inputs read there and live tensors, and equals that of
    `fxpart.cost.evaluate.evaluate` at every size from `SymbolicGraph.exact_from`, including
    replicas; at a smaller one, 1, it may be more. It is 0 on an unused device.
    O(rounds x devices x M (n + reads)), plus the removal of dominated rows.

    Raises:
        SpecError: if the assignment is for another graph or uses devices that do not exist.

    """
    assignment.check_for(symbolic.graph.n_ops, n_devices)
    # This adds the constant monomial, needed for weights, if it is missing.
    symbolic = on_graph(symbolic, symbolic.graph)
    constant = np.flatnonzero(~symbolic.exponents.any(axis=1))[0]
    memory = memory_tables(symbolic.graph)
    no_weights = np.zeros_like(memory.weight_bytes)
    # One table per monomial; columns are copied because compiled code needs contiguous arrays.
    sizes = symbolic.coefficients
    tables = [
        memory._replace(alloc_bytes=a.copy(), value_bytes=v.copy(), weight_bytes=no_weights)
        for a, v in zip(sizes["value_alloc_bytes"].T, sizes["value_bytes"].T, strict=True)
    ]
    formulas = []
    for device in range(n_devices):
        rows = np.unique(np.vstack(list(_live_rows(tables, assignment, device))), axis=0)
        on_device = np.isin(assignment.partition_of, assignment.holds(device))
        rows[:, constant] += weight_bytes_of(memory, np.flatnonzero(on_device))
        formulas.append(
            max_formula(symbolic.symbols, symbolic.exponents, rows, "bytes", symbolic.ranges)
        )
    return tuple(formulas)


def _live_rows(
    tables: list[MemoryTables], assignment: Assignment, device: int
) -> Iterator[IntArray]:
    """Yield the distinct polynomials of inputs and live tensors in each round.

    Memory is linear in the coefficients, so the graph is traversed once per column of coefficients.
    """
    yield np.zeros((1, len(tables)), dtype=np.int64)
    change = np.empty(len(assignment.partition_of) + 1, dtype=np.int64)
    for index in range(assignment.rounds):
        device_of = assignment.device_of_round(index)
        if not (device_of == device).any():
            continue
        live = np.empty((len(device_of), len(tables)), dtype=np.int64)
        for m, table in enumerate(tables):
            inputs, _ = device_memory(table, device_of, device, change)
            live[:, m] = inputs + np.cumsum(change[:-1])
        yield np.unique(live, axis=0)


# FLOPs and bytes of a captured model or a part of it, as formulas in its symbols.


def cost_formula(symbolic: SymbolicGraph, field: str, of: str | None = None) -> MaxFormula:
    """Return an item or the sum of a symbolic field as a formula.

    Args:
        symbolic: the captured model.
        field: ``flops`` or ``moved_bytes`` of operators, ``value_bytes`` or ``value_alloc_bytes``
            of values.
        of: name of an operator or a value; None for the sum of all.

    Raises:
        SpecError: if the field, operator or value does not exist, or the sum overflows int64.

    """
    fields = (*OF_OPERATORS, *OF_VALUES)
    if field not in fields:
        raise SpecError(f"{field} does not grow with sizes; {nearest_names(field, fields)}")
    table = symbolic.coefficients[field]
    if of is None:
        row = [sum(column) for column in table.T.tolist()]
    else:
        graph = symbolic.graph
        names = graph.names if field in OF_OPERATORS else graph.value_names
        if of not in names:
            raise SpecError(f"{of} is not a name of {field}; {nearest_names(of, names)}")
        row = table[names.index(of)].tolist()
    if any(abs(number) >= 2**63 for number in row):
        raise SpecError(f"the sum of {field} has coefficients that no int64 holds")
    unit = "FLOP" if field == "flops" else "bytes"
    rows = np.array([row], dtype=np.int64)
    return max_formula(symbolic.symbols, symbolic.exponents, rows, unit, symbolic.ranges)

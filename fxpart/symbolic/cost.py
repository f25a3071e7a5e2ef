"""FLOPs and bytes of a captured model, or of a part of it, as formulas in its symbols."""

import numpy as np

from fxpart.errors import SpecError, nearest_names
from fxpart.symbolic.formula import MaxFormula, max_formula
from fxpart.symbolic.graph import OF_OPERATORS, OF_VALUES, SymbolicGraph

__all__ = ["cost_formula"]


def cost_formula(symbolic: SymbolicGraph, field: str, of: str | None = None) -> MaxFormula:
    """Return a column of the graph, or its sum, as a formula; `MaxFormula.sympy` writes it out.

    Args:
        symbolic: the captured model.
        field: ``flops`` or ``moved_bytes`` of operators, ``value_bytes`` or ``value_alloc_bytes``
            of values.
        of: name of an operator or a value; None for all of them added up.

    Raises:
        SpecError: for a field, an operator or a value that does not exist, and for a sum that no
            int64 holds.

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
            raise SpecError(f"{of} is no name of {field}; {nearest_names(of, names)}")
        row = table[names.index(of)].tolist()
    if any(abs(number) >= 2**63 for number in row):
        raise SpecError(f"the sum of {field} has coefficients that no int64 holds")
    unit = "FLOP" if field == "flops" else "bytes"
    rows = np.array([row], dtype=np.int64)
    return max_formula(symbolic.symbols, symbolic.exponents, rows, unit, symbolic.ranges)

"""`step_graph`: build the arrays of a training step, with partners, gradients and lifetimes.

A partner is the forward operator of a backward one; lifetimes are those of values kept by autograd,
by a checkpointed block, or by a backward written in Python.
"""

from bisect import bisect_right
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import fx
from torch.export import ExportedProgram

from fxpart.capture.training.joint_labels import (
    BLOCK,
    EXPORTED,
    FORMULA,
    FORWARD,
    KEPT,
    ORDER,
    SAVED,
)
from fxpart.core.granularity import join_groups
from fxpart.core.graph import OpGraph, csr

__all__ = ["exported_names_of", "step_graph", "with_block_lifetimes", "with_formula_lifetimes"]


# Lifetimes.


def with_formula_lifetimes(
    graph: OpGraph, formula: Sequence[int | None], held: Container[int] = ()
) -> OpGraph:
    """Return `graph` with the last operator of each formula reading all inputs of the formula.

    Autograd computes the gradient of a call by one formula, which may be several operators. Saved
    tensors and incoming gradients are freed at the end of the formula, not after their last reader;
    values computed inside the formula are freed after their last reader. No transfer is added:
    operators of one formula must be in one group.

    Args:
        graph: graph of a training step.
        formula: the formula number of each operator; None for other operators.
        held: values whose release is known, which are not extended.

    """
    last = {number: op for op, number in enumerate(formula) if number is not None}
    rows = [graph.reads_of(op).tolist() for op in range(graph.n_ops)]
    extra: dict[int, dict[int, None]] = {number: {} for number in last}
    producer = graph.value_producer.tolist()
    for op, number in enumerate(formula):
        if number is None:
            continue
        for value in rows[op]:
            maker = producer[value]
            if value not in held and (maker < 0 or formula[maker] != number):
                extra[number][value] = None
    for number, op in last.items():
        rows[op] = list(dict.fromkeys([*rows[op], *extra[number]]))
    start, reads = csr(rows)
    return replace(graph, read_start=start, reads=reads.astype(np.int64))


def with_block_lifetimes(
    graph: OpGraph,
    again: Sequence[int | None],
    saving: Sequence[int | None],
    saved: Sequence[int | None] = (),
) -> OpGraph:
    """Return `graph` with formulas of a block's backward also reading the inputs of the block.

    `torch.utils.checkpoint` keeps the inputs of a block, for its recomputation, until the last
    formula of its backward that saved anything. No transfer is added: operands of a recomputed
    operator are kept for the last formula of its own group, which computes its gradient. So an
    input of a block is kept to the end if an operator that reads it saves something for its
    gradient.

    Args:
        graph: graph of a training step.
        again: the run through a block of each recomputed operator; None for others.
        saving: the run of each operator of a formula that saved values of it; None for others.
        saved: the run for which an operator's results are kept; None for others.

    """
    group = graph.group.tolist()
    last = {(number, group[op]): op for op, number in enumerate(saving) if number is not None}
    rows = [graph.reads_of(op).tolist() for op in range(graph.n_ops)]
    producer = graph.value_producer.tolist()
    extra: dict[int, list[int]] = {}
    for op, number in enumerate(again):
        end = None if number is None else last.get((number, group[op]))
        if end is not None:
            outside = [v for v in rows[op] if producer[v] < 0 or again[producer[v]] != number]
            extra.setdefault(end, []).extend(outside)
    for value, op in enumerate(producer if saved else ()):
        number = saved[op] if op >= 0 else None
        end = None if number is None else last.get((number, group[op]))
        if end is not None:
            extra.setdefault(end, []).append(value)
    for op, values in extra.items():
        rows[op] = list(dict.fromkeys([*rows[op], *values]))
    start, reads = csr(rows)
    return replace(graph, read_start=start, reads=reads.astype(np.int64))


def _expression_ends(graph: OpGraph, formula: Sequence[int | None]) -> dict[int, int]:
    """Return the operator of its formula that follows the last reader of each value made there.

    Operands of an expression in C++ live until the whole expression is computed.
    """
    following: dict[int, int] = {}
    previous: dict[int, int] = {}
    for op, number in enumerate(formula):
        if number is not None:
            if number in previous:
                following[previous[number]] = op
            previous[number] = op
    makers = graph.value_producer.tolist()
    ends: dict[int, int] = {}
    for op, number in enumerate(formula):
        for value in graph.reads_of(op).tolist() if op in following else ():
            if makers[value] >= 0 and formula[makers[value]] == number:
                ends[value] = following[op]
    return ends


def _last_held(graph: OpGraph, calls: Sequence[fx.Node]) -> dict[int, int]:
    """Return the last operator that begins before each value inside a user's Function is released.

    Values released right after they are computed are left out. See `KEPT`.
    """
    traced = [
        (node.meta[ORDER], op)
        for op, node in enumerate(calls)
        if node.meta.get(BLOCK) is None or node.meta.get(FORMULA) is not None
    ]
    traced.sort()
    last_held: dict[int, int] = {}
    for value, op in enumerate(graph.value_producer.tolist()):
        order = calls[op].meta.get(KEPT) if op >= 0 else None
        if order is not None:
            # The last node itself may have been removed for lack of users.
            _, last = traced[bisect_right(traced, (order, graph.n_ops)) - 1]
            if last > op:
                last_held[value] = last
    return last_held


def step_graph(graph: OpGraph, program: ExportedProgram, gradients: Mapping[str, str]) -> OpGraph:
    """Return `graph` with partners, groups, gradients and lifetimes.

    Args:
        graph: operators of `program`, by the names of its call nodes; calls that are not operators,
            such as those that compute sizes, may be missing. Sizes are not used.
        program: the training step built by `fxpart.capture.training.joint_program`.
        gradients: the name of the gradient of each weight or input.

    """
    calls = _calls(graph, program)
    formula = [node.meta.get(FORMULA) for node in calls]
    last_held = _last_held(graph, calls)
    extended = with_formula_lifetimes(_with_partners(graph, calls), formula, last_held)
    block = [node.meta.get(BLOCK) for node in calls]
    # Recomputed operators belong to no formula.
    again = [
        None if formula_run is not None else run
        for run, formula_run in zip(block, formula, strict=True)
    ]
    saving = [
        None if formula_run is None else run
        for run, formula_run in zip(block, formula, strict=True)
    ]
    saved = [node.meta.get(SAVED) for node in calls]
    extended = with_block_lifetimes(extended, again, saving, saved)
    held = np.full(graph.n_values, -1, dtype=np.int64)
    held[: len(graph.value_held)] = graph.value_held
    for value, op in (_expression_ends(graph, formula) | last_held).items():
        held[value] = max(held[value], op)
    return _with_gradients(replace(extended, value_held=held), gradients)


def exported_names_of(graph: OpGraph, program: ExportedProgram) -> tuple[str, ...]:
    """Return the exported call of each operator, ``""`` if none."""
    return tuple(node.meta.get(EXPORTED) or "" for node in _calls(graph, program))


def _calls(graph: OpGraph, program: ExportedProgram) -> list[fx.Node]:
    by_name = {n.name: n for n in program.graph.nodes if n.op == "call_function"}
    return [by_name[name] for name in graph.names]


def _with_gradients(graph: OpGraph, gradients: Mapping[str, str]) -> OpGraph:
    """Return `graph` with its gradients and their weights.

    Gradients that are constants of the graph, and those of inputs or unused weights, are left out.
    """
    value_of = {name: value for value, name in enumerate(graph.value_names)}
    weight_of = {name: weight for weight, name in enumerate(graph.weight_names)}
    pairs = [
        (value_of[value], weight_of[name])
        for name, value in gradients.items()
        if value in value_of and name in weight_of
    ]
    values, weights = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return replace(graph, gradient_values=values.copy(), gradient_weights=weights.copy())


def _with_partners(graph: OpGraph, calls: list[fx.Node]) -> OpGraph:
    """Return `graph` with the forward operator of each backward one.

    The two share a group, as do the operators of one exported call.
    """
    forward_ops = [op for op, node in enumerate(calls) if node.meta.get(FORWARD) is None]
    orders = [calls[op].meta[ORDER] for op in forward_ops]
    forward_of = np.arange(graph.n_ops)
    first_part: dict[str, int] = {}
    label = np.arange(graph.n_ops)
    for op, node in enumerate(calls):
        forward_order = node.meta.get(FORWARD)
        if forward_order is not None and forward_ops:
            # That node may have been removed for lack of users, and is replaced by the last
            # remaining one before it, or else by the first.
            forward_of[op] = forward_ops[max(bisect_right(orders, forward_order) - 1, 0)]
        elif node.meta.get(EXPORTED):
            label[op] = first_part.setdefault(node.meta[EXPORTED], op)
    group = join_groups(join_groups(graph.group, forward_of), label)
    return replace(graph, forward_of=forward_of, group=group)

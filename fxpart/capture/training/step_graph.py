"""The arrays of a training step: which forward operator each backward one belongs to.

And which values are gradients, and how long autograd holds what it saved.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import fx
from torch.export import ExportedProgram

from fxpart.capture.training.joint_labels import BLOCK, EXPORTED, FORMULA, FORWARD, ORDER
from fxpart.core.granularity import join_groups
from fxpart.core.graph import OpGraph, csr

__all__ = ["exported_names_of", "held_by_blocks", "held_to_the_end", "step_graph"]


# What a backward formula of autograd holds: all that it was given, until it ends.
#
# Autograd computes the gradient of one call by one formula, which may be several operators. The
# tensors that the forward saved for it are let go, and the gradients that came in are dropped, when
# the whole formula is done; not each after the last operator that reads it.


def held_to_the_end(graph: OpGraph, formula: Sequence[int | None]) -> OpGraph:
    """Return `graph` with all that a formula takes read by the last operator of the formula too.

    What the formula makes itself is dropped after its last reader, as its own variables are.
    Nothing is transferred that was not: operators of one formula must be of one group.

    Args:
        graph: of a training step.
        formula: for each operator the number of its formula; None for those of none.

    """
    last = {number: op for op, number in enumerate(formula) if number is not None}
    rows = [graph.reads_of(op).tolist() for op in range(graph.n_ops)]
    held: dict[int, dict[int, None]] = {number: {} for number in last}
    producer = graph.value_producer.tolist()
    for op, number in enumerate(formula):
        if number is None:
            continue
        for value in rows[op]:
            maker = producer[value]
            if maker < 0 or formula[maker] != number:
                held[number][value] = None
    for number, op in last.items():
        rows[op] = list(dict.fromkeys([*rows[op], *held[number]]))
    start, reads = csr(rows)
    return replace(graph, read_start=start, reads=reads.astype(np.int64))


# How long a checkpointed block holds what came into it: until its backward ends.
#
# `torch.utils.checkpoint` keeps what a block was given, to compute it again from, as long as a
# formula of the block's backward is to come that saved something.


def held_by_blocks(
    graph: OpGraph, again: Sequence[int | None], saving: Sequence[int | None]
) -> OpGraph:
    """Return `graph` with what blocks are computed again from read by formulas of their backward.

    Nothing is transferred that was not: what an operator reads to be computed again is held for the
    last formula of its own group, the one that computes its gradient. What comes into a block is
    held to its end so where an operator reads it that saves something for its gradient.

    Args:
        graph: of a training step.
        again: for each operator that is computed again the number of the run through a block that
            it belongs to; None for all others.
        saving: for each operator of a formula that saved something of such a run the number of the
            run; None for all others.

    """
    group = graph.group.tolist()
    last = {(number, group[op]): op for op, number in enumerate(saving) if number is not None}
    rows = [graph.reads_of(op).tolist() for op in range(graph.n_ops)]
    producer = graph.value_producer.tolist()
    held: dict[int, list[int]] = {}
    for op, number in enumerate(again):
        end = None if number is None else last.get((number, group[op]))
        if end is not None:
            outside = [v for v in rows[op] if producer[v] < 0 or again[producer[v]] != number]
            held.setdefault(end, []).extend(outside)
    for op, values in held.items():
        rows[op] = list(dict.fromkeys([*rows[op], *values]))
    start, reads = csr(rows)
    return replace(graph, read_start=start, reads=reads.astype(np.int64))


def step_graph(graph: OpGraph, program: ExportedProgram, gradients: Mapping[str, str]) -> OpGraph:
    """Return `graph` told of partners, groups and gradients.

    Args:
        graph: operators of `program`, by the names of its call nodes; calls that are no operators,
            such as those that compute sizes, may be missing. Sizes are not looked at.
        program: the training step, as `fxpart.capture.training.joint_program` makes it.
        gradients: weight, or input, to the name of the value that is its gradient.

    """
    calls = _calls(graph, program)
    formula = [node.meta.get(FORMULA) for node in calls]
    held = held_to_the_end(_with_partners(graph, calls), formula)
    block = [node.meta.get(BLOCK) for node in calls]
    # What is computed again is of no formula.
    again = [None if of is not None else run for run, of in zip(block, formula, strict=True)]
    saving = [None if of is None else run for run, of in zip(block, formula, strict=True)]
    held = held_by_blocks(held, again, saving)
    return _with_gradients(held, gradients)


def exported_names_of(graph: OpGraph, program: ExportedProgram) -> tuple[str, ...]:
    """Return for each operator the exported call that it is a part of; ``""`` for none."""
    return tuple(node.meta.get(EXPORTED) or "" for node in _calls(graph, program))


def _calls(graph: OpGraph, program: ExportedProgram) -> list[fx.Node]:
    by_name = {n.name: n for n in program.graph.nodes if n.op == "call_function"}
    return [by_name[name] for name in graph.names]


def _with_gradients(graph: OpGraph, gradients: Mapping[str, str]) -> OpGraph:
    """Return `graph` told which of its values are gradients of which of its weights.

    A gradient that is a constant of the graph, or of an input or an unused weight, is none.
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

    The two stay on one device, and so do the parts of one exported call.
    """
    forward_ops = [op for op, node in enumerate(calls) if node.meta.get(FORWARD) is None]
    orders = [calls[op].meta[ORDER] for op in forward_ops]
    forward_of = np.arange(graph.n_ops)
    first_part: dict[str, int] = {}
    label = np.arange(graph.n_ops)
    for op, node in enumerate(calls):
        of = node.meta.get(FORWARD)
        if of is not None and forward_ops:
            # That node may have been removed, having no user: the last one before it that was kept
            # stands in, or the first of all.
            forward_of[op] = forward_ops[max(bisect_right(orders, of) - 1, 0)]
        elif node.meta.get(EXPORTED):
            label[op] = first_part.setdefault(node.meta[EXPORTED], op)
    group = join_groups(join_groups(graph.group, forward_of), label)
    return replace(graph, forward_of=forward_of, group=group)

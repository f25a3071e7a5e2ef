"""The arrays of a training step: which forward operator each backward one belongs to.

And which values are gradients, and how long autograd holds what it saved.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import fx
from torch.export import ExportedProgram

from fxpart.capture.block_spans import held_by_blocks
from fxpart.capture.formula_spans import held_to_the_end
from fxpart.capture.joint_labels import BLOCK, EXPORTED, FORMULA, FORWARD, ORDER
from fxpart.granularity import join_groups
from fxpart.graph import OpGraph

__all__ = ["exported_names_of", "step_graph"]


def step_graph(graph: OpGraph, program: ExportedProgram, gradients: Mapping[str, str]) -> OpGraph:
    """Return `graph` told of partners, groups and gradients.

    Args:
        graph: operators of `program`, by the names of its call nodes; calls that are no operators,
            such as those that compute sizes, may be missing. Sizes are not looked at.
        program: the training step, as `fxpart.capture.joint_program` makes it.
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

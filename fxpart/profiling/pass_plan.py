"""Which operators one pass over a program runs, and what must be made before each of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from fxpart.profiling.steps import Step

__all__ = ["Run", "plan_pass"]


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """One operator that a pass runs."""

    step: Step
    is_measured: bool
    make: tuple[fx.Node, ...]
    """Inputs that no operator of the pass makes: results of skipped ones, weights, inputs."""
    dying: tuple[fx.Node, ...]
    """Nodes whose values no later operator of the pass reads; its own, when nobody does."""


def plan_pass(steps: list[Step], remaining: Mapping[str, int]) -> list[Run]:
    """Return the operators that the next pass runs, in order.

    Measured are the first of each signature, as many as the signature still needs. Run besides are
    those before the last of these whose results must be real, and measured besides, those so small
    that to make up a result is no less work, and leaves the caches in no state of a real run.
    """
    left = dict(remaining)
    chosen: list[tuple[Step, bool]] = []
    last = 0
    for step in steps:
        is_needed = left.get(step.signature, 0) > 0
        if is_needed:
            left[step.signature] -= 1
        if is_needed or step.is_small or step.is_exact:
            chosen.append((step, step.signature in left and (is_needed or step.is_small)))
            last = len(chosen) if is_needed else last
    chosen = chosen[:last]
    last_reader = {read: step.node for step, _ in chosen for read in step.node.all_input_nodes}
    there: set[fx.Node] = set()
    runs = []
    for step, is_measured in chosen:
        node = step.node
        read = node.all_input_nodes
        make = tuple(one for one in read if one not in there)
        there.update(make, (node,))
        dying = tuple(one for one in read if last_reader[one] is node)
        runs.append(Run(step, is_measured, make, dying if node in last_reader else (*dying, node)))
    return runs

"""Export a plan as split points of `torch.distributed.pipelining.pipeline`: module path to place.

That function splits a model's trace where a module begins or ends, so a plan can be exported if its
partitions are runs of operators that each begin at the start or end of a module.
"""

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.module_bounds import SplitPlace, module_bound, single_calls
from fxpart.errors import SpecError

__all__ = ["SplitPlace", "forward_operators", "split_points"]

_CHANGE = "plan with granularity=module, or cut after modules with mode=pipeline mode.cut_after"


def forward_operators(graph: OpGraph) -> IntArray:
    """Return the operators before the backward, without checks, which follow their operands."""
    return np.flatnonzero(~graph.is_check[: graph.first_backward])


def split_points(graph: OpGraph, assignment: Assignment) -> dict[str, SplitPlace]:
    """Return the modules before or after which to split the model, in order.

    ``{path: SplitPoint[place] for path, place in found.items()}`` is the `split_spec` of
    ``torch.distributed.pipelining.pipeline``. Each partition is one stage, so there is one split
    point fewer than stages; the devices of a stage are up to whoever runs it. A training step is
    split like its forward, since torch's pipelines run the backward of a stage with the stage.

    Raises:
        SpecError: if the assignment is for another graph, partitions are not runs of operators in
            graph order, or one begins inside a module.

    """
    assignment.check_for(graph.n_ops)
    ops = forward_operators(graph)
    stage = assignment.partition_of[ops]
    modules = [graph.modules[op] for op in ops.tolist()]
    calls = single_calls(tuple(modules))
    places: dict[str, SplitPlace] = {}
    for index in (1 + np.flatnonzero(stage[1:] != stage[:-1])).tolist():
        before, after = int(stage[index - 1]), int(stage[index])
        where = f"operator {graph.names[ops[index]]} of {modules[index] or 'the model itself'}"
        if after != before + 1:
            raise SpecError(
                f"{where} is in partition {after} and directly follows partition {before}; stages "
                f"must be consecutive runs of operators: {_CHANGE}"
            )
        cut = module_bound(modules, index, calls, places)
        if cut is None:
            raise SpecError(
                f"{where} begins partition {after} where no module that is called once begins or"
                f" ends, or none that is not cut already; {_CHANGE}"
            )
        places[cut[0]] = cut[1]
    return places

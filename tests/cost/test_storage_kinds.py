"""The kinds of storages."""

from dataclasses import replace

import numpy as np
import pytest

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.optimizer import Optimizer, with_optimizer
from fxpart.cost.peak_tensors import device_peaks, doing
from tests.sketch import Sketch, devices, problem


def small_step() -> OpGraph:
    """Return a forward of one operator, and an operator that computes its weight gradient."""
    sketch = Sketch()
    x, w = sketch.input(4), sketch.weight(40)
    loss = sketch.op([x], 4, [w], module="net")
    gradient = sketch.op([loss, x], 40, [w], backward_of=0, module="net")
    return replace(
        sketch.graph(loss, gradient),
        gradient_values=np.array([gradient], dtype=np.int64),
        gradient_weights=np.array([w], dtype=np.int64),
    )


def kinds_at_the_peak(graph: OpGraph) -> dict[str, str]:
    """Return the kind of each storage live on one device at its peak, by name."""
    placed = Assignment(np.zeros(graph.n_ops, dtype=np.int64), ((0,),))
    (peak,) = device_peaks(problem(graph, devices(10**6)), placed)
    return {tensor.name: tensor.kind for tensor in peak.tensors}


def test_temporaries_of_updates_are_not_results() -> None:
    graph = with_optimizer(small_step(), Optimizer("adam", implementation="foreach"))
    kinds = kinds_at_the_peak(graph)
    update_kinds = [kind for name, kind in kinds.items() if name.startswith("update.")]
    # Its list of temporaries lives to the end of the step, as the loss does.
    assert update_kinds == ["temporary"]
    assert kinds["v1"] == "output"


@pytest.mark.parametrize(
    ("target", "is_part"),
    [
        ("aten.add.Tensor", True),
        ("aten.add_.Tensor", True),
        ("aten.addmm.default", False),
        ("aten.addcmul.default", False),
    ],
)
def test_only_accumulated_values_are_parts_of_a_gradient(target: str, is_part: bool) -> None:
    """The operand of a product, or of a fused sum, has the size of the gradient by chance."""
    sketch = Sketch()
    x, w = sketch.input(4), sketch.weight(40)
    loss = sketch.op([x], 4, [w])
    read = sketch.op([loss], 40, backward_of=0)
    gradient = sketch.op([read], 40, backward_of=0)
    graph = replace(
        sketch.graph(loss, gradient),
        targets=("aten.mm.default", "aten.mm.default", target),
        gradient_values=np.array([gradient], dtype=np.int64),
        gradient_weights=np.array([w], dtype=np.int64),
    )
    assert kinds_at_the_peak(graph)["v2"] == ("gradient" if is_part else "temporary")


def test_the_cast_of_a_gradient_is_a_gradient() -> None:
    graph = with_optimizer(
        replace(small_step(), dtypes=("bfloat16",) * 2), Optimizer("sgd", master_weights=True)
    )
    kinds = kinds_at_the_peak(graph)
    (cast,) = (name for name in kinds if name.startswith("cast."))
    assert kinds[cast] == kinds["v2"] == "gradient"
    op = graph.names.index(cast)
    assert doing(graph, op) == "cast of a gradient"

"""What a storage is there for."""

from dataclasses import replace

import numpy as np

from fxpart.assignment import Assignment
from fxpart.cost.peak_tensors import device_peaks
from fxpart.training.optimizer import Optimizer, with_optimizer
from tests.sketch import Sketch, devices, problem


def test_what_updates_keep_is_no_result() -> None:
    sketch = Sketch()
    x, w = sketch.input(4), sketch.weight(40)
    loss = sketch.op([x], 4, [w], module="net")
    gradient = sketch.op([loss, x], 40, [w], backward_of=0, module="net")
    drawn = replace(
        sketch.graph(loss, gradient),
        gradient_values=np.array([gradient], dtype=np.int64),
        gradient_weights=np.array([w], dtype=np.int64),
    )
    graph = with_optimizer(drawn, Optimizer("adam", implementation="foreach"))
    placed = Assignment(np.zeros(graph.n_ops, dtype=np.int64), ((0,),))
    (peak,) = device_peaks(problem(graph, devices(10**6)), placed)
    kinds = {tensor.name: tensor.kind for tensor in peak.tensors}
    made = [kind for name, kind in kinds.items() if name.startswith("update.")]
    # Its list of temporaries lives to the end of the step, as the loss does.
    assert made == ["temporary"]
    assert kinds["v1"] == "output"

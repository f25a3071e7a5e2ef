"""A training step of six operators whose numbers can all be checked by hand."""

from dataclasses import replace

import numpy as np

from fxpart.core.graph import OpGraph
from tests.sketch import Sketch


def step() -> OpGraph:
    """Return y = view(x w); loss = y z: a forward and a backward of three operators each."""
    sketch = Sketch()
    x = sketch.input(3)
    w, frozen = sketch.weight(10), sketch.weight(20)
    y = sketch.op([x], 8, [w], module="net.one")
    v = sketch.op([y], 8, view_of=y, module="net.one")
    loss = sketch.op([v], 1, [frozen], module="net.two")
    g = sketch.op([v], 7, [frozen], backward_of=2, module="net.two")
    part = sketch.op([g, x], 10, backward_of=0, module="net.one")
    grad = sketch.op([part], 10, backward_of=0, module="net.one")
    graph = sketch.graph(loss, grad)
    return replace(
        graph,
        targets=(
            "aten.gelu.default",
            "aten.view.default",
            "loss",
            "aten.mse_loss_backward.default",
            "aten.mm.default",
            "aten.add.Tensor",
        ),
        weight_state_bytes=np.array([25, 0]),
        gradient_values=np.array([grad]),
        gradient_weights=np.array([0]),
    )

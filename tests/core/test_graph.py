"""Readers, users and the backward of an `OpGraph`."""

import numpy as np
import pytest

from fxpart.errors import SpecError
from tests.sketch import Sketch


def test_readers_and_users_are_listed() -> None:
    sketch = Sketch()
    x, weight = sketch.input(3), sketch.weight(5)
    a = sketch.op([x], 1, [weight])
    b = sketch.op([], 1)
    c = sketch.op([a, x, b], 1, [sketch.weight(7), weight])
    graph = sketch.graph(c)
    assert graph.readers.tolist() == [0, 2, 2, 2]
    assert graph.users.tolist() == [0, 2, 2]
    for op in range(graph.n_ops):
        assert graph.reads[graph.readers == op].tolist() == graph.reads_of(op).tolist()
        assert graph.uses[graph.users == op].tolist() == graph.uses_of(op).tolist()
    assert graph.readers.dtype == graph.users.dtype == np.int64


def test_the_first_backward_operator_is_found() -> None:
    sketch = Sketch()
    a = sketch.op([], 1)
    b = sketch.op([a], 1)
    forward = sketch.graph(b)
    assert forward.first_backward == forward.n_ops == 2
    c = sketch.op([b], 1, backward_of=1)
    step = sketch.graph(sketch.op([c], 1, backward_of=0))
    assert step.first_backward == 2
    assert step.n_ops == 4


def test_a_forward_operator_after_the_backward_is_refused() -> None:
    sketch = Sketch()
    a = sketch.op([], 1)
    b = sketch.op([a], 1, backward_of=0)
    graph = sketch.graph(sketch.op([b], 1))
    with pytest.raises(SpecError, match="must come after its forward, operator op1 of it comes"):
        _ = graph.first_backward

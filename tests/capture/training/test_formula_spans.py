"""Values held by a backward formula: by hand, on random graphs, and against real steps."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fxpart.capture.live_bytes import LiveBytes, storage_sizes
from fxpart.capture.models.build import build_model
from fxpart.capture.training.joint import StepOptions, joint_capture
from fxpart.capture.training.loss import training_loss
from fxpart.capture.training.step_graph import with_formula_lifetimes
from fxpart.core.graph import OpGraph
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables
from tests.execution.small_presets import SMALL_PRESETS
from tests.sketch import Sketch, random_graph

AS_THE_CPU_RUNS = StepOptions(fused_attention=False, fused_dropout=False)


def _peak(graph: OpGraph) -> int:
    return int(peak_bytes(memory_tables(graph), np.zeros(graph.n_ops, dtype=np.int64), 1)[0])


def _product() -> Sketch:
    """The formula of a product is two operators; each reads the gradient and one saved value."""
    sketch = Sketch()
    x = sketch.input(100)
    saved = sketch.op([x], 10)
    other = sketch.op([x], 20)
    gradient = sketch.op([saved, other], 4, backward_of=0)
    sketch.op([gradient, saved], 1, backward_of=0)
    sketch.op([gradient, other], 2, backward_of=0)
    return sketch


def test_saved_values_stay_until_the_last_operator_of_the_formula() -> None:
    graph = _product().graph(4, 5)
    extended = with_formula_lifetimes(graph, [None, None, None, 7, 7])
    assert graph.reads_of(4).tolist() == [3, 2]
    # The gradient, its own operand, and then the operand of the other.
    assert extended.reads_of(4).tolist() == [3, 2, 1]
    assert [extended.reads_of(op).tolist() for op in range(4)] == [[0], [0], [1, 2], [3, 1]]
    # At the last operator: input, gradient, 20, both results; and now the other saved value.
    assert _peak(graph) == 100 + 10 + 20 + 4 + 1
    assert _peak(extended) == 100 + 10 + 20 + 4 + 1 + 2


def test_results_of_the_formula_itself_end_with_their_last_reader() -> None:
    sketch = Sketch()
    x = sketch.input(1)
    y = sketch.op([x], 1)
    inner = sketch.op([y], 8, backward_of=0)
    more = sketch.op([inner], 8, backward_of=0)
    sketch.op([more], 1, backward_of=0)
    extended = with_formula_lifetimes(sketch.graph(4), [None, 0, 0, 0])
    assert extended.reads_of(3).tolist() == [more, y]


def test_a_graph_without_formulas_is_unchanged() -> None:
    graph = random_graph(3, 12)
    extended = with_formula_lifetimes(graph, [None] * graph.n_ops)
    assert extended.reads.tolist() == graph.reads.tolist()
    assert extended.read_start.tolist() == graph.read_start.tolist()


@given(st.integers(0, 10**6), st.integers(1, 5))
def test_operators_keep_their_reads_and_read_nothing_later(seed: int, span: int) -> None:
    graph = random_graph(seed, 20)
    extended = with_formula_lifetimes(graph, [op // span for op in range(graph.n_ops)])
    for op in range(graph.n_ops):
        before, after = graph.reads_of(op).tolist(), extended.reads_of(op).tolist()
        assert after[: len(before)] == before
        assert (op % span == span - 1 or op == graph.n_ops - 1) or after == before
    # Lifetimes only grow, and never by results of another formula.
    assert _peak(extended) >= _peak(graph)
    assert replace(extended, read_start=graph.read_start, reads=graph.reads).n_ops == graph.n_ops


@pytest.mark.parametrize(
    ("name", "train"), [("llama3_70b", False), ("gpt2", True), ("vit_large", False), ("dlrm", True)]
)
def test_the_peak_of_a_step_equals_that_of_a_real_step(name: str, train: bool) -> None:
    torch.manual_seed(0)
    built = build_model(replace(SMALL_PRESETS[name], batch_size=4), torch.device("cpu"))
    module = built.module.train(train)
    captured = joint_capture(module, built.args, built.kwargs, AS_THE_CPU_RUNS)
    tensors = [leaf for leaf in tree_leaves((built.args, built.kwargs)) if isinstance(leaf, Tensor)]
    resident = storage_sizes([*module.parameters(), *module.buffers(), *tensors])
    with LiveBytes([resident]) as counter, torch.enable_grad():
        results = module(*built.args, **built.kwargs)
        loss = training_loss([leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)])
        del results
        loss.backward()  # type: ignore[no-untyped-call]
    # A run holds scalars that are constants of the graph.
    assert 0 <= counter.peak_bytes[0] - _peak(captured.graph) <= 256

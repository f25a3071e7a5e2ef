from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.optimizer import IMPLEMENTATIONS, OPTIMIZERS, Optimizer, with_optimizer
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.holding import holding
from fxpart.cost.tables import memory_tables
from fxpart.errors import SpecError
from tests.placement.training_sketch import random_training_graph
from tests.sketch import Sketch, chain

NAMES = OPTIMIZERS[1:]


def _trained(graph: OpGraph, pairs: list[tuple[int, int]], dtype: str = "float32") -> OpGraph:
    """Return `graph` in which value v is the gradient of weight w."""
    values, weights = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return replace(
        graph,
        gradient_values=values,
        gradient_weights=weights,
        dtypes=(dtype,) * graph.n_ops,
        weight_names=tuple(f"layer{w}.weight" for w in range(len(graph.weight_names))),
    )


def _step(*sizes: int, dtype: str = "float32") -> OpGraph:
    """Return a chain of layers with a weight of each size, and a backward of one operator each."""
    sketch, pairs = Sketch(), []
    value = sketch.input(1)
    weights = [sketch.weight(size) for size in sizes]
    for weight in weights:
        value = sketch.op([value], 1, [weight])
    gradients = [value]
    for op in reversed(range(len(sizes))):
        gradients.append(sketch.op([gradients[-1]], sizes[op], [weights[op]], backward_of=op))
        pairs.append((gradients[-1], weights[op]))
    return _trained(sketch.graph(*gradients), pairs[::-1], dtype)


def test_an_update_reads_the_gradient_and_stays_with_its_producer() -> None:
    step = _step(40, 24)
    graph = with_optimizer(step, Optimizer("adam"))
    assert graph.n_ops == step.n_ops + 2
    assert graph.names[-2:] == ("update.layer0.weight", "update.layer1.weight")
    assert graph.targets[-2:] == ("optimizer.adam",) * 2
    assert graph.modules[-2:] == ("layer0", "layer1")
    assert graph.dtypes[-2:] == ("float32",) * 2
    assert graph.is_update.tolist() == [False] * 4 + [True] * 2
    # Operators 0 and 1 are the forward, 3 and 2 their backward.
    assert graph.forward_of.tolist() == [0, 1, 1, 0, 0, 1]
    assert graph.group.tolist() == [0, 1, 1, 0, 0, 1]
    assert [graph.reads_of(op).tolist() for op in (4, 5)] == [[4], [3]]
    assert [graph.uses_of(op).tolist() for op in (4, 5)] == [[0], [1]]
    assert not graph.is_check.any()
    assert graph.first_backward == 2


def test_bytes_by_hand() -> None:
    # Weights of 10 and 6 numbers.
    adam = with_optimizer(_step(40, 24), Optimizer("adam"))
    assert adam.weight_state_bytes.tolist() == [2 * 40 + 4, 2 * 24 + 4]
    assert adam.state_tensor_bytes.tolist() == [[40, 24], [40, 24], [4, 4]]
    # Two temporaries while one weight is updated, and the last one of the weight before.
    assert adam.value_alloc_bytes[-2:].tolist() == [2 * 40, 2 * 24 + 40]
    assert adam.moved_bytes[-2:].tolist() == [18 * 40, 18 * 24]
    fused = with_optimizer(_step(40, 24), Optimizer("adam", implementation="fused"))
    assert fused.weight_state_bytes.tolist() == adam.weight_state_bytes.tolist()
    assert fused.value_alloc_bytes[-2:].tolist() == [0, 0]
    # Gradient, weight and two states are read, weight and states written.
    assert fused.moved_bytes[-2:].tolist() == [7 * 40, 7 * 24]
    momentum = with_optimizer(_step(40, 24), Optimizer("momentum", implementation="fused"))
    assert momentum.weight_state_bytes.tolist() == [40, 24]
    assert momentum.moved_bytes[-2:].tolist() == [5 * 40, 5 * 24]
    sgd = with_optimizer(_step(40, 24), Optimizer("sgd"))
    assert sgd.weight_state_bytes.tolist() == [0, 0]
    assert sgd.moved_bytes[-2:].tolist() == [3 * 40, 3 * 24]


def test_lists_of_tensors_live_to_the_end_of_the_step() -> None:
    graph = with_optimizer(_step(40, 24), Optimizer("adamw", implementation="foreach"))
    assert graph.value_alloc_bytes[-2:].tolist() == [40, 24]
    assert graph.value_is_output[-2:].all()
    # Weights and states, an input and the last forward result, gradients, and both tensors.
    weights = 3 * (40 + 24) + 2 * 4
    peaks = peak_bytes(memory_tables(graph), np.zeros(graph.n_ops, dtype=np.int64), 1)
    assert peaks.tolist() == [weights + 2 + 64 + 64]


def test_master_weights_states_and_gradients_are_float32() -> None:
    # 20 and 12 numbers of 2 bytes.
    optimizer = Optimizer("adam", master_weights=True, implementation="fused")
    graph = with_optimizer(_step(40, 24, dtype="bfloat16"), optimizer)
    assert graph.names[-4:-2] == ("cast.layer0.weight", "cast.layer1.weight")
    assert graph.targets[-4:-2] == ("optimizer.cast",) * 2
    assert graph.is_update[-4:].all()
    assert graph.dtypes[-4:] == ("float32",) * 4
    assert graph.weight_state_bytes.tolist() == [3 * 80 + 4, 3 * 48 + 4]
    assert graph.state_tensor_bytes.tolist() == [[80, 48], [80, 48], [80, 48], [4, 4]]
    assert graph.value_alloc_bytes[-4:].tolist() == [80, 48, 0, 0]
    assert graph.value_is_output[-4:].tolist() == [True, True, False, False]
    assert [graph.reads_of(op).tolist() for op in range(4, 8)] == [[4], [3], [5], [6]]
    assert [graph.uses_of(op).tolist() for op in range(4, 8)] == [[], [], [0], [1]]
    assert graph.group[-4:].tolist() == [0, 1, 0, 1]
    # A cast reads 40 and writes 80; an update moves 7 x 80, reads the copy, writes the weight.
    assert graph.moved_bytes[-4:].tolist() == [120, 72, 7 * 80 + 80 + 40, 7 * 48 + 48 + 24]


def test_float32_weights_need_no_master_copies() -> None:
    with_copies = with_optimizer(_step(40), Optimizer("adam", master_weights=True))
    assert with_copies.names[-1:] == ("update.layer0.weight",)
    assert with_copies.weight_state_bytes.tolist() == [84]


def test_states_can_have_their_own_dtype() -> None:
    optimizer = Optimizer("adam", state_dtype="bfloat16", implementation="foreach")
    graph = with_optimizer(_step(40), optimizer)
    assert graph.weight_state_bytes.tolist() == [2 * 20 + 4]
    assert graph.value_alloc_bytes[-1] == 20


def test_a_weight_without_a_gradient_has_no_state() -> None:
    step = _step(40, 24)
    frozen = replace(
        step, gradient_values=step.gradient_values[1:], gradient_weights=step.gradient_weights[1:]
    )
    graph = with_optimizer(frozen, Optimizer("momentum"))
    assert graph.weight_state_bytes.tolist() == [0, 24]
    assert graph.names[-1] == "update.layer1.weight"


def test_a_tied_weight_has_its_state_on_every_device_that_uses_it() -> None:
    sketch = Sketch()
    value, weight = sketch.input(1), sketch.weight(40)
    first = sketch.op([value], 1, [weight])
    second = sketch.op([first], 1, [weight])
    part = sketch.op([second], 40, [weight], backward_of=1)
    whole = sketch.op([part], 40, [weight], backward_of=0)
    step = _trained(sketch.graph(second, whole), [(whole, weight)])
    graph = with_optimizer(step, Optimizer("momentum"))
    placed = Assignment(np.array([0, 1, 1, 2, 2]), ((0,), (1,), (0,)))
    assert holding(memory_tables(graph), placed, 2).weight_bytes.tolist() == [80, 80]
    # The gradient is complete on device 0, so the update is there.
    assert graph.group[-1] == 0


def test_two_parts_of_one_storage_are_updated_separately() -> None:
    step = _step(40, 40)
    shared = replace(step, gradient_weights=np.array([1, 1]))
    graph = with_optimizer(shared, Optimizer("momentum"))
    assert graph.names[-2:] == ("update.layer1.weight", "update.layer1.weight.2")
    assert graph.weight_state_bytes.tolist() == [0, 80]
    assert graph.state_tensor_bytes.tolist() == [[0, 40], [0, 40]]


def test_a_gradient_that_is_an_input_is_used_at_the_weight() -> None:
    step = _step(40, 24)
    with_input_gradient = replace(
        step, gradient_values=np.array([0]), gradient_weights=np.array([1])
    )
    graph = with_optimizer(with_input_gradient, Optimizer("sgd"))
    assert graph.reads_of(4).tolist() == [0]
    assert graph.group[4] == 1


def test_optimizer_none_changes_nothing() -> None:
    step = _step(40)
    assert with_optimizer(step, Optimizer()) is step
    inference = chain(3)
    assert with_optimizer(inference, Optimizer("none")) is inference


@given(
    seed=st.integers(0, 10_000),
    name=st.sampled_from(NAMES),
    implementation=st.sampled_from(IMPLEMENTATIONS),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    master=st.booleans(),
)
def test_invariants_of_random_steps(
    seed: int, name: str, implementation: str, dtype: str, master: bool
) -> None:
    step = random_training_graph(seed, 12)
    step = replace(step, dtypes=(dtype,) * step.n_ops)
    count = len(step.gradient_values)
    if not count:
        return
    graph = with_optimizer(step, Optimizer(name, None, master, implementation))
    added = graph.n_ops - step.n_ops
    assert added == count * (2 if master and dtype == "bfloat16" else 1)
    # Existing operators are unchanged, and an update stays with the gradient, in whole groups.
    n, values = step.n_ops, step.n_values
    assert graph.names[:n] == step.names
    assert graph.value_names[:values] == step.value_names
    assert graph.reads[: len(step.reads)].tolist() == step.reads.tolist()
    assert (graph.group[step.group] == graph.group[:n]).all()
    makers = graph.value_producer[step.gradient_values]
    assert (graph.group[-count:] == graph.group[makers]).all()
    assert graph.first_backward == step.first_backward
    assert len(set(graph.names)) == graph.n_ops
    assert (
        graph.weight_state_bytes[np.setdiff1d(range(len(step.weight_names)), step.gradient_weights)]
        == 0
    ).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "adamm"}, "optimizer=adamm does not exist; nearest: adam"),
        (
            {"name": "adam", "implementation": "for-loop"},
            "optimizer.implementation=for-loop does not exist; nearest: for_loop",
        ),
        ({"name": "adam", "implementation": "a\nb"}, "optimizer.implementation=a b does not exist"),
        (
            {"name": "adam", "state_dtype": "bf16"},
            "optimizer.state_dtype=bf16 does not exist; nearest: bfloat16",
        ),
    ],
)
def test_names_that_do_not_exist_are_refused(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        Optimizer(**arguments)  # type: ignore[arg-type]


def test_a_graph_without_gradients_is_refused() -> None:
    message = r"the graph of 3 operators has none: .* no weight .* requires a gradient; .*unfreeze"
    with pytest.raises(SpecError, match=message):
        with_optimizer(chain(3), Optimizer("adam"))


def test_a_second_optimizer_is_refused() -> None:
    once = with_optimizer(_step(40), Optimizer("adam"))
    with pytest.raises(SpecError, match=r"optimizer=sgd .* has updates of adam already"):
        with_optimizer(once, Optimizer("sgd"))


def test_a_dtype_without_gradients_is_refused() -> None:
    with pytest.raises(SpecError, match=r"cannot update layer0\.weight, .* of dtype int8; there"):
        with_optimizer(_step(40, dtype="int8"), Optimizer("sgd"))

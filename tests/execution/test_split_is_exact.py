"""A placed model computes bit-identical results: all presets, all modes, random placements."""

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

import fxpart.placement.search.refine
import fxpart.placement.search.steady
from fxpart.capture.training.loss import training_loss
from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.topology import DeviceSpec, Link, Topology, uniform_topology
from fxpart.cost.peak_tensors import peaks_in_turn
from fxpart.cost.problem import make_problem
from fxpart.cost.roofline import LatencyModel
from fxpart.cost.tables import memory_tables
from fxpart.errors import FxpartError
from fxpart.execution.difference import max_difference
from fxpart.execution.local import run_local
from fxpart.execution.split.placement import split_by_assignment
from fxpart.placement import make_mode
from tests.execution.scene import at_random, in_a_row, predicted_peaks, same_bits, small
from tests.execution.small_presets import DISTINCT
from tests.sketch import BASELINES, installed_modes

TIED = {"gpt2", "bert_large", "t5_large", "whisper_small"}
"""Presets whose first and last layer share a weight."""
WITHOUT_TABLES = {"vit_large", "resnet50"}
NO_TABLES = "this model has no embedding operators"
OPTIONS: dict[str, dict[str, object]] = {
    "aot_based": {"modules": {"": 0}},
    "optimal": {"steps": 5},
    "custom": {"function": lambda problem: [0] * problem.graph.n_ops},
}
"""Required options of a mode."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit searches to a first plan of the mode, on all devices: any plan is split."""
    monkeypatch.setattr(fxpart.placement.search.refine, "_KICKS", 16)
    monkeypatch.setattr(fxpart.placement.search.steady, "_FEW_SUBSETS", 0)


def _devices(count: int, memory_bytes: int) -> Topology:
    spec = DeviceSpec("d", memory_bytes, {"float32": 1e9}, 1e9)
    return uniform_topology((spec,) * count, Link(1e8, 1e-6))


def _tight(graph: OpGraph, count: int) -> Topology:
    """Return equal devices, none of which holds the whole model, but which hold it together."""
    row = in_a_row(graph, count)
    max_peak = max(predicted_peaks(graph, row.device_of, count))
    (whole,) = predicted_peaks(graph, np.zeros(graph.n_ops, dtype=np.int64), 1)
    return _devices(count, min(max_peak * 11 // 10, whole - 1))


def _placed(graph: OpGraph, mode: str, topology: Topology) -> Assignment | str:
    """Return the assignment of the mode, or the reason why there is none."""
    try:
        placed = make_mode(mode, OPTIONS.get(mode))(
            make_problem(graph, topology, LatencyModel(op_overhead_s=1e-6))
        )
    except FxpartError as error:
        return f"{type(error).__name__}: {error}"
    return placed


@cache
def _whole(name: str) -> fx.GraphModule:
    return small(name).program.module()


@cache
def _results(name: str) -> Any:  # noqa: ANN401 - results of any model
    real = small(name)
    with torch.no_grad():
        return _whole(name)(*real.args, **real.kwargs)


def _refuse_other_bits(name: str, assignment: Assignment) -> None:
    real = small(name)
    split = split_by_assignment(_whole(name), real.graph, assignment)
    with torch.no_grad():
        assert same_bits(split(*real.args, **real.kwargs), _results(name))
    partitions = [child for child, _ in split.named_children() if child.startswith("submod_")]
    assert len(partitions) == assignment.n_partitions


@pytest.mark.parametrize(
    ("name", "count"), tuple(zip(DISTINCT, itertools.cycle([2, 4]), strict=False))
)
def test_every_mode_is_exact_on_tight_devices(name: str, count: int) -> None:
    graph = small(name).graph
    tight = _tight(graph, count)
    tried = [mode for mode in installed_modes() if mode != "accelerate"]
    done = {mode: _placed(graph, mode, tight) for mode in tried}
    # Equal placements of several modes are run once.
    placements = [placed for placed in done.values() if isinstance(placed, Assignment)]
    for placed in {placed.partition_of.tobytes(): placed for placed in placements}.values():
        _refuse_other_bits(name, placed)
    refused = {mode: message for mode, message in done.items() if isinstance(message, str)}
    # No device holds the whole, nor the dense part with a table; a baseline may not fit.
    assert refused.keys() <= {"single", "aot_based", "custom", "sparse_nn", *BASELINES}
    assert {"single", "aot_based", "custom"} <= refused.keys()
    assert all(
        message.startswith("InfeasibleError") or NO_TABLES in message
        for message in refused.values()
    )


@pytest.mark.parametrize("name", DISTINCT)
def test_modes_that_need_more_memory_are_exact_with_it(name: str) -> None:
    graph = small(name).graph
    for mode in ("single", "aot_based", "custom", "sparse_nn", *BASELINES):
        placed = _placed(graph, mode, _devices(2, 1 << 30))
        if isinstance(placed, str):
            assert mode == "sparse_nn"
            assert name in WITHOUT_TABLES
            assert NO_TABLES in placed
        else:
            _refuse_other_bits(name, placed)


@pytest.mark.parametrize("name", DISTINCT)
def test_any_assignment_is_exact(name: str) -> None:
    _refuse_other_bits(name, at_random(small(name).graph, 3, 1))


def _gradients(module: nn.Module, name: str) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the loss of a step, and the gradient of each parameter by its number."""
    real = small(name)
    real.module.zero_grad()
    loss = training_loss(
        [x for x in tree_leaves(module(*real.args, **real.kwargs)) if x is not None]
    )
    loss.backward()  # type: ignore[no-untyped-call]
    parameters = real.module.parameters()
    return loss, {id(p): p.grad for p in parameters if p.grad is not None}


def _in_order_of(whole: fx.GraphModule, graph: OpGraph, assignment: Assignment) -> fx.GraphModule:
    """Return the unsplit module with its operators in the order in which partitions run."""
    part = dict(zip(graph.names, assignment.partition_of.tolist(), strict=True))
    # Other nodes come first, in their order; the result comes last.
    nodes = sorted(
        whole.graph.nodes,
        key=lambda n: assignment.n_partitions if n.op == "output" else part.get(n.name, -1),
    )
    ordered, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        copies[node] = ordered.node_copy(node, copies.__getitem__)
    ordered.set_codegen(whole.graph._codegen)
    return fx.GraphModule(whole, ordered)


@pytest.mark.parametrize("name", DISTINCT)
def test_a_training_step_has_the_same_gradients(name: str) -> None:
    real = small(name)
    whole = _whole(name)
    loss, expected = _gradients(whole, name)
    assert len(expected) > 0
    eager_loss, eager = _gradients(real.module, name)
    assert eager.keys() == expected.keys()
    torch.testing.assert_close(eager_loss, loss)
    for number, gradient in eager.items():
        torch.testing.assert_close(gradient, expected[number])
    for assignment in (in_a_row(real.graph, 4), at_random(real.graph, 2, 7)):
        split = split_by_assignment(whole, real.graph, assignment)
        split_loss, gradients = _gradients(split, name)
        assert same_bits(split_loss, loss)
        # The gradient of a value is a sum over its readers, in the order in which they ran.
        _, ordered = _gradients(_in_order_of(whole, real.graph, assignment), name)
        assert gradients.keys() == ordered.keys() == expected.keys()
        for number, gradient in gradients.items():
            assert same_bits(gradient, ordered[number])
            torch.testing.assert_close(gradient, expected[number])
    in_order = split_by_assignment(whole, real.graph, in_a_row(real.graph, 4))
    _, gradients = _gradients(in_order, name)
    assert all(same_bits(gradients[number], expected[number]) for number in expected)


@pytest.mark.parametrize("name", DISTINCT)
def test_a_tied_weight_is_used_on_several_devices(name: str) -> None:
    graph = small(name).graph
    users = np.repeat(np.arange(graph.n_ops), np.diff(graph.use_start))
    device_of = in_a_row(graph, 4).device_of
    apart = [len(set(device_of[users[graph.uses == w]])) for w in range(len(graph.weight_bytes))]
    tables = [size for size, n in zip(graph.weight_bytes, apart, strict=True) if n > 1]
    # A table of tokens has 101 rows.
    assert any(int(size) % 101 == 0 for size in tables) == (name in TIED)


@pytest.mark.parametrize("name", DISTINCT)
def test_peaks_of_presets_are_as_predicted(name: str) -> None:
    real = small(name)
    graph, row = real.graph, in_a_row(real.graph, 3)
    tables = memory_tables(graph)
    assert peaks_in_turn(graph, tables, row, 3) == predicted_peaks(graph, row.device_of, 3)
    for placed in (row, at_random(graph, 3, 2)):
        run = run_local(real, placed, 3, repeats=1)
        assert run.peak_bytes == peaks_in_turn(graph, tables, placed, 3)
        assert run.max_difference == 0.0


@pytest.mark.parametrize("name", DISTINCT)
def test_the_exported_graph_computes_the_same_as_the_module(name: str) -> None:
    real = small(name)
    with torch.no_grad():
        eager = real.module(*real.args, **real.kwargs)
        graph = real.program.module()(*real.args, **real.kwargs)
    assert max_difference(graph, eager) == 0.0

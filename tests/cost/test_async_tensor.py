"""Collectives that run during the products beside them."""

import numpy as np
import pytest

from fxpart.core.graph import OpGraph
from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from fxpart.cost.async_tensor import AsyncTensorTimes, products_beside
from fxpart.cost.collective_times import (
    CollectiveGroup,
    TimesWithCollectives,
    collective_kinds,
)
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import NotApplicableError
from runner.experiment.check import check
from runner.experiment.experiment import plan
from runner.experiment.headline import headline
from runner.experiment.model_spec import model_spec
from runner.experiment.runtime import as_kernels
from runner.experiment.subject import graph_to_place, shared_subject
from tests.runner.composed import TINY_LLAMA, read

_GROUPS = (
    *TINY_LLAMA,
    "model.config.num_hidden_layers=1",
    "model.dtype=bfloat16",
    "devices=2x16gb",
    "tensor_parallel=2",
    "sequence_parallel=true",
    "runtime=compiled",
    "phase=training",
    "mode=single",
)


def _graph(*overrides: str) -> OpGraph:
    config = read(*_GROUPS, *overrides)
    return as_kernels(config, graph_to_place(config, shared_subject(config, model_spec(config))), 1)


def _by_module(graph: OpGraph, *, backward: bool) -> list[tuple[str, str, list[str]]]:
    """Return the kind and module of each collective with products, and their modules."""
    return [
        (collective_kinds(graph)[op], graph.modules[op], [graph.modules[p] for p in products])
        for op, products in products_beside(graph).items()
        if graph.is_backward[op] == backward
    ]


@pytest.mark.parametrize("batch", [1, 4])
def test_each_collective_has_the_products_that_need_it(batch: int) -> None:
    graph = _graph(f"model.batch_size={batch}")
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    assert _by_module(graph, backward=False) == [
        ("all_gather", attention, [f"{attention}.{name}_proj" for name in "qkv"]),
        ("reduce_scatter", f"{attention}.o_proj", [f"{attention}.o_proj"]),
        ("all_gather", mlp, [f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
        ("reduce_scatter", f"{mlp}.down_proj", [f"{mlp}.down_proj"]),
        ("all_gather", "lm_head", ["lm_head"]),
    ]
    # Gradients of inputs of several layers are summed first, so that no product is beside them.
    assert _by_module(graph, backward=True) == [
        ("reduce_scatter", "lm_head", ["lm_head"]),
        ("all_gather", f"{mlp}.down_proj", [f"{mlp}.down_proj"] * 2),
        ("all_gather", f"{attention}.o_proj", [f"{attention}.o_proj"] * 2),
    ]


def test_what_is_gathered_again_has_the_products_that_are_computed_again() -> None:
    graph = _graph("model.config.num_hidden_layers=2", "checkpointing=block")
    again = [
        products
        for op, products in products_beside(graph).items()
        if graph.is_backward[op] and graph.names[products[0]].endswith("_again")
    ]
    names = [graph.names[product] for products in again for product in products]
    assert names
    assert all(name.endswith("_again") for name in names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("rate", [1e6, 1e9, 1e15])
def test_only_what_is_longer_than_the_products_is_waited_for(rate: float) -> None:
    graph = _graph()
    device = DeviceSpec("device", 10**12, {"float32": 1e9}, 1e9)
    topology = uniform_topology((device,), Link(1.0))
    groups = {"tensor": CollectiveGroup(2, (Link(rate),))}
    synchronous = TimesWithCollectives(LatencyModel(), groups)
    before = synchronous.op_time_s(graph, topology)[:, 0]
    after = AsyncTensorTimes(synchronous).op_time_s(graph, topology)[:, 0]
    hidden = products_beside(graph)
    others = np.delete(np.arange(graph.n_ops), list(hidden))
    assert (after[others] == before[others]).all()
    for collective, products in hidden.items():
        expected = max(0.0, before[collective] - before[products].sum())
        assert after[collective] == pytest.approx(expected)


def test_a_run_reports_what_is_exposed() -> None:
    config, overlapped = read(*_GROUPS), read(*_GROUPS, "async_tensor_parallel=true")
    usual, shorter = (
        headline(plan(each, model_spec(each), advises=False)) for each in (config, overlapped)
    )
    assert usual["exposed_collective_ms"] == usual["collective_ms"] == shorter["collective_ms"]
    hidden_ms = usual["exposed_collective_ms"] - shorter["exposed_collective_ms"]
    assert hidden_ms > 0
    assert usual["latency_ms"] - shorter["latency_ms"] == pytest.approx(hidden_ms)


@pytest.mark.parametrize(
    ("override", "needed"),
    [
        ("sequence_parallel=false", "use sequence_parallel=true"),
        ("runtime=eager", "use runtime=compiled"),
    ],
)
def test_what_torch_does_not_overlap_is_refused(override: str, needed: str) -> None:
    with pytest.raises(NotApplicableError, match=needed):
        check(read(*_GROUPS, "async_tensor_parallel=true", override))


def test_the_source_of_times_is_named_whatever_a_plan_adds() -> None:
    step = (*_GROUPS, "devices=2xh100")
    alone = ("tensor_parallel=1", "sequence_parallel=false")
    added = (alone, (), ("async_tensor_parallel=true", "float8=rowwise"))
    configs = [read(*step, *overrides) for overrides in added]
    notes = [plan(config, model_spec(config), advises=False).times_note for config in configs]
    assert notes == ["of curves of h100"] * 3

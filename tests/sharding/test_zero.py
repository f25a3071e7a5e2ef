"""A training step whose weights, gradients and updates are sharded over replicas."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.api import capture_graph
from fxpart.capture.models.build import build_model
from fxpart.capture.training.joint import joint_graph
from fxpart.core.blocks import GATHER
from fxpart.core.graph import OpGraph
from fxpart.core.module_paths import block_of
from fxpart.core.optimizer import Optimizer, with_optimizer
from fxpart.core.topology import Link
from fxpart.cost.evaluate import evaluate
from fxpart.cost.prefetch import sharded_step
from fxpart.errors import SpecError
from fxpart.placement.single import single
from fxpart.sharding.zero import SCATTER, WAIT, with_zero
from tests.sharding.test_local_module import llama
from tests.sketch import devices, problem

STEP_COUNTER_BYTES = 4
TARGETS = (GATHER, SCATTER, WAIT)


class Layer(nn.Module):
    """One weight of 1024 bytes, in no numbered block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result


class Positions(nn.Module):
    """A weight that is indexed by integers, which the first operator creates."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.table(torch.arange(4))
        return result


@pytest.fixture(scope="module")
def layer() -> OpGraph:
    """Return the step of one layer on the examples of one replica."""
    return joint_graph(Layer(), (torch.zeros(4, 16),))


@pytest.fixture(scope="module")
def step() -> OpGraph:
    """Return the step of a Llama with three blocks."""
    built = build_model(llama(1, num_hidden_layers=3))
    return joint_graph(built.module, (), {**built.kwargs, "labels": built.kwargs["input_ids"]})


def test_a_block_is_the_outermost_numbered_module() -> None:
    assert block_of("model.layers.3.mlp.experts.5.weight") == "model.layers.3"
    assert block_of("layer1.0.conv1.weight") == "layer1.0"
    assert block_of("model.embed_tokens.weight") == ""


def test_a_root_alone_by_hand(layer: OpGraph) -> None:
    for stage in (2, 3):
        graph = with_zero(layer, stage, 4).graph
        inserted = [t for t in graph.targets if t.startswith("fsdp.")]
        assert inserted == [GATHER, "fsdp.copy", "fsdp.copy", SCATTER]
        assert graph.weight_bytes.tolist() == [256]
        assert graph.value_bytes[graph.gradient_values].tolist() == [256]
        state = with_optimizer(graph, Optimizer("adamw")).weight_state_bytes
        assert state.tolist() == [2 * 256 + STEP_COUNTER_BYTES]


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_scattered_in_another_dtype_by_hand(stage: int) -> None:
    half = joint_graph(Layer().to(torch.bfloat16), (torch.zeros(4, 16, dtype=torch.bfloat16),))
    graph = with_zero(half, stage, 4, reduce_dtype="float32").graph
    (scatter,) = [op for op, target in enumerate(graph.targets) if target == SCATTER]
    # A weight of 512 bytes: its gradient is cast into a buffer of 1024, of which each replica gets
    # 256, cast back to a shard of 128.
    (buffer,) = graph.reads_of(scatter).tolist()
    assert graph.value_bytes[buffer] == 1024
    assert graph.moved_bytes[graph.value_producer[buffer]] == 512 + 1024
    results = graph.value_producer == scatter
    assert sorted(graph.value_alloc_bytes[results].tolist()) == [0, 128, 256]
    assert graph.value_bytes[graph.gradient_values].tolist() == [128]
    state = with_optimizer(graph, Optimizer("adamw")).weight_state_bytes
    assert state.tolist() == [2 * 128 + STEP_COUNTER_BYTES]
    own = with_zero(half, stage, 4, reduce_dtype="bfloat16").graph
    assert own.value_bytes.tolist() == with_zero(half, stage, 4).graph.value_bytes.tolist()


@pytest.mark.parametrize("stage", [2, 3])
def test_shards_have_the_dtype_of_their_gradients(stage: int) -> None:
    step = joint_graph(Positions(), (torch.zeros(4, 16),))
    assert step.dtypes[0] == "int64"
    graph = with_zero(step, stage, 4).graph
    dtypes = {t: d for t, d in zip(graph.targets, graph.dtypes, strict=True) if t in TARGETS}
    assert dtypes == {GATHER: "float32", SCATTER: "float32"}
    state = with_optimizer(graph, Optimizer("adamw")).weight_state_bytes
    assert state.tolist() == [2 * 256 + STEP_COUNTER_BYTES]


def test_stage_1_shards_only_updates(layer: OpGraph) -> None:
    sharded = with_zero(layer, 1, 4)
    graph = sharded.graph
    assert graph.weight_bytes.tolist() == [1024]
    assert graph.value_bytes[graph.gradient_values].tolist() == [256]
    # A part is a view of the gradient, which exists as a whole, and is what replicas reduce.
    whole = sharded.value_of[layer.gradient_values]
    assert graph.value_bytes[whole].tolist() == [1024]
    assert graph.value_alloc_bytes[graph.gradient_values].tolist() == [0]
    assert graph.value_base[graph.gradient_values].tolist() == whole.tolist()
    state = with_optimizer(graph, Optimizer("adamw")).weight_state_bytes
    assert state.tolist() == [2 * 256 + STEP_COUNTER_BYTES]


def test_a_root_alone_waits_for_its_gather_and_scatter(layer: OpGraph) -> None:
    graph = with_zero(layer, 3, 4).graph
    seconds = np.where([t.startswith("fsdp.") for t in graph.targets], 0.0, 1.0)
    cost = sharded_step(
        graph, seconds, np.zeros(graph.n_ops), replicas=4, link=Link(1024.0), targets=TARGETS
    )
    # Each sends three quarters of 1024 bytes.
    assert cost.collectives == 2
    assert cost.collective_bytes == 2048
    assert cost.collective_s == pytest.approx(2 * 0.75)
    assert cost.exposed_s == pytest.approx(2 * 0.75)
    assert cost.latency_s == pytest.approx(seconds.sum() + 1.5)


def test_waiting_for_the_host_hides_collectives(layer: OpGraph) -> None:
    graph = with_zero(layer, 3, 4).graph
    seconds = np.zeros(graph.n_ops)
    # The host launches the operators of the model late; collectives do not wait for it.
    late = np.where([t.startswith("fsdp.") for t in graph.targets], 0.0, 10.0)
    cost, bare = (
        sharded_step(graph, seconds, issue_s, replicas=4, link=Link(1024.0), targets=TARGETS)
        for issue_s in (late, np.zeros(graph.n_ops))
    )
    assert bare.exposed_s == pytest.approx(1.5)
    # The gather ends long before the host launches the first; the scatter comes after the last.
    assert cost.exposed_s == pytest.approx(0.75)
    assert cost.latency_s == pytest.approx(10.75)


def test_a_block_is_gathered_while_the_root_runs(step: OpGraph) -> None:
    graph = with_zero(step, 3, 2).graph
    gathers = [op for op, target in enumerate(graph.targets) if target == GATHER]
    order = [graph.names[op].rpartition(".")[-1] for op in gathers]
    assert order == ["root", "0", "1", "2", "2", "1", "0"]
    assert graph.is_backward[gathers].tolist() == [False] * 4 + [True] * 3
    seconds = np.full(graph.n_ops, 1.0)
    seconds[[t.startswith("fsdp.") for t in graph.targets]] = 0.0
    slow, fast = (
        sharded_step(
            graph, seconds, np.zeros(graph.n_ops), replicas=2, link=Link(rate), targets=TARGETS
        )
        for rate in (2.0**17, 2.0**40)
    )
    assert fast.exposed_s == pytest.approx(0.0, abs=1e-4)
    assert 0 < slow.exposed_s < slow.collective_s
    assert slow.latency_s == pytest.approx(float(seconds.sum()) + slow.exposed_s)


class Towers(nn.Module):
    """Two towers of two layers each; the trained one runs first."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(16))
        self.trained, self.frozen = (
            nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2)) for _ in range(2)
        )
        self.frozen.requires_grad_(requires_grad=False)
        self.trained[0].requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        trained: Tensor = nn.Sequential(*self.trained)(x)
        frozen: Tensor = nn.Sequential(*self.frozen)(x)
        result: Tensor = trained * frozen * self.scale
        return result


def test_frozen_parameters_are_sharded_but_buffers_are_not() -> None:
    graph = joint_graph(Towers(), (torch.zeros(4, 16),))
    (trained,) = (graph.weight_names[w] for w in graph.gradient_weights.tolist())
    assert trained == "trained.1.weight"
    sharded = with_zero(graph, 3, 4).graph
    sizes = dict(zip(sharded.weight_names, sharded.weight_bytes.tolist(), strict=True))
    assert sizes.pop("scale") == 64
    assert set(sizes.values()) == {256}
    # Only the trained weight has a gradient to scatter.
    scatters = [op for op, target in enumerate(sharded.targets) if target == SCATTER]
    assert [sharded.names[op] for op in scatters] == ["reduce_scatter.trained.1"]


def test_a_block_is_gathered_again_with_the_backward_of_the_next_one() -> None:
    step = joint_graph(Towers(), (torch.zeros(4, 16),))
    graph = with_zero(step, 3, 4).graph
    start = graph.first_backward
    again = [op for op, t in enumerate(graph.targets) if t == GATHER and op >= start]
    # The end of the model gathers frozen.1, which has no backward; trained.1 gathers trained.0.
    assert [graph.names[op] for op in again] == [
        "all_gather_again.frozen.1",
        "all_gather_again.trained.1",
        "all_gather_again.trained.0",
    ]
    last_read = dict.fromkeys(graph.names, 0)
    producers = graph.value_producer[graph.reads]
    for op, reader in zip(producers.tolist(), graph.readers.tolist(), strict=True):
        last_read[graph.names[op]] = max(last_read[graph.names[op]], reader)
    copied = graph.names.index("copy_out_again.trained.1")
    assert last_read["all_gather_again.trained.1"] == copied
    end = graph.names.index(step.names[-1])
    assert last_read["all_gather_again.frozen.1"] == end
    assert last_read["all_gather_again.trained.0"] == end


def test_a_block_whose_weight_later_blocks_use_is_gathered_before_their_backward() -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(8, 8)
            self.layers = nn.ModuleList(nn.Sequential(shared, nn.Linear(8, 8)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x

    step = joint_graph(Sharing(), (torch.zeros(2, 8),))
    graph = with_zero(step, 3, 2).graph
    # The last block's backward reads the first block's weight, too.
    copied = graph.names.index("copy_out_again.layers.0")
    assert graph.names.index("all_gather_again.layers.0") < copied
    assert copied < graph.names.index("copy_out_again.layers.1")


def test_higher_stages_need_less_memory(step: OpGraph) -> None:
    peaks = []
    for stage in (0, 1, 2, 3):
        graph = with_optimizer(with_zero(step, stage, 4).graph, Optimizer("adamw"))
        task = problem(graph, devices(10**9))
        peaks.append(evaluate(task, single(task)).peak_bytes)
    assert peaks[1] < peaks[0]
    # With only three blocks, buffers are as large as the savings of stage 2.
    assert peaks[3] < peaks[2] < peaks[0]


def test_unknown_stages_and_steps_without_gradients_are_refused(layer: OpGraph) -> None:
    with pytest.raises(SpecError, match="zero=4 does not exist"):
        with_zero(layer, 4, 2)
    built = build_model(llama(1))
    with pytest.raises(SpecError, match="add phase=training"):
        with_zero(capture_graph(built.module, (), built.kwargs), 3, 2)

"""The contract of `BatchDimAnalyzer`, on small graphs with known answers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from fxpart.errors import FxpartError
from fxpart.torch_compat.batch_dim import BatchDimAnalyzer
from tests.capture.batch_dim.traced import exported, traced


def _asked(
    function: Callable[..., object], *inputs: Tensor, batch: int = 4, dim: int = 0
) -> tuple[BatchDimAnalyzer, list[fx.Node]]:
    """Return the analyzer after all nodes, and the call nodes; the first input is split."""
    graph = traced(function, *inputs).graph
    analyzer = BatchDimAnalyzer(dim)
    analyzer.init_batch_dim_size(batch)
    for number, node in enumerate(graph.find_nodes(op="placeholder")):
        analyzer.set_batch_dim(node, -1 if number else dim)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    for node in calls:
        analyzer.compute_batch_dim(node)
    return analyzer, calls


VIEWS: list[tuple[Callable[[Tensor], Tensor], int, int]] = [
    (lambda x: x.view(20, 3), 0, 0),
    (lambda x: x.reshape(4, 15), 0, 0),
    (lambda x: x.view(2, 2, 5, 3), 0, 0),
    (lambda x: x.view(20, 3), 1, 0),
    (lambda x: x.view(4, 5, 3, 1), 1, 1),
    (lambda x: x[:, :, :1].squeeze(2), 1, 1),
    (lambda x: x[:1].squeeze(0), 1, 0),
    (lambda x: x.unsqueeze(0), 0, 1),
    (lambda x: x.unsqueeze(-1), 1, 1),
    (lambda x: x.expand(7, 4, 5, 3), 0, 1),
    (lambda x: x.permute(2, 0, 1), 0, 1),
    (lambda x: x.permute(2, 0, 1), 1, 2),
    (lambda x: x.transpose(0, 2), 0, 2),
    (lambda x: x.repeat(2, 1, 1, 1), 0, 1),
    (lambda x: x.select(2, 1), 1, 1),
    (lambda x: x.select(1, 1).t(), 0, 1),
    (lambda x: x[:, 1:3], 0, 0),
    (lambda x: x.chunk(3, 1)[1], 0, 0),
]


@pytest.mark.parametrize(("function", "dim", "expected"), VIEWS)
def test_a_view_moves_the_batch(
    function: Callable[[Tensor], Tensor], dim: int, expected: int
) -> None:
    x = torch.empty(4, 5, 3)
    analyzer, calls = _asked(function, x, batch=x.shape[dim], dim=dim)
    assert analyzer.get_batch_dim(calls[-1]) == expected


def test_the_batch_size_follows_a_view_and_its_inverse() -> None:
    graph = traced(lambda x: x.view(20, 3).relu().view(4, 5, 3), torch.empty(4, 5, 3)).graph
    analyzer = BatchDimAnalyzer()
    analyzer.init_batch_dim_size(4)
    placeholder, flat, relu, back = list(graph.nodes)[:4]
    analyzer.set_batch_dim(placeholder, 0)
    assert analyzer.batch_dim_size == 4
    assert (analyzer.compute_batch_dim(flat), analyzer.batch_dim_size) == (0, 20)
    assert analyzer.compute_batch_dim(relu) == 0
    assert (analyzer.compute_batch_dim(back), analyzer.batch_dim_size) == (0, 4)


def test_other_operators_use_the_first_dimension_of_that_size() -> None:
    analyzer, calls = _asked(lambda x, w: w @ x.t(), torch.empty(4, 5), torch.empty(7, 5))
    assert [analyzer.get_batch_dim(node) for node in calls] == [1, 1]


def test_a_full_reduction_stays_split_and_a_batch_reduction_is_partial() -> None:
    x = torch.empty(4, 5)
    analyzer, calls = _asked(lambda x: x.sum(), x)
    assert analyzer.get_batch_dim(calls[-1]) == 0
    analyzer, calls = _asked(lambda x: x.sum(0), x)
    assert analyzer.get_batch_dim(calls[-1]) == -2
    analyzer, calls = _asked(lambda x: x.sum(1), x)
    assert analyzer.get_batch_dim(calls[-1]) == 0
    graph = traced(lambda x: x.sum(0), x).graph
    analyzer = BatchDimAnalyzer()
    analyzer.init_batch_dim_size(4)
    placeholder, total = list(graph.nodes)[:2]
    analyzer.set_batch_dim(placeholder, 0)
    assert analyzer.compute_batch_dim(total, full_reduction=True) == 0


def test_a_node_without_operands_or_with_replicated_ones_is_replicated() -> None:
    analyzer, calls = _asked(
        lambda x, w: (torch.arange(7), w.relu(), x), torch.empty(4, 5), torch.empty(7, 5)
    )
    assert [analyzer.get_batch_dim(node) for node in calls] == [-1, -1]


def test_a_result_of_a_partial_value_is_partial() -> None:
    analyzer, calls = _asked(lambda x: x.sum(0) * 2, torch.empty(4, 5))
    assert [analyzer.get_batch_dim(node) for node in calls] == [-2, -2]


def test_a_view_in_one_branch_does_not_affect_another() -> None:
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(20).relu(), x.relu()

    analyzer, calls = _asked(two, torch.empty(4, 5))
    assert [analyzer.get_batch_dim(node) for node in calls] == [0, 0, 0]


def test_a_symbolic_batch_is_not_found_by_chance() -> None:
    program = exported(lambda x: (x.view(-1), x.sum(0), torch.zeros(4)), torch.empty(4, 5))
    placeholder, *calls = [
        n for n in program.graph.nodes if n.op in {"placeholder", "call_function"}
    ]
    analyzer = BatchDimAnalyzer()
    analyzer.init_batch_dim_size(placeholder.meta["val"].shape[0])
    analyzer.set_batch_dim(placeholder, 0)
    dims = {node.name: analyzer.compute_batch_dim(node) for node in calls}
    assert (dims["view"], dims["sum_1"], dims["zeros"]) == (0, -2, -1)


def test_an_answer_is_cached() -> None:
    analyzer, calls = _asked(lambda x: x.relu(), torch.empty(4, 5))
    analyzer.set_batch_dim(calls[0], 1)
    assert analyzer.compute_batch_dim(calls[0]) == 1


def test_another_batch_size_is_refused() -> None:
    analyzer = BatchDimAnalyzer()
    assert analyzer.batch_dim_size == -1
    analyzer.init_batch_dim_size(4)
    analyzer.init_batch_dim_size(4)
    with pytest.raises(RuntimeError, match="4 already, 5 was asked for") as caught:
        analyzer.init_batch_dim_size(5)
    assert isinstance(caught.value, FxpartError)


def test_an_unknown_node_is_refused() -> None:
    graph = traced(lambda x: x.view(20), torch.empty(4, 5)).graph
    placeholder, view = list(graph.nodes)[:2]
    analyzer = BatchDimAnalyzer()
    with pytest.raises(RuntimeError, match="call init_batch_dim_size first"):
        analyzer.compute_batch_dim(view)
    analyzer.init_batch_dim_size(4)
    with pytest.raises(RuntimeError, match="nothing is known about the batch of node x0"):
        analyzer.compute_batch_dim(view)
    with pytest.raises(RuntimeError, match="nothing is known"):
        analyzer.get_batch_dim(placeholder)
    del placeholder.meta["val"]
    analyzer.set_batch_dim(placeholder, 0)
    with pytest.raises(RuntimeError, match="node x0 has no meta"):
        analyzer.compute_batch_dim(view)


@pytest.fixture
def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))
    dist.destroy_process_group()


def test_answers_become_placements_on_a_mesh(mesh: DeviceMesh) -> None:
    analyzer, calls = _asked(
        lambda x, w: (x.t(), x.sum(0), w.relu()), torch.empty(4, 5), torch.empty(7)
    )
    split, partial, whole = (analyzer.compute_act_spec(node, mesh["data"]) for node in calls)
    assert split.placements == (Shard(1),)
    assert partial.placements == (Partial(),)
    assert whole.placements == (Replicate(),)
    assert split.shape == (5, 4)
    wide = analyzer.compute_act_spec(calls[0], mesh)
    assert wide.placements == (Shard(1), Replicate())
    # The public functions accept the contents of a spec.
    given = torch.distributed.tensor.distribute_tensor(
        torch.ones(5, 4), split.mesh, split.placements
    )
    assert given.placements == split.placements

import pytest
import torch
from torch import nn

from fxpart.capture.inference.module_level import module_graph, trace_modules
from fxpart.errors import CaptureError


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.bag = nn.EmbeddingBag(10, 8)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        first, second = torch.split(self.norm(self.a(x)), 4, -1)
        return torch.cat([first, second], -1) + self.bag(ids)  # type: ignore[no-any-return]


def test_a_leaf_module_is_one_operator() -> None:
    net = _Net().to("meta").eval()
    args = (torch.zeros(2, 4, device="meta"), torch.zeros(2, 3, dtype=torch.long, device="meta"))
    graph = module_graph(trace_modules(net), args)
    assert graph.targets == (
        "Linear",
        "BatchNorm1d",
        "split",
        "getitem",
        "getitem",
        "cat",
        "EmbeddingBag",
        "add",
    )
    assert graph.modules[:2] == ("a", "norm")
    assert graph.flops[0] == 2 * 2 * 4 * 8
    # Buffers count: BatchNorm has weight, bias, mean and variance of 8 floats, and a counter.
    assert graph.weight_bytes[graph.uses_of(1)].sum() == 4 * 8 * 4 + 8
    # A bag reads 6 indices and a row for each, not the table, and writes 2 sums.
    assert graph.moved_bytes[6] == 6 * 8 + 6 * (8 * 4) + 2 * (8 * 4)
    assert graph.group[3] == graph.group[4] == graph.group[2]
    assert [len(graph.reads_of(op)) for op in (3, 4)] == [1, 1]


def test_a_shared_module_counts_once() -> None:
    shared = nn.Linear(4, 4, bias=False).to("meta")
    graph = module_graph(
        trace_modules(nn.Sequential(shared, nn.ReLU(), shared)), (torch.zeros(1, 4, device="meta"),)
    )
    assert graph.n_ops == 3
    assert graph.weight_bytes.tolist() == [64]


class _Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, tables: list[torch.Tensor]) -> torch.Tensor:
        return self.lin(tables[1])[:, 0] + tables[0][:, 1]  # type: ignore[no-any-return]


def test_items_of_an_input_and_slices_of_tensors_may_be_placed_anywhere() -> None:
    net = _Listed().to("meta")
    tables = [torch.zeros(2, 4, device="meta"), torch.zeros(2, 4, device="meta")]
    graph = module_graph(trace_modules(net), (tables,))
    assert graph.group.tolist() == list(range(graph.n_ops))
    assert graph.value_names[:2] == ("tables.0", "tables.1")
    linear = graph.targets.index("Linear")
    item = int(graph.value_producer[graph.reads_of(linear)[0]])
    assert graph.reads_of(item).tolist() == [1]


class _Dynamic(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x


def test_an_untraceable_model_suggests_operator_level() -> None:
    with pytest.raises(CaptureError, match=r"use capture\.level=operator") as caught:
        trace_modules(_Dynamic())
    assert "\n" not in str(caught.value)


def test_wrong_example_inputs_are_refused() -> None:
    traced = trace_modules(nn.Sequential(nn.Linear(4, 4)).to("meta"))
    with pytest.raises(CaptureError, match="does not run on the example inputs"):
        module_graph(traced, (torch.zeros(1, 5, device="meta"),))

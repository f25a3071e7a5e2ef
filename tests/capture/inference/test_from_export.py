"""Capture at operator level: sizes, aliases, groups and costs, counted by hand."""

import pytest
import torch
from torch import nn

from fxpart.capture.inference.export import export_program
from fxpart.capture.inference.from_export import op_graph
from fxpart.core.graph import OpGraph
from fxpart.errors import CaptureError


def _capture(module: nn.Module, *args: torch.Tensor) -> OpGraph:
    return op_graph(export_program(module.to("meta").eval(), tuple(a.to("meta") for a in args)))


def _index(graph: OpGraph, name: str) -> int:
    return graph.names.index(name)


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def test_a_perceptron_by_hand() -> None:
    graph = _capture(_Mlp(), torch.zeros(2, 4))
    assert graph.targets == ("aten.linear.default", "aten.relu.default", "aten.linear.default")
    assert graph.modules == ("up", "", "down")
    assert graph.flops.tolist() == [2 * 2 * 4 * 8, 0, 2 * 2 * 8 * 4]
    assert dict(zip(graph.weight_names, graph.weight_bytes.tolist(), strict=True)) == {
        "up.weight": 8 * 4 * 4,
        "down.weight": 4 * 8 * 4,
        "down.bias": 4 * 4,
    }
    assert graph.value_bytes.tolist() == [2 * 4 * 4, 2 * 8 * 4, 2 * 8 * 4, 2 * 4 * 4]
    assert graph.value_is_output.tolist() == [False, False, False, True]
    # up reads x (32) and its weight (128) and writes 64; relu reads and writes 64.
    assert graph.moved_bytes.tolist() == [32 + 128 + 64, 64 + 64, 64 + 128 + 16 + 32]


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))  # type: ignore[no-any-return]


def test_tied_weights_are_one_storage() -> None:
    with torch.device("meta"):  # Moving the module to meta would untie it.
        module = _Tied()
    graph = _capture(module, torch.zeros(2, 3, dtype=torch.long))
    assert graph.weight_bytes.tolist() == [10 * 4 * 4]
    assert [graph.uses_of(op).tolist() for op in range(2)] == [[0], [0]]
    # The embedding reads 6 indices and 6 rows and writes 6 rows, not the whole table.
    assert graph.moved_bytes[0] == 6 * 8 + 2 * (6 * 4 * 4)


class _Views(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y.view(2, 2, 3).transpose(0, 1)[0] + 1


def test_views_share_their_storage_and_move_nothing() -> None:
    graph = _capture(_Views(), torch.zeros(4, 3))
    product = int(graph.value_producer.tolist().index(0))
    for op in range(1, graph.n_ops - 1):
        value = int(graph.value_producer.tolist().index(op))
        assert graph.value_alloc_bytes[value] == 0, graph.names[op]
        assert graph.moved_bytes[op] == 0
        assert graph.value_base[value] >= product
    assert graph.value_alloc_bytes[product] == 4 * 3 * 4


class _Split(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        high, where = torch.topk(x, 2)
        return high + 1, where


def test_items_of_a_tuple_stay_with_it_and_read_one_item() -> None:
    graph = _capture(_Split(), torch.zeros(3, 5))
    topk, first, second = (_index(graph, n) for n in ("topk", "getitem", "getitem_1"))
    assert graph.group[first] == graph.group[second] == graph.group[topk]
    assert [len(graph.reads_of(op)) for op in (first, second)] == [1, 1]
    names = [graph.value_names[int(graph.reads_of(op)[0])] for op in (first, second)]
    assert names == ["topk.0", "topk.1"]
    assert graph.value_is_output[graph.value_names.index("getitem_1")]


class _InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        older = y.view(-1)
        y.add_(1)
        return older.sum() + y.sum()


def test_a_stale_view_stays_with_the_operator_that_writes_to_it() -> None:
    graph = _capture(_InPlace(), torch.zeros(2, 2))
    writes = _index(graph, "add_")
    # The view was created before the write and is read after it: both must be on one device.
    assert graph.group[_index(graph, "view")] == graph.group[writes]
    assert graph.group[_index(graph, "sum_1")] == graph.group[writes]


class _WritesThroughView(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.view(-1).add_(1)
        return y.sum()


def test_a_write_through_a_view_keeps_the_view_with_its_storage() -> None:
    graph = _capture(_WritesThroughView(), torch.zeros(2, 2))
    assert graph.group.tolist() == [0] * graph.n_ops


class _StaleOutput(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        older = y.view(-1)
        y.add_(1)
        return older


def test_a_stale_output_counts_as_read_at_the_end() -> None:
    graph = _capture(_StaleOutput(), torch.zeros(2, 2))
    assert graph.group.tolist() == [0] * graph.n_ops


class _ReadsBefore(nn.Module):
    """Reads a value that is then written in place, by what was read or by something else."""

    def __init__(self, *, awaited: bool) -> None:
        super().__init__()
        self._awaited = awaited

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        older = y.exp()
        y.add_(older if self._awaited else 1)
        return older.sum() + y.sum()


@pytest.mark.parametrize("awaited", [False, True])
def test_a_reader_stays_with_a_later_write_unless_the_write_awaits_it(awaited: bool) -> None:
    graph = _capture(_ReadsBefore(awaited=awaited), torch.zeros(2, 2))
    reader, writer = _index(graph, "exp"), _index(graph, "add_")
    assert (graph.group[writer] == graph.group[reader]) is not awaited
    assert graph.group[_index(graph, "mul")] != graph.group[writer]


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(1000, 16, mode="sum")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.bag(ids)  # type: ignore[no-any-return]


def test_a_bag_reads_a_row_for_each_index() -> None:
    few, many = (_capture(_Bag(), torch.zeros(3, p, dtype=torch.long)) for p in (1, 50))
    bag = [g.targets.index("aten.embedding_bag.padding_idx") for g in (few, many)]
    more = many.moved_bytes[bag[1]] - few.moved_bytes[bag[0]]
    # 147 more rows of 16 floats, as many more indices of 8 bytes; the rest is overhead.
    assert 147 * (64 + 8) <= more <= 147 * (64 + 8 + 2 * 8)


class _Gather(nn.Module):
    def forward(self, table: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return torch.gather(table, 0, where)


def test_a_gather_from_a_table_of_integers_reads_what_it_returns() -> None:
    graph = _capture(
        _Gather(), torch.zeros(1000, dtype=torch.long), torch.zeros(3, dtype=torch.long)
    )
    assert graph.moved_bytes.tolist() == [3 * 8 + 2 * 3 * 8]


class _UnusedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2, bias=False), nn.Linear(99, 99)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)  # type: ignore[no-any-return]


def test_unread_weights_are_not_counted() -> None:
    assert _capture(_UnusedWeight(), torch.zeros(1, 2)).weight_names == ("used.weight",)


class _Relu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(self.relu(self.lin(x)))  # type: ignore[no-any-return]


def test_the_result_of_an_in_place_write_may_be_placed_anywhere_if_only_it_is_read() -> None:
    graph = _capture(_Relu(), torch.zeros(1, 2))
    assert graph.group.tolist() == list(range(graph.n_ops))
    relu = _index(graph, "relu_")
    value = int(graph.value_producer.tolist().index(relu))
    assert graph.value_alloc_bytes[value] == 0
    assert graph.moved_bytes[relu] == 8 + 8


class _Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_attention_counts_both_products() -> None:
    b, h, s, t, d = 2, 3, 5, 7, 4
    graph = _capture(
        _Attention(), torch.zeros(b, h, s, d), torch.zeros(b, h, t, d), torch.zeros(b, h, t, d)
    )
    assert graph.flops.sum() == 4 * b * h * s * t * d


class _Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


def test_a_model_that_branches_on_values_is_refused_in_one_line() -> None:
    with pytest.raises(CaptureError, match="_Branches cannot be captured") as caught:
        _capture(_Branches(), torch.zeros(2))
    assert "\n" not in str(caught.value)


class _Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_model_without_operators_is_refused() -> None:
    with pytest.raises(CaptureError, match="no operators"):
        _capture(_Nothing(), torch.zeros(2))


def test_half_precision_is_computed_in_half_precision() -> None:
    module = _Mlp().to(torch.bfloat16)
    graph = _capture(module, torch.zeros(2, 4, dtype=torch.bfloat16))
    assert set(graph.dtypes) == {"bfloat16"}
    assert graph.weight_bytes.sum() == 2 * (32 + 32 + 4)


class _Filled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(8, 4).copy_(x)


def test_an_allocation_moves_nothing() -> None:
    graph = op_graph(export_program(_Filled(), (torch.zeros(8, 4),)))
    assert graph.moved_bytes.tolist() == [0, 2 * 8 * 4 * 4]  # a copy reads and writes

"""Small models captured with symbolic sizes: polynomials by hand, and every refusal."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.api import capture_graph
from fxpart.capture.symbolic.api import symbolic_graph, symbolic_program
from fxpart.capture.symbolic.dims import SymbolicDim
from fxpart.core.symbolic_graph import SymbolicGraph
from fxpart.core.temporaries import TEMPORARY
from fxpart.errors import CaptureError, SpecError

BATCH = (SymbolicDim(0, 0, "batch"),)
BOTH = (*BATCH, SymbolicDim(0, 1, "seq_len"))


def _captured(
    module: nn.Module,
    *args: Tensor,
    dims: Sequence[SymbolicDim] = BATCH,
    phase: str = "inference",
) -> SymbolicGraph:
    inputs = tuple(tensor.to("meta") for tensor in args)
    return symbolic_graph(module.to("meta").eval(), inputs, dims=dims, phase=phase)


def _polynomial(symbolic: SymbolicGraph, field: str, row: int) -> dict[tuple[int, ...], int]:
    numbers = symbolic.coefficients[field][row].tolist()
    powers = [tuple(e) for e in symbolic.exponents.tolist()]
    return {power: c for power, c in zip(powers, numbers, strict=True) if c}


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def test_a_perceptron_grows_as_by_hand() -> None:
    symbolic = _captured(_Mlp(), torch.zeros(5, 4))
    linear = "aten.linear.default"
    assert symbolic.graph.targets == (linear, "aten.relu.default", linear)
    assert symbolic.captured_at == (5,)
    assert _polynomial(symbolic, "flops", 0) == {(1,): 2 * 4 * 8}
    assert _polynomial(symbolic, "value_bytes", 1) == {(1,): 8 * 4}
    # It reads its input, a matrix and a vector, and writes its result.
    assert _polynomial(symbolic, "moved_bytes", 0) == {(1,): (4 + 8) * 4, (0,): (32 + 8) * 4}
    assert symbolic.ranges == ((1, None),)
    assert symbolic.exact_from == (1,)
    assert symbolic.value_batch_dim.tolist() == [-1] * 4


def test_gradients_of_weights_do_not_grow() -> None:
    symbolic = _captured(_Mlp(), torch.zeros(5, 4), phase="training")
    of_weight = {
        symbolic.graph.weight_names[w]: _polynomial(symbolic, "value_bytes", int(v))
        for v, w in zip(
            symbolic.graph.gradient_values, symbolic.graph.gradient_weights, strict=True
        )
    }
    assert of_weight["up.weight"] == {(0,): 32 * 4}
    assert of_weight["down.bias"] == {(0,): 3 * 4}


class _Scores(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.transpose(1, 2)


def test_products_of_symbols_are_monomials() -> None:
    symbolic = _captured(_Scores(), torch.zeros(5, 7, 3), dims=BOTH)
    product = symbolic.graph.targets.index("aten.matmul.default")
    assert _polynomial(symbolic, "flops", product) == {(1, 2): 2 * 3}
    producer = symbolic.graph.value_producer.tolist().index(product)
    assert _polynomial(symbolic, "value_bytes", producer) == {(1, 2): 4}


class _Sizes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape
        y = x.reshape(rows * columns)
        return y + torch.arange(rows * columns, device=x.device)


def test_size_computations_are_no_operators() -> None:
    symbolic = _captured(_Sizes(), torch.zeros(5, 7), dims=BOTH)
    assert symbolic.graph.targets == (
        "aten.reshape.default",
        "aten.arange.default",
        "aten.add.Tensor",
    )
    assert _polynomial(symbolic, "value_bytes", 2) == {(1, 1): 8}


class _Multiple(nn.Module):
    def forward(self, x: Tensor, where: Tensor) -> Tensor:
        return x.repeat(3, 1)[where - 1]


def test_a_dimension_may_be_a_multiple_and_a_constant() -> None:
    dims = (*BATCH, SymbolicDim(1, 0, "batch", 3, 1))
    inputs = (torch.zeros(5, 4), torch.zeros(16, dtype=torch.long))
    symbolic = _captured(_Multiple(), *inputs, dims=dims)
    assert _polynomial(symbolic, "value_bytes", 1) == {(1,): 3 * 8, (0,): 8}
    assert _polynomial(symbolic, "value_bytes", symbolic.graph.n_values - 1) == {
        (1,): 3 * 16,
        (0,): 16,
    }


class _Regions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x @ x.transpose(0, 1)[:, : x.shape[0]]
        return x * y.sum()


def test_a_region_costs_the_sum_of_its_calls() -> None:
    module = _Regions()
    with torch.enable_grad():
        symbolic = _captured(module, torch.zeros(5, 4), phase="training")
    assert int(symbolic.at(batch=3).flops.sum()) == 2 * 3 * 3 * 4


class _Swapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous() + 1


def test_a_copy_avoided_at_size_one_is_counted() -> None:
    symbolic = _captured(_Swapped(), torch.zeros(5, 4))
    assert symbolic.exact_from == (2,)
    assert symbolic.ranges == ((1, None),)


class _Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(12, 4))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 12:
            raise ValueError("too long")
        return x + self.table[: x.shape[0]]


def test_a_limit_of_the_model_bounds_the_range() -> None:
    symbolic = _captured(_Table(), torch.zeros(5, 4))
    assert symbolic.ranges == ((1, 12),)
    assert symbolic.at(batch=12).value_bytes[0] == 12 * 16
    with pytest.raises(SpecError, match="batch=13 is outside what was captured"):
        symbolic.at(batch=13)


class _Normed(nn.Module):
    def __init__(self, *, keeps_statistics: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, track_running_stats=keeps_statistics)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, -1)) * 2  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("shape", "dims", "keeps_statistics", "ranges"),
    [
        ((5, 4), BATCH, False, ((2, None),)),
        ((5, 4), BATCH, True, ((1, None),)),
        ((5, 3, 4), BATCH, False, ((1, None),)),
        ((5, 3, 4), BOTH, False, ((1, None), (2, None))),
    ],
)
def test_a_variance_of_one_number_per_channel_is_excluded(
    shape: tuple[int, ...],
    dims: Sequence[SymbolicDim],
    keeps_statistics: bool,
    ranges: tuple[tuple[int, int | None], ...],
) -> None:
    module = _Normed(keeps_statistics=keeps_statistics)
    assert _captured(module, torch.zeros(shape), dims=dims).ranges == ranges
    if ranges == ((2, None),):
        # As in torch.
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            module(torch.zeros(1, 4))


def test_a_training_step_starts_at_the_size_its_normalization_needs() -> None:
    module = _Normed(keeps_statistics=True).to("meta").train()
    inputs = (torch.zeros(5, 4, device="meta"),)
    assert symbolic_graph(module, inputs, dims=BATCH, phase="training").ranges == ((2, None),)


class _Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(5, 4, device=x.device)


class _Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._check(x.shape[0] == x.shape[1])  # type: ignore[no-untyped-call]
        return x + x.transpose(0, 1)


class _Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool1d(x, 2)


class _Nonzero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0] + 1


@pytest.mark.parametrize(
    ("module", "shape", "dims", "message"),
    [
        (
            _Fixed(),
            (5, 4),
            BATCH,
            ("batch cannot be symbolic: the model is valid for batch = 5 only"),
        ),
        (_Square(), (5, 5), BOTH, "seq_len cannot be symbolic: .* for seq_len = batch only"),
        (_Pooled(), (2, 3, 9), (SymbolicDim(0, 2, "seq_len"),), "set capture.symbolic=none"),
        (_Nonzero(), (5, 4), BATCH, "depends on the values of a tensor"),
    ],
)
def test_models_without_a_formula_are_refused_in_one_line(
    module: nn.Module, shape: tuple[int, ...], dims: Sequence[SymbolicDim], message: str
) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        _captured(module, torch.zeros(shape), dims=dims)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((), "no dimension of the inputs is symbolic"),
        ((SymbolicDim(1, 0, "batch"),), "input 1 has no dimension 0"),
        ((SymbolicDim(0, 2, "batch"),), "input 0 has no dimension 2"),
        ((SymbolicDim(0, 0, "batch", 2),), r"is 5 long, which is not 2 \* batch \+ 0"),
        ((*BATCH, SymbolicDim(0, 1, "batch")), "dimension 1 of input 0 is 4 long"),
        ((SymbolicDim(0, 0, "batch", 1, 4),), "of 2 or more"),
    ],
)
def test_dimensions_that_the_inputs_do_not_have_are_refused(
    dims: Sequence[SymbolicDim], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        _captured(_Mlp(), torch.zeros(5, 4), dims=dims)


def test_a_rounded_size_is_no_polynomial() -> None:
    inputs = (torch.zeros(2, 3, 9, device="meta"),)
    dims = (SymbolicDim(0, 2, "seq_len"),)
    with pytest.raises(CaptureError, match="of avg_pool1d is not a polynomial") as caught:
        symbolic_graph(_Pooled(), inputs, dims=dims, ranges={"seq_len": (4, None)})
    assert "\n" not in str(caught.value)


def test_a_range_of_too_few_sizes_is_refused() -> None:
    module = _Mlp().to("meta")
    with pytest.raises(CaptureError, match="can only be 5 to 6"):
        symbolic_graph(
            module, (torch.zeros(5, 4, device="meta"),), dims=BATCH, ranges={"batch": (5, 6)}
        )


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(SpecError, match="phase=trainig does not exist"):
        symbolic_program(_Mlp(), (torch.zeros(5, 4),), dims=BATCH, phase="trainig")


class _Broadcast(nn.Module):
    """A product that copies its first operand for each example, and not for a single one."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:1].expand_as(x).transpose(2, 3) @ x


def test_temporaries_follow_the_sizes() -> None:
    symbolic = symbolic_graph(_Broadcast(), (torch.ones(4, 2, 3, 8, device="meta"),), dims=BATCH)
    assert symbolic.exact_from == (2,)
    for batch in (2, 7):
        graph = symbolic.at(batch=batch)
        fresh = capture_graph(_Broadcast(), (torch.ones(batch, 2, 3, 8, device="meta"),))
        assert graph.value_alloc_bytes.sum() == fresh.value_alloc_bytes.sum()
    assert any(name.endswith(TEMPORARY) for name in symbolic.graph.value_names)


class _Region(nn.Module):
    """A region whose peak is in its product of positions, or in its wide layer for few of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            mixed = (x @ x.transpose(1, 2)).softmax(-1) @ x
            result: Tensor = self.down(self.up(mixed).relu())
        return result


def test_a_region_has_temporaries_at_any_size() -> None:
    symbolic = _captured(_Region(), torch.ones(3, 5, 8), dims=BOTH)
    for batch, seq_len in ((3, 5), (2, 90)):
        graph = symbolic.at(batch=batch, seq_len=seq_len)
        inputs = (torch.ones(batch, seq_len, 8, device="meta"),)
        fresh = capture_graph(_Region().to("meta"), inputs)
        temporary = [v for v, name in enumerate(graph.value_names) if name.endswith(TEMPORARY)]
        assert graph.value_alloc_bytes[temporary].max() > 0
        if seq_len == 5:
            assert graph.value_alloc_bytes.sum() == fresh.value_alloc_bytes.sum()

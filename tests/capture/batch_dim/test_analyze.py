"""Rules for whole graphs, each on a graph with a known answer."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fxpart.capture.batch_dim.analyze import analyze_batch_dims, input_batch_dims, value_batch_dims
from fxpart.capture.batch_dim.layout import BatchDimError
from tests.capture.batch_dim.traced import answered, dims_of, exported, traced

X = torch.empty(6, 5)
W = torch.empty(5, 7)


def test_a_product_that_sums_over_the_batch_is_partial() -> None:
    assert dims_of(lambda x, w: x @ w, X, W) == [0]
    assert dims_of(lambda x, w: w.t() @ x.t(), X, W) == [1]
    assert dims_of(lambda x: x.t() @ x, X) == [-2]
    assert dims_of(lambda x, w: w @ w.t(), X, W) == [-1]


def test_pairs_of_examples_differ_by_process() -> None:
    (pairs,), _ = answered(lambda x: x @ x.t(), X)
    assert pairs.differs.startswith("pairs examples")


def test_a_mean_over_the_batch_is_the_mean_of_the_parts() -> None:
    (mean, total, most), _ = answered(lambda x: (x.mean(), x.sum(0), x.amax(0)), X)
    assert (mean.dim, mean.scale) == (-2, 1)
    assert (total.dim, total.scale) == (-2, 0)
    assert (most.dim, most.reduction) == (-2, "max")
    assert dims_of(lambda x: x.mean(1), X) == [0]


def test_the_shape_of_a_partial_value_is_replicated() -> None:
    assert dims_of(lambda x: torch.ones_like(x.mean()), X) == [-1]


def test_gradients_of_a_mean_loss() -> None:
    weight = torch.empty(7, 5)

    def step(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        hidden = functional.linear(x, weight).tanh()
        return torch.autograd.grad(hidden.mean(), [x, weight])

    layouts, report = answered(step, X.requires_grad_(), weight.requires_grad_())
    X.requires_grad_(False)
    of_x, of_weight = layouts
    # On each process, the mean is over half as many: gradients are twice as large.
    assert (of_x.dim, of_x.scale) == (0, 1)
    assert (of_weight.dim, of_weight.scale) == (-2, 1)
    assert not any(node.all_reduced for node in report.nodes)


@pytest.mark.parametrize(("reduction", "scale"), [("mean", 1), ("sum", 0)])
@pytest.mark.parametrize(
    "loss",
    [
        functional.mse_loss,
        functional.smooth_l1_loss,
        functional.binary_cross_entropy_with_logits,
        lambda x, y, reduction: functional.cross_entropy(x, y.argmax(1), reduction=reduction),
    ],
)
def test_losses_and_their_gradients(
    loss: Callable[..., Tensor], reduction: str, scale: int
) -> None:
    def step(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        value = loss(x @ weight, y, reduction=reduction)
        return value, *torch.autograd.grad(value, [weight])

    weight = torch.empty(5, 7, requires_grad=True)
    layouts, report = answered(step, X, torch.empty(6, 7), weight, x0=0, x1=0)
    assert [(layout.dim, layout.scale) for layout in layouts] == [(-2, scale), (-2, scale)]
    assert not any(node.all_reduced for node in report.nodes)


def test_only_nonlinear_operators_need_an_all_reduce() -> None:
    (linear,), report = answered(lambda x, w: (x.sum(0) * 2 - x[:, 0].sum()) @ w, X, W)
    assert linear.dim == -2
    assert not any(node.all_reduced for node in report.nodes)
    (root,), report = answered(lambda x: x.sum(0).exp(), X)
    assert root.dim == -1
    assert report.of("exp").all_reduced == ("sum_1",)
    # A value that was reduced once stays whole.
    _, report = answered(lambda x: (x.sum(0), x.sum(0).exp() + x), X)
    assert report.of("exp").all_reduced == ("sum_2",)


def test_a_number_may_be_added_to_a_mean_but_not_to_a_sum() -> None:
    (mean,), report = answered(lambda x: x.mean(0) + 1, X)
    assert (mean.dim, mean.scale) == (-2, 1)
    assert report.of("add").all_reduced == ()
    (total,), report = answered(lambda x: x.sum(0) + 1, X)
    assert total.dim == -1
    assert report.of("add").all_reduced == ("sum_1",)


def test_a_maximum_of_parts_is_no_sum() -> None:
    (negative, row), report = answered(lambda x: (-x.amax(0), x.amin(0).unsqueeze(0)), X)
    assert negative.dim == -1
    assert report.of("neg").all_reduced == ("amax",)
    assert (row.dim, row.reduction) == (-2, "min")


def test_partial_and_split_values_are_combined_after_an_all_reduce() -> None:
    (centred,), report = answered(lambda x: x - x.mean(0), X)
    assert centred.dim == 0
    assert report.of("sub").all_reduced == ("mean",)


def test_the_gradient_of_a_table_is_partial() -> None:
    def step(ids: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(functional.embedding(ids, table).sum(), [table])

    ids = torch.zeros(6, 3, dtype=torch.int64)
    (layout,), _ = answered(step, ids, torch.empty(11, 5, requires_grad=True))
    assert (layout.dim, layout.scale) == (-2, 0)


VIEWS: list[tuple[Callable[[Tensor], Tensor], int, int]] = [
    (lambda x: x.view(30), 0, 1),
    (lambda x: x.t().reshape(30), 0, 5),
    (lambda x: x.t().reshape(30).view(5, 6), 1, 1),
    (lambda x: x.t().reshape(30).view(5, 2, 3), 1, 1),
    (lambda x: torch.cat([x, x]), 0, 2),
    (lambda x: torch.cat([x, x, x])[6:], 0, 2),
    (lambda x: torch.cat([x, x], 1), 0, 1),
    (lambda x: x.repeat(3, 1), 0, 3),
    (lambda x: x.repeat_interleave(3, 0), 0, 1),
    (lambda x: torch.stack([x, x]), 1, 1),
    (lambda x: torch.cat([x, x]).chunk(2)[1], 0, 1),
]


@pytest.mark.parametrize(("function", "dim", "outer"), VIEWS)
def test_how_often_the_batch_repeats(
    function: Callable[[Tensor], Tensor], dim: int, outer: int
) -> None:
    (layout,), _ = answered(function, X)
    assert (layout.dim, layout.outer, layout.differs) == (dim, outer, "")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x[2], "some examples"),
        (lambda x: x[:4], "some examples"),
        (lambda x: x.cumsum(0), "goes along the batch"),
        (lambda x: x.sort(0)[0], "goes along the batch"),
        (torch.rand_like, "drawn at random"),
        (lambda x: x + torch.arange(6).unsqueeze(1), "counts the examples"),
        (lambda x: x.var(0), "not made of what processes have"),
    ],
)
def test_a_result_that_differs_by_process_has_a_reason(
    function: Callable[[Tensor], Tensor], reason: str
) -> None:
    (layout,), _ = answered(function, X)
    assert reason in layout.differs


def test_positions_are_right_for_the_examples_of_a_process() -> None:
    (layout,), _ = answered(lambda x: x[torch.arange(6), 2], X)
    assert (layout.dim, layout.differs) == (0, "")


def test_a_mask_of_positions_is_replicated_until_it_meets_the_batch() -> None:
    def masked(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
        return mask, mask.expand(6, 5, 5), torch.where(mask, x.unsqueeze(1), 0.0)

    assert dims_of(masked, X) == [-1, 0, 0]


def test_bags_of_embeddings_are_split_with_their_offsets() -> None:
    def bags(ids: Tensor, table: Tensor) -> Tensor:
        return functional.embedding_bag(ids, table, mode="sum")

    ids = torch.zeros(6, 3, dtype=torch.int64)
    (layout,), report = answered(bags, ids, torch.empty(11, 5))
    assert (layout.dim, layout.differs) == (0, "")
    assert "counts the examples" in report.of("arange").layouts[0].differs


def test_rows_sorted_by_expert_keep_their_dimension() -> None:
    def sorted_rows(x: Tensor) -> Tensor:
        tokens = x.reshape(30)
        order = tokens.argsort()
        back = torch.empty_like(order)
        back[order] = torch.arange(30)
        return tokens[order].exp()[back]

    (layout,), report = answered(sorted_rows, X)
    assert layout.dim == 0
    assert layout.differs
    assert report.of("arange").dims == (0,)


def test_batch_norm_differs_only_in_training() -> None:
    def norm(x: Tensor, training: bool) -> Tensor:
        return torch.native_batch_norm(
            x, None, None, torch.zeros(5), torch.ones(5), training, 0.1, 1e-5
        )[0]

    (evaluated,), _ = answered(lambda x: norm(x, False), X)
    assert (evaluated.dim, evaluated.differs) == (0, "")
    (trained,), _ = answered(lambda x: norm(x, True), X)
    assert trained.dim == 0
    assert "statistics" in trained.differs


def test_a_symbolic_batch_is_not_found_by_chance() -> None:
    # 2 is the batch of the example, and also a size of the model.
    def model(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros(2, 3), torch.zeros(x.shape[0] * 2), x.view(-1).sum()

    program = exported(model, torch.empty(2, 3))
    report = analyze_batch_dims(program)
    assert [report.of(name).dims for name in report.outputs] == [(-1,), (0,), (-2,)]


def test_sizes_shrink_with_the_batch() -> None:
    program = exported(lambda x: x.sum(0) / x.shape[0], torch.empty(4, 5))
    report = analyze_batch_dims(program)
    layout = report.of(report.outputs[0]).layouts[0]
    assert (layout.dim, layout.scale) == (-2, 1)


def test_inputs_of_another_size_have_no_batch() -> None:
    assert input_batch_dims(exported(lambda x, y: x + y, X, X)) == {"inputs_0": 0, "inputs_1": 0}
    program = torch.export.export(torch.nn.Bilinear(5, 5, 2), (X, X), strict=False)
    assert input_batch_dims(program) == {"input1": 0, "input2": 0}


def test_results_are_found_by_value_names() -> None:
    report = analyze_batch_dims(traced(lambda x: x.max(1)[0].sum(), X), {"x0": 0})
    names = ["x0", "max_1.0", "max_1.1", "getitem", "sum_1"]
    assert value_batch_dims(report, names).tolist() == [0, 0, 0, 0, -2]
    with pytest.raises(BatchDimError, match="no value summ; nearest: sum_1"):
        value_batch_dims(report, ["summ"])


def test_invalid_questions_are_refused() -> None:
    module = traced(lambda x: x.relu(), X)
    with pytest.raises(BatchDimError, match="no input y"):
        analyze_batch_dims(module, {"y": 0})
    with pytest.raises(BatchDimError, match="input x0 has 2 dimensions, but dimension 2"):
        analyze_batch_dims(module, {"x0": 2})
    with pytest.raises(BatchDimError, match="no input has a batch dimension"):
        analyze_batch_dims(module, {})
    with pytest.raises(BatchDimError, match="a graph alone does not tell which inputs"):
        analyze_batch_dims(module)
    report = analyze_batch_dims(module, {"x0": 0})
    with pytest.raises(BatchDimError, match="no node rellu; nearest: relu"):
        report.of("rellu")
    module = traced(lambda x: x.relu().tanh(), X)
    del next(n for n in module.graph.nodes if n.name == "relu").meta["val"]
    with pytest.raises(BatchDimError, match="node relu has no meta"):
        analyze_batch_dims(module, {"x0": 0})

"""Comparison of the results of two runs."""

import pytest
import torch
from torch import Tensor, nn

from fxpart.errors import ExecutionError, SpecError
from fxpart.execution.difference import gradient_share
from fxpart.execution.outcome import Outcome, agreement, step_outcome, trained_parameters


def _outcome(loss: float, *gradient: float) -> Outcome:
    return Outcome(None, torch.tensor(loss), {"w": torch.tensor(gradient)})


def test_a_step_by_hand() -> None:
    layer = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[2.0, 3.0]]))
    x = torch.tensor([[1.0, 10.0], [1.0, 20.0]])
    outcome = step_outcome(lambda: {"y": layer(x)}, trained_parameters(layer), keep_results=True)
    assert outcome.loss is not None
    assert outcome.loss.item() == (32.0 + 62.0) / 2
    assert outcome.gradients is not None
    assert outcome.gradients["weight"].tolist() == [[1.0, 15.0]]
    assert outcome.results["y"].tolist() == [[32.0], [62.0]]
    assert not outcome.results["y"].requires_grad
    assert step_outcome(lambda: layer(x), trained_parameters(layer)).results is None


def test_frozen_and_unused_weights_have_no_gradient() -> None:
    used, frozen, unused = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
    parameters = trained_parameters(nn.ModuleDict({"a": used, "b": frozen, "c": unused}))
    assert list(parameters) == ["a.weight", "a.bias", "c.weight", "c.bias"]
    outcome = step_outcome(lambda: frozen(used(torch.ones(2))), parameters)
    assert outcome.gradients is not None
    assert list(outcome.gradients) == ["a.weight", "a.bias"]


def test_a_model_without_real_results_is_refused() -> None:
    with pytest.raises(SpecError, match="returns no real-valued tensor"):
        step_outcome(lambda: torch.tensor([1]), {})


def test_equal_steps_have_no_difference() -> None:
    assert agreement(_outcome(1.0, 2.0, 3.0), _outcome(1.0, 2.0, 3.0)) == (0.0, 0.0)
    assert agreement(Outcome(torch.ones(2), None, None), Outcome(torch.ones(2), None, None)) == (
        0.0,
        None,
    )


def test_rounding_is_reported_and_accepted() -> None:
    differs, share = agreement(_outcome(1.0, 4.0, 1.0), _outcome(1.0, 4.0, 1.0 + 2**-20))
    assert differs == 0.0
    assert share == 2**-22


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (
            _outcome(1.1, 4.0),
            "the split model's results differ from the unsplit model's by 0.1 of the",
        ),
        (_outcome(1.0, 4.1), "gradients differ from the unsplit model's by 0.025 of the elements"),
        (
            Outcome(None, torch.tensor(1.0), {}),
            "gradients are not comparable with .*only one of them has .* a gradient",
        ),
    ],
)
def test_larger_differences_are_refused(outcome: Outcome, message: str) -> None:
    with pytest.raises(ExecutionError, match=message) as caught:
        agreement(outcome, _outcome(1.0, 4.0))
    assert "\n" not in str(caught.value)


def test_a_gradient_of_rounding_noise_is_scaled_by_the_others() -> None:
    eps = torch.finfo(torch.float32).eps

    def of(noise: float) -> dict[str, Tensor]:
        return {"w": torch.tensor([1.0]), "b": torch.tensor([noise])}

    assert gradient_share(of(3 * eps), of(-3 * eps)) < eps**0.5
    assert gradient_share(of(30 * eps), of(-30 * eps)) > eps**0.5
    # A small one above the noise is compared with itself.
    assert gradient_share(of(0.011), of(0.010)) == pytest.approx(0.1, rel=1e-5)


def test_sparse_gradients_count_by_their_values() -> None:
    places, values = torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0])
    sparse = torch.sparse_coo_tensor(places, values, (2,), check_invariants=True)
    assert gradient_share({"w": sparse}, {"w": torch.tensor([3.0, 0.0])}) == 0.0

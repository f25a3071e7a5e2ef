"""Results of the stages against the unsplit model: the same rule as for a split model."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fxpart.errors import ExecutionError
from fxpart.execution.difference import rounding
from fxpart.execution.pipeline_job import gradient_key, output_key
from fxpart.execution.unsplit_reference import (
    Reference,
    gradient_differences,
    loss_difference,
    output_difference,
    refuse_other_results,
)
from tests.execution.pipeline_scene import skips

Gradients = dict[tuple[int, str], Tensor]


def _losses(*losses: float) -> Reference:
    return Reference((), losses, {})


@pytest.mark.parametrize(
    ("losses", "expected", "apart"),
    [
        ((0.5, 0.25), (0.5, 0.25), 0.0),
        ((), (), 0.0),
        ((0.5, 0.1 + 0.2), (0.5, 0.3), math.ulp(0.3)),
        ((math.nan,), (math.nan,), 0.0),
        ((math.nan,), (1.0,), math.inf),
        ((1.0,), (1.0, 1.0), math.inf),
    ],
)
def test_losses(losses: tuple[float, ...], expected: tuple[float, ...], apart: float) -> None:
    assert loss_difference(losses, _losses(*expected)) == apart


def test_results_are_matched_by_microbatch_and_position() -> None:
    outputs = tuple((torch.full((2,), float(m)), torch.tensor([m])) for m in range(2))
    computed = {output_key(m, i): outputs[m][i].clone() for m in range(2) for i in range(2)}
    expected = Reference(outputs, (), {})
    assert output_difference(computed, expected) == 0.0
    computed[output_key(1, 0)][1] += 0.25
    assert output_difference(computed, expected) == 0.25


def _differences(changed: Gradients, dropped: Gradients) -> tuple[float, float | None]:
    """Return the differences after some gradients were changed, or dropped."""
    chain = skips()
    expected: Gradients = {
        (stage.index, name): torch.ones(parameter.shape)
        for stage in chain.stages
        for name, parameter in stage.module.named_parameters(remove_duplicate=False)
    }
    gradients = {key: g for key, g in {**expected, **changed}.items() if key not in dropped}
    computed = [
        {gradient_key(name): g for (key, name), g in gradients.items() if key == stage.index}
        for stage in chain.stages
    ]
    # Gradients not in `changed` are expected unchanged; those in it are expected near zero.
    near = {key: g * 1e-9 if key in changed else g for key, g in expected.items()}
    return gradient_differences(chain, computed, Reference((), (), near))


def _own_and_tied() -> tuple[tuple[int, str], tuple[int, str]]:
    """Return a weight of one stage, and a name of the embedding, which two stages have."""
    chain = skips()
    names = [(s.index, n) for s in chain.stages for n, _ in s.module.named_parameters()]
    untied = next(key for key in names if key[1] == "first.bias")
    return untied, next(key for key in names if key[1] == "third.weight")


def test_equal_gradients() -> None:
    assert _differences({}, {}) == (0.0, 0.0)


def test_a_gradient_of_pure_rounding_has_no_scale_of_its_own() -> None:
    untied, _ = _own_and_tied()
    noise = torch.full(skips().stages[untied[0]].module.get_parameter(untied[1]).shape, 2e-9)
    share, tied = _differences({untied: noise}, {})
    assert 0.0 < share < rounding([torch.ones(1)])
    assert tied == 0.0


def test_a_wrong_gradient_of_usual_size_is_detected() -> None:
    untied, _ = _own_and_tied()
    wrong = torch.ones_like(skips().stages[untied[0]].module.get_parameter(untied[1]).detach())
    assert _differences({untied: wrong}, {})[0] > 1.0


def test_a_missing_gradient_counts_as_zero() -> None:
    untied, tied = _own_and_tied()
    nothing = torch.zeros(0)
    assert _differences({}, {untied: nothing}) == (1.0, 0.0)
    assert _differences({}, {tied: nothing}) == (0.0, 1.0)


ROUNDING = math.sqrt(torch.finfo(torch.float32).eps)
EXPECTED = Reference(
    ((torch.full((2, 4), 5.0),), (torch.full((2, 4), 401.0),)), (), {(0, "bias"): torch.ones(4)}
)


def _with(change: float) -> Mapping[str, Tensor]:
    """Return the expected results, all elements of the second microbatch's changed."""
    apart = EXPECTED.outputs[1][0] + change
    return {output_key(0, 0): EXPECTED.outputs[0][0], output_key(1, 0): apart}


@pytest.mark.parametrize("gradients", [None, 0.0, 0.9 * ROUNDING])
@pytest.mark.parametrize("results", [0.0, 0.9 * ROUNDING * 401])
def test_rounding_is_accepted(results: float, gradients: float | None) -> None:
    refuse_other_results(_with(results), (), gradients, EXPECTED)


@pytest.mark.parametrize(
    ("results", "gradients", "message"),
    [
        (1.1 * ROUNDING * 401, None, "results differ from the unsplit model's by 0.00038 of the"),
        (math.inf, 0.0, "results are not comparable with"),
        (0.0, 1.1 * ROUNDING, "gradients differ from the unsplit model's by 0.00038 of the"),
        (0.0, math.inf, "gradients are not comparable with"),
    ],
)
def test_larger_differences_are_refused(
    results: float, gradients: float | None, message: str
) -> None:
    with pytest.raises(ExecutionError) as raised:
        refuse_other_results(_with(results), (), gradients, EXPECTED)
    line = str(raised.value)
    assert message in line
    assert line.endswith("take these out of the model")
    assert "\n" not in line


def test_another_loss_is_refused() -> None:
    expected = replace(EXPECTED, losses=(5.0, 401.0))
    refuse_other_results(_with(0.0), (5.0, 401.1), 0.0, expected)
    with pytest.raises(ExecutionError, match=r"results differ .* by 0\.02 of the"):
        refuse_other_results(_with(0.0), (5.1, 401.0), 0.0, expected)

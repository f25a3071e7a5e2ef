"""Causes of failures, guessed from errors and configurations; a guess is not stated as a fact."""

from types import SimpleNamespace

import pytest
from torch import nn

from fxpart.capture.models.forward_failure import change_for

_CHOICE = RuntimeError("selected index k not in range for dimension")
_STRIDE = RuntimeError("expected stride along 1 dim to be multiple of 16 bytes, got 61")


def _model(**settings: object) -> nn.Module:
    config = SimpleNamespace(**settings)
    config.get_text_config = lambda **_: SimpleNamespace(**settings)
    model = nn.Linear(1, 1)
    model.config = config  # type: ignore[assignment]
    return model


def test_a_choice_may_be_of_too_many_experts_or_groups() -> None:
    model = _model(
        n_routed_experts=4,
        n_group=2,
        topk_group=3,
        moe_topk=None,
        index_topk=8,
        _experts_implementation=None,
    )
    assert change_for(model, _CHOICE) == (
        "it may choose more experts than there are, or a number that is not set:"
        " n_routed_experts=4, n_group=2, topk_group=3, moe_topk=null; set them as model.config.NAME"
    )


@pytest.mark.parametrize("settings", [{"index_topk": 8}, {"top_k": 50, "n_group": 1}])
def test_a_choice_without_experts_has_another_cause(settings: dict[str, object]) -> None:
    assert not change_for(_model(**settings), _CHOICE)


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"hidden_size": 64, "intermediate_size": 61}, "; set model.config.intermediate_size=64"),
        ({"hidden_size": 61, "intermediate_size": 61}, ""),
        ({"hidden_size": 64}, ""),
    ],
)
def test_only_the_one_setting_of_a_length_is_to_be_changed(
    settings: dict[str, object], change: str
) -> None:
    text = change_for(_model(**settings), _STRIDE)
    assert text == f"torch's grouped product takes rows of a multiple of 16 bytes{change}"

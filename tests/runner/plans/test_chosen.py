"""What ``mode=recommend`` refuses, and what it leaves out."""

from pathlib import Path

import pytest

from fxpart.errors import NotApplicableError, SpecError
from runner.plans.chosen import recommended_plan
from tests.runner.composed import TINY_LLAMA, read

RECOMMEND = (*TINY_LLAMA, "devices=4x16gb", "mode=recommend")


def test_a_setting_is_named_as_it_was_given() -> None:
    config = read(*RECOMMEND, "mode.global_batch=3", "mode.space={data_parallel: [2]}")
    with pytest.raises(NotApplicableError, match=r"must divide mode.global_batch=3; use 1 or 3$"):
        recommended_plan(config)


@pytest.mark.parametrize("given", ["checkpointing=budget", "mode.space={checkpointing: [budget]}"])
def test_what_is_computed_again_is_not_left_open(given: str) -> None:
    with pytest.raises(NotApplicableError, match="is decided for one plan; of many take none"):
        recommended_plan(read(*RECOMMEND, "phase=training", given))


@pytest.mark.parametrize("imbalance", [-7, 1.5])
def test_no_imbalance_without_experts(imbalance: float) -> None:
    with pytest.raises(SpecError, match=r"gets; give 1 without expert_parallel$"):
        recommended_plan(read(*RECOMMEND, f"expert_imbalance={imbalance}"))


def test_a_plan_that_goes_with_no_setting_leaves_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    space = "mode.space={tensor_parallel: [1], data_parallel: [1], checkpointing: [none]}"
    late = ("phase=training", "backward_order=late_weight_gradients")
    chosen, summary = recommended_plan(read(*RECOMMEND, *late, space))
    # Schedules run the whole backward of a stage at once.
    assert (chosen.backward_order, chosen.schedule.name) == ("late_weight_gradients", "none")
    assert "(2 plans of 2 costed)" in summary

"""Refusals and omissions of ``mode=recommend``."""

from pathlib import Path

import pytest

from fxpart.errors import NotApplicableError, SpecError
from runner.experiment.experiment import plan
from runner.experiment.model_spec import model_spec
from runner.experiment.user_mode import chosen_mode
from runner.plans.chosen import recommended_plan
from tests.runner.composed import TINY_LLAMA, read

RECOMMEND = (*TINY_LLAMA, "devices=4x16gb", "mode=recommend")


def test_a_setting_is_named_as_it_was_typed() -> None:
    config = read(*RECOMMEND, "mode.global_batch=3", "mode.space={data_parallel: [2]}")
    with pytest.raises(NotApplicableError, match=r"must divide mode.global_batch=3; use 1 or 3$"):
        recommended_plan(config)


def test_the_recomputation_of_a_budget_is_decided_for_each_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    sizes = ("model.config.num_hidden_layers=2", "model.batch_size=4", "model.seq_len=64")
    step = (*TINY_LLAMA, *sizes, "phase=training")
    first = ["model.layers.0"]
    again = read(*step, "devices=1x1gb", "checkpointing=block", f"recomputed_blocks={first}")
    needed = plan(again, model_spec(again), advises=False).evaluation.peak_bytes
    space = "mode.space={schedule: [none], checkpointing: [none, block, budget]}"
    fitting = (*step, f"devices=1x{needed / 1e6}mb", "mode=recommend")
    # All blocks fit, too; that takes longer.
    chosen, summary = recommended_plan(read(*fitting, space))
    assert (chosen.checkpointing, chosen.recomputed_blocks) == ("block", first)
    assert "checkpointing=budget" in summary
    budgeted, _ = recommended_plan(read(*fitting, "checkpointing=budget"))
    assert budgeted.recomputed_blocks == first


@pytest.mark.parametrize("imbalance", [-7, 1.5])
def test_no_imbalance_without_experts(imbalance: float) -> None:
    with pytest.raises(SpecError, match=r"equal share; use 1 without expert_parallel$"):
        recommended_plan(read(*RECOMMEND, f"expert_imbalance={imbalance}"))


def test_a_plan_without_a_valid_setting_leaves_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    space = "mode.space={tensor_parallel: [1], data_parallel: [1], checkpointing: [none]}"
    late = ("phase=training", "backward_order=late_weight_gradients")
    chosen, summary = recommended_plan(read(*RECOMMEND, *late, space))
    # Schedules run the whole backward of a stage at once.
    assert (chosen.backward_order, chosen.schedule.name) == ("late_weight_gradients", "none")
    assert "(2 plans of 2 costed)" in summary


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("mode=recommend", "mode.stages=2"), "recommend has no option 'stages'.* of mode pipe"),
        (
            ("mode=single", "mode.global_batch=2"),
            "has no option 'global_batch'.* of mode recommend",
        ),
        (("mode=single", "mode.stages=2"), "single has no option 'stages'.* of mode pipeline"),
    ],
)
def test_an_option_of_another_mode_does_not_apply(overrides: tuple[str, ...], line: str) -> None:
    """So a sweep of several modes that sets it leaves out the others."""
    config = read(*TINY_LLAMA, "devices=2x16gb", *overrides)
    begin = recommended_plan if config.mode.name == "recommend" else chosen_mode
    with pytest.raises(NotApplicableError, match=line):
        begin(config)

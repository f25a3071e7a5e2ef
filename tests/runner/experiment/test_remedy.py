"""Changes that make a model fit, tried before they are suggested."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fxpart.errors import InfeasibleError, NotApplicableError
from runner.config.schema import Config
from runner.experiment.experiment import plan
from runner.experiment.model_spec import model_spec
from runner.experiment.remedy import changes, with_remedy
from tests.runner.composed import read

STEP = ("mode=pipeline", "phase=training", "schedule=gpipe", "microbatches=8")


def names(*overrides: str) -> list[str]:
    return [change.overrides for change in changes(read(*overrides))]


def test_the_cheapest_changes_for_a_user_are_tried_first() -> None:
    assert names(*STEP, "devices=2x16gb", "model.batch_size=2") == [
        "schedule=1f1b",
        "checkpointing=block",
        "schedule=1f1b checkpointing=block",
        "microbatches=4",
        "microbatches=2",
        "microbatches=1",
        "model.batch_size=1",
        "devices=4x16gb",
        "devices=8x16gb",
        "devices=16x16gb",
    ]
    several = names(*STEP, "schedule=interleaved", "mode.interleave=2", "devices=2x16gb+2x24gb")
    assert several[0] == "schedule=1f1b mode.interleave=1"
    assert not [name for name in several if "devices" in name]
    plain = names("mode=pipeline", "granularity=2", "devices=2x16gb")
    assert plain[:3] == ["granularity=operator", "mode=kl_based", "devices=2x16gb+host64gb"]


def test_settings_that_leave_less_room_are_the_first_to_go() -> None:
    strict = ("reserve.upper_limits=true", "offload.cache=none", "phase=decode", "mode=single")
    found = names(*strict, "devices=1x8gb+host64gb")
    assert found[:3] == [
        "reserve.upper_limits=false",
        "offload.cache=auto",
        "latent_attention=absorbed",
    ]
    assert "latent_attention=absorbed" not in names("mode=single", "devices=1x8gb")
    assert "offload.cache=auto" not in names(*strict, "devices=1x8gb")


def test_a_mode_that_spreads_is_tried_with_more_devices() -> None:
    many = [f"mode=kl_based devices={count}x16gb" for count in (2, 4, 8)]
    assert names("mode=single", "devices=1x16gb")[2:] == many
    equal = names("mode=equal_layers", "devices=1x16gb")[2:]
    assert equal == [change.removeprefix("mode=kl_based ") for change in many] + many


def test_experts_are_spread_over_a_group_that_splits_each() -> None:
    group = ("phase=decode", "mode=single", "devices=8x16gb", "tensor_parallel=8")
    assert "expert_parallel=8" in names("model=qwen3_30b_a3b", *group)
    assert "expert_parallel=8" not in names("model=llama3_1_8b", *group)
    assert "expert_parallel=8" not in names("model=qwen3_30b_a3b", *group, "expert_parallel=8")


def test_other_modes_are_tried_for_a_generation() -> None:
    generation = ("phase=generate", "prompt_len=8", "output_len=8", "devices=2x16gb")
    assert names(*generation, "mode=kl_based")[:3] == [
        "mode=size_based",
        "mode=pipeline",
        "devices=2x16gb+host64gb",
    ]
    assert names(*generation, "mode=pipeline")[:2] == ["mode=size_based", "mode=kl_based"]
    assert names(*generation, "mode=single", "model.batch_size=4")[0] == "prefill_batch=1"
    in_turn = names(*generation, "mode=single", "model.batch_size=4", "prefill_batch=2")
    assert "prefill_batch=1" not in in_turn
    for name in ("single", "cost_aware"):
        modes = ["mode=size_based", "mode=pipeline", "mode=kl_based"]
        assert names(*generation, f"mode={name}")[:3] == modes


def test_a_host_with_enough_memory_is_tried() -> None:
    """Most modes name the number of devices needed in their error, whose memory may be a host's."""

    def said(devices: str, needed_bytes: int = 0) -> list[str]:
        config = read("mode=kl_based", f"devices={devices}")
        proposed = changes(config, knows_devices=True, needed_bytes=needed_bytes)
        return [change.overrides for change in proposed]

    assert said("2x16gb+1x24gb", 65 * 10**9) == ["devices=2x16gb+1x24gb+host256gb"]
    assert said("1x16gb+host8gb+nvme1tb", 10**10) == ["devices=1x16gb+host64gb+nvme1tb"]
    assert said("1x16gb+host8gb", 10**9) == []  # of which there is enough
    assert said("mixed_box", 10**9) == []  # whose tiers are in a file
    assert said("1x16gb", 10**13) == []


def test_training_replicas_share_their_states() -> None:
    replicas = ("phase=training", "data_parallel=2", "mode=single", "devices=2x16gb")
    assert names(*replicas, "model.batch_size=2")[:5] == [
        "zero=1",
        "zero=3",
        "checkpointing=block",
        "zero=1 checkpointing=block",
        "zero=3 checkpointing=block",
    ]
    assert names(*replicas, "zero=1", "model.batch_size=2")[0] == "zero=3"
    in_turn = ("schedule=1f1b", "microbatches=4", "model.batch_size=2")
    assert names(*replicas, *in_turn)[1] == "zero=3"
    # Stages of a pipeline share weights over microbatches alone, and hold as much with either.
    pipeline = (*replicas, *in_turn, "mode=pipeline", "devices=4x16gb")
    assert names(*pipeline)[:3] == ["zero=1", "zero=2", "checkpointing=block"]
    assert names(*pipeline, "schedule=none")[:2] == ["zero=1", "checkpointing=block"]
    # One device does not add up gradients in this order.
    assert "zero=3" not in names(*STEP, "data_parallel=2", "model.batch_size=2", "devices=2x16gb")


def test_a_change_reaches_the_options_of_the_mode() -> None:
    """The mode uses the options to count microbatches in flight."""
    for change in changes(read(*STEP, "devices=2x16gb")):
        options, config = change.config.mode.options, change.config
        assert options["schedule"] == config.schedule.name
        assert options["microbatches"] == config.microbatches


def where(fits: Callable[[Config], bool]) -> Callable[[Config], None]:
    def place(config: Config) -> None:
        if config.microbatches == 4:
            raise NotApplicableError("not with four")
        if not fits(config):
            raise InfeasibleError("does not fit")

    return place


@pytest.mark.parametrize(
    ("fits", "may_capture", "advice"),
    [
        (lambda c: c.schedule.name == "1f1b", True, "too large; schedule=1f1b makes it fit"),
        (lambda c: c.checkpointing == "block", True, "too large; checkpointing=block makes it fit"),
        (lambda c: c.microbatches < 8, True, "too large; microbatches=2 makes it fit"),
        (
            lambda _: False,
            False,
            "too large; tried one at a time, and not enough: schedule=1f1b;"
            " microbatches=2; microbatches=1; devices=4x16gb; devices=8x16gb; devices=16x16gb",
        ),
    ],
)
def test_the_first_change_that_fits_is_suggested(
    fits: Callable[[Config], bool], may_capture: bool, advice: str
) -> None:
    config = read(*STEP, "devices=2x16gb", "model=custom", "model.factory=no.module:here")
    error = InfeasibleError("too large", needed_bytes=3, available_bytes=2)
    advised = with_remedy(config, error, where(fits), may_capture=may_capture)
    assert str(advised) == advice
    assert (advised.needed_bytes, advised.available_bytes) == (3, 2)


MODEL = """
import torch
from torch import nn
def make(batch_size, dtype):
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]
    return nn.Sequential(*layers), (torch.zeros(batch_size * 64, 64),)
"""


def test_the_suggestion_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of gpipe that does not fit names 8 microbatches in flight; with the advice it fits."""
    (tmp_path / "remedied.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    overrides = (
        *STEP,
        "model=custom",
        "model.factory=remedied:make",
        "reserve=none",
        "optimizer=none",
        f"capture.cache_dir={tmp_path}",
        "tracking=none",
    )

    def planned(*more: str) -> int:
        config = read(*overrides, *more)
        result = plan(config, model_spec(config), may_capture=False)
        assert result.schedule is not None
        return max(result.schedule.peak_bytes)

    most, least = planned("devices=2x1gb"), planned("devices=2x1gb", "schedule=1f1b")
    assert least < most
    size = f"devices=2x{((least + most) // 2 + 1) / 1e6}mb"
    with pytest.raises(InfeasibleError) as refused:
        planned(size)
    assert "the first stage holds activations of 8 in flight" in str(refused.value)
    assert str(refused.value).endswith("; schedule=1f1b makes it fit")
    assert planned(size, "schedule=1f1b") <= (least + most) // 2 + 1


def test_nothing_is_suggested_for_a_device_smaller_than_its_reserve() -> None:
    config = read("model=gpt2", "mode=single", "devices=1x400mb")
    message = r"but its reserve alone takes 603\.98 MB .*; take a larger device, or reserve=none$"
    with pytest.raises(InfeasibleError, match=message):
        plan(config, model_spec(config))

"""``float8=`` in a run: what it combines with, and what it changes."""

import pytest

from fxpart.errors import SpecError
from runner.experiment.check import check
from runner.experiment.experiment import plan
from runner.experiment.model_spec import model_spec
from runner.experiment.result import Result
from tests.runner.composed import TINY_LLAMA, read

_STEP = (
    *TINY_LLAMA,
    "model.config.num_hidden_layers=2",
    "model.dtype=bfloat16",
    "phase=training",
    "runtime=compiled",
    "mode=single",
)


def _planned(*overrides: str) -> Result:
    config = read(*_STEP, *overrides)
    check(config)
    return plan(config, model_spec(config), advises=False)


@pytest.mark.parametrize("sharded", [(), ("data_parallel=2", "zero=3", "model.batch_size=2")])
def test_only_times_change(sharded: tuple[str, ...]) -> None:
    sixteen, eight = (
        _planned("devices=2xh100", *sharded, f"float8={recipe}") for recipe in ("none", "rowwise")
    )
    assert eight.evaluation.devices[0].peak_bytes == sixteen.evaluation.devices[0].peak_bytes
    # In so small a model casts take longer than products.
    assert eight.evaluation.latency_s > sixteen.evaluation.latency_s
    assert "in rowwise float8" in eight.subject_line
    assert "float8" not in sixteen.subject_line
    assert eight.times_note == sixteen.times_note


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("float8=tensorwise", "runtime=eager"), "got runtime=eager; use runtime=compiled"),
        (("float8=rowwise", "phase=inference"), "got phase=inference; use phase=training"),
        (("float8.name=rowwide",), "float8=rowwide does not exist; nearest: rowwise"),
        (("float8.filter_fqns=[lm_head]",), "float8=none, with which all are"),
        (("float8=tensorwise", "finetune=lora"), "got finetune=lora; use finetune=none"),
        (("float8=rowwise", "model.dtype=float32"), "found no linear layer that multiplies in"),
    ],
)
def test_what_does_not_combine_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        _planned("devices=2xh100", *overrides)


def test_a_device_without_8_bits_is_named() -> None:
    with pytest.raises(SpecError, match="a100_80gb has no rate of float8_e4m3"):
        _planned("devices=2xa100_80gb", "float8=tensorwise")

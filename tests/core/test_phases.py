"""Options of a training step, and phases: valid ones, and refusals."""

import pytest

from fxpart.capture.cache import cache_key
from fxpart.capture.captured import step_key
from fxpart.core.phases import BACKWARD_ORDERS, CHECKPOINTING, PHASES, StepOptions, check_phase
from fxpart.errors import SpecError


def test_the_default_step_is_that_of_an_accelerator_without_checkpointing() -> None:
    usual = StepOptions()
    assert (usual.checkpointing, usual.fused_attention, usual.fused_dropout) == ("none", True, True)


def test_every_option_has_its_own_cached_graph() -> None:
    chosen = [
        StepOptions(checkpointing, attention, dropout, order)
        for order in BACKWARD_ORDERS
        for checkpointing in CHECKPOINTING
        for attention in (True, False)
        for dropout in (True, False)
    ]
    keys = [
        step_key("training", train_mode=train_mode, options=options)
        for options in chosen
        for train_mode in (True, False)
    ]
    assert len({cache_key({}, "operator", "training", key) for key in keys}) == len(keys) == 64


@pytest.mark.parametrize("phase", PHASES)
def test_operator_level_supports_every_phase(phase: str) -> None:
    check_phase(phase)


def test_module_level_supports_inference() -> None:
    check_phase("inference", "module")


def test_an_unknown_checkpointing_suggests_the_nearest() -> None:
    with pytest.raises(SpecError, match="checkpointing=blocks does not exist; nearest: block"):
        StepOptions(checkpointing="blocks")


def test_an_unknown_backward_order_lists_the_known_ones() -> None:
    with pytest.raises(SpecError, match="backward_order=late does not exist; there are: autograd"):
        StepOptions(backward_order="late")


@pytest.mark.parametrize(
    ("phase", "level", "message"),
    [
        ("trainin", "operator", "phase=trainin does not exist; nearest: training"),
        ("training", "module", r"use capture\.level=operator"),
    ],
)
def test_a_phase_that_cannot_be_captured_is_refused(phase: str, level: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_phase(phase, level)

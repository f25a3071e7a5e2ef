"""Options of a training step, and phases: what exists, and what is refused."""

import pytest

from fxpart.capture.cache import cache_key
from fxpart.capture.captured import step_key
from fxpart.core.phases import BACKWARD_ORDERS, CHECKPOINTING, PHASES, StepOptions, check_phase
from fxpart.errors import SpecError


def test_by_default_a_step_is_as_on_an_accelerator_and_keeps_everything() -> None:
    usual = StepOptions()
    assert (usual.checkpointing, usual.fused_attention, usual.fused_dropout) == ("none", True, True)


def test_every_option_makes_another_graph_in_the_cache() -> None:
    chosen = [
        StepOptions(way, attention, dropout, order)
        for order in BACKWARD_ORDERS
        for way in CHECKPOINTING
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
def test_operators_are_captured_in_every_phase(phase: str) -> None:
    check_phase(phase)


def test_modules_are_captured_in_inference() -> None:
    check_phase("inference", "module")


def test_an_unknown_way_of_checkpointing_is_told_the_nearest() -> None:
    with pytest.raises(SpecError, match="checkpointing=blocks does not exist; nearest: block"):
        StepOptions(checkpointing="blocks")


def test_an_unknown_order_of_the_backward_is_told_what_there_is() -> None:
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

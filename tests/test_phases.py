"""Options of a training step, and phases: what exists, and what is refused."""

import pytest

from fxpart.errors import SpecError
from fxpart.phases import CHECKPOINTING, PHASES, StepOptions, check_phase


def test_every_way_of_checkpointing_and_every_phase_is_taken() -> None:
    assert [StepOptions(checkpointing=name).checkpointing for name in CHECKPOINTING] == [
        "none",
        "block",
    ]
    for phase in PHASES:
        check_phase(phase)


def test_an_unknown_way_of_checkpointing_is_told_the_nearest() -> None:
    with pytest.raises(SpecError, match="checkpointing=blocks does not exist; nearest: block"):
        StepOptions(checkpointing="blocks")


@pytest.mark.parametrize(
    ("phase", "level", "said"),
    [
        ("trainin", "operator", "phase=trainin does not exist; nearest: training"),
        ("training", "module", r"use capture\.level=operator"),
    ],
)
def test_a_phase_that_cannot_be_captured_is_refused(phase: str, level: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        check_phase(phase, level)

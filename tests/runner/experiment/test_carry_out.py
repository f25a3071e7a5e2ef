"""What can be carried out, as far as a configuration shows."""

import numpy as np
import pytest

from fxpart.errors import SpecError
from runner.experiment.carry_out import _by_device, check_execute
from tests.runner.composed import read


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["execute=local", "execute.name=locally"],
            "execute=locally does not exist; nearest: local",
        ),
        (["execute=pipeline"], "execute=pipeline runs a schedule of torch's engine, got schedule="),
        (["execute=pipeline", "schedule=interleaved"], "got schedule=interleaved; use schedule="),
        (["execute=local", "execute.threads=0"], "execute.threads=0 must be above 0"),
        (["execute=local", "execute.seed=-1"], "execute.seed=-1 must be at least 0"),
        (
            ["execute=pipeline", "schedule=gpipe", "execute.timeout_s=nan"],
            "execute.timeout_s=nan must be above 0 and at most 1000000.0",
        ),
        (["execute=local", "execute.repeats=0"], "execute.repeats=0 must be above 0"),
        (
            ["execute=pipeline", "schedule=gpipe", "execute.timeout_s=-1"],
            "execute.timeout_s=-1.0 must be above 0",
        ),
        (
            ["execute=local", "capture.level=module"],
            "execute=local runs operators, got capture.level=module",
        ),
        (
            ["execute=local", "execute.device=cuda", "latency=profiled", "latency.device=cpu"],
            "latency.device=cpu differs from execute.device=cuda, so operators would not be "
            "measured as they are run; leave out latency.device",
        ),
        (
            ["execute=local", "latency=calibrated", "latency.threads=4"],
            "latency.threads=4 differs from execute.threads=1, so operators would not be measured "
            "as they are run; leave out latency.threads",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        check_execute(read(*overrides))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["execute=none", "capture.level=module"],
        ["execute=local"],
        ["execute=local", "phase=training"],
        ["execute=local", "execute.threads=4", "latency=profiled"],
        # With these, nothing is measured.
        ["execute=local", "latency.threads=4"],
        ["execute=local", "latency=calibrated", "latency.file=a.json", "latency.threads=4"],
        ["execute=none", "latency=profiled", "latency.threads=4"],
        ["execute=pipeline", "schedule=gpipe"],
        ["execute=pipeline", "schedule=1f1b", "phase=training", "microbatches=4"],
    ],
)
def test_what_can_be_run_is_accepted(overrides: list[str]) -> None:
    check_execute(read(*overrides))


def test_stages_are_those_of_the_schedule() -> None:
    """Consecutive operators on one device are one stage; a device without an operator has none."""
    joined = _by_device(np.array([3, 3, 1, 1, 0]), (3, 1, 2, 0))
    assert joined.partition_of.tolist() == [0, 0, 1, 1, 2]
    assert joined.devices_of_partition == ((3,), (1,), (0,))

"""Whether devices have what a plan needs beside its tensors, and the plan that is sought if not."""

from dataclasses import replace

import numpy as np
import pytest

from fxpart.core.partitions import partition_by_device
from fxpart.core.reserve import Interval
from fxpart.cost.device_memory import DeviceMemory
from fxpart.cost.evaluate import evaluate
from fxpart.errors import InfeasibleError
from runner.experiment.device_memory import does_not_fit, memory_line, with_less_memory
from tests.sketch import chain, devices, problem


def _needs(device: int, allocator: int, total: int) -> DeviceMemory:
    parts = {
        "tensors": Interval(40, 40, 40),
        "allocator": Interval(0, allocator, 2 * allocator),
    }
    return DeviceMemory(device, parts, total)


def test_all_devices_of_a_kind_lose_the_share_that_one_lacks() -> None:
    this = problem(chain(4), devices(50, 50, 50))
    specs = [
        replace(spec, name="same" if i < 2 else "other")
        for i, spec in enumerate(this.topology.devices)
    ]
    this = replace(this, topology=replace(this.topology, devices=tuple(specs)))
    plan = evaluate(this, partition_by_device(this.graph, np.array([0, 0, 0, 0])))
    peak_bytes = plan.devices[0].peak_bytes
    less = with_less_memory(this, plan, [_needs(0, 20, 50)])
    left = int(50 * (1 - 10 / peak_bytes))
    assert [spec.memory_bytes for spec in less.topology.devices] == [left, left, 50]
    assert [spec.total_bytes for spec in less.topology.devices] == [50, 50, 50]


@pytest.mark.parametrize(
    ("allocator", "verdict"),
    [(5, "fits"), (8, "tight, allocator decides"), (11, "does not fit, allocator decides")],
)
def test_the_line_says_what_decides(allocator: int, verdict: str) -> None:
    line = memory_line([_needs(0, 1, 50), _needs(1, allocator, 50)])
    assert line.startswith(f"{verdict}: device 1 needs {40 + allocator} (40 to")


def test_what_does_not_fit_names_the_parts() -> None:
    error = does_not_fit([_needs(0, 1, 50), _needs(1, 20, 50)])
    assert isinstance(error, InfeasibleError)
    assert "device 1 needs 60 B for the best plan found, it has 50:" in str(error)
    assert "tensors 40, allocator 20; allocator decides" in str(error)

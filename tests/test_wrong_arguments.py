"""Wrong arguments of the library's functions are refused in words."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from fxpart import (
    Assignment,
    DeviceSpec,
    LatencyModel,
    Link,
    NotApplicableError,
    PipelineOptions,
    Problem,
    SpecError,
    device_map,
    device_peaks,
    evaluate,
    make_mode,
    make_problem,
    partition_by_device,
    read_calibration,
    real_module,
    split_points,
    stage_costs,
    uniform_topology,
)
from fxpart.capture import capture, joint_graph

_DEVICE = DeviceSpec("d", 10**9, {"float32": 1e9}, 1e9)
_INPUT = torch.zeros(2, 4)


def _problem(layers: int) -> Problem:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
    topology = uniform_topology((_DEVICE,) * 2, Link(1e9, 0.0))
    return make_problem(capture(model, (_INPUT,)).graph, topology, LatencyModel())


def _placed(*partition_of: int) -> Assignment:
    homes = tuple((device,) for device in range(max(partition_of) + 1))
    return Assignment(np.array(partition_of), homes)


_READERS: list[Callable[[Problem, Assignment], object]] = [
    evaluate,
    device_peaks,
    stage_costs,
    lambda problem, plan: split_points(problem.graph, plan),
    lambda problem, plan: device_map(problem.graph, plan),
]


@pytest.mark.parametrize("read", _READERS)
@pytest.mark.parametrize("partition_of", [(0, 0, 1), (0, 0, 0, 1, 1)])
def test_a_plan_of_another_model_is_refused(
    read: Callable[[Problem, Assignment], object], partition_of: tuple[int, ...]
) -> None:
    with pytest.raises(SpecError, match=f"places {len(partition_of)} operators, the model has 4"):
        read(_problem(4), _placed(*partition_of))


@pytest.mark.parametrize("read", _READERS[:3])
def test_a_device_that_does_not_exist_is_refused(
    read: Callable[[Problem, Assignment], object],
) -> None:
    with pytest.raises(SpecError, match="uses device 7, there are 2"):
        read(_problem(2), Assignment(np.array([0, 1]), ((0,), (7,))))


@pytest.mark.parametrize("partition_of", [(0, 1, 0, 1), (1, 1, 0, 0)])
def test_stages_that_read_from_later_ones_have_no_schedule(partition_of: tuple[int, ...]) -> None:
    with pytest.raises(NotApplicableError, match="linear_2 of stage 0 reads from linear_1 of"):
        stage_costs(_problem(4), _placed(*partition_of))


@pytest.mark.parametrize("homes", [(0, 1), ("ab", "cd"), ([0], [1])])
def test_homes_of_partitions_are_tuples(homes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(SpecError, match="must be a tuple of logical ids"):
        Assignment(np.array([0, 1]), homes)


@pytest.mark.parametrize("device_of", [[0, 1], [0, 1, -1, 0]])
def test_each_operator_has_a_device(device_of: list[int]) -> None:
    with pytest.raises(SpecError, match="one device for each of 4 operators"):
        partition_by_device(_problem(4).graph, np.array(device_of))


def test_devices_of_operators_are_integers() -> None:
    listed: Any = [0, 0, 1, 1]
    assert partition_by_device(_problem(4).graph, listed).partition_of.tolist() == listed
    floats: Any = np.zeros(4)
    with pytest.raises(SpecError, match="numbered by integers, got float64"):
        partition_by_device(_problem(4).graph, floats)


_ANYTHING: Any = None
"""What a caller without type checks may pass."""
_NOT_A_TUPLE: Any = _INPUT
_NOT_WHOLE: Any = 1e9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: capture(_ANYTHING, (_INPUT,)), "takes a torch.nn.Module, got None"),
        (lambda: capture(cast("nn.Module", nn.Linear), (_INPUT,)), "make an instance"),
        (lambda: capture(nn.Linear(4, 4), _NOT_A_TUPLE), r"pass \(input,\) for one input"),
        (lambda: real_module(nn.Linear(4, 4), _NOT_A_TUPLE), r"pass \(input,\) for one input"),
        (lambda: joint_graph(_ANYTHING, (_INPUT,)), "takes a torch.nn.Module, got None"),
        (lambda: make_problem(_ANYTHING, _ANYTHING, _ANYTHING), "pass the graph"),
        (lambda: make_mode(_ANYTHING), "mode None does not exist"),
        (lambda: make_mode("pipeline", 3), "must be a mapping of names to values"),
        (
            lambda: DeviceSpec("d", _NOT_WHOLE, {"float32": 1e9}, 1e9),
            "whole number of bytes, got 1000",
        ),
        (
            lambda: DeviceSpec("d", 1, {"fp32": 1e9}, 1e9).rate_for("float32"),
            "no FLOP/s for float32; nearest: fp32",
        ),
        (lambda: read_calibration("no.json"), "there is no file no.json"),
    ],
)
def test_a_wrong_type_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        call()


def test_options_of_a_mode_may_be_an_instance() -> None:
    problem = _problem(4)
    options = PipelineOptions(stages=2)
    placed = make_mode("pipeline", options)(problem)
    named = make_mode("pipeline", {"stages": 2})(problem)
    assert placed.partition_of.tolist() == named.partition_of.tolist() == [0, 0, 1, 1]

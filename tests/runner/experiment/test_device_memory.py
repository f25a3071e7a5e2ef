"""Whether devices hold what a plan needs beside its tensors, and the next plan sought if not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fxpart.core.partitions import partition_by_device
from fxpart.core.reserve import Interval
from fxpart.cost.device_memory import DeviceMemory
from fxpart.cost.evaluate import evaluate
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError
from fxpart.placement import Place
from runner.config.schema import Config
from runner.experiment import fitting_plan
from runner.experiment.device_memory import (
    device_memory,
    does_not_fit,
    memory_line,
    with_less_memory,
)
from runner.experiment.experiment import plan
from runner.experiment.model_spec import model_spec
from runner.experiment.topology import build_topology
from runner.experiment.user_mode import chosen_mode
from tests.runner.command import OWN
from tests.runner.composed import read
from tests.sketch import BASELINES, chain, devices, problem


def _needs(device: int, allocator: int, total: int) -> DeviceMemory:
    parts = {
        "tensors": Interval(40, 40, 40),
        "allocator": Interval(0, allocator, 2 * allocator),
    }
    return DeviceMemory(device, parts, total)


def _on_three(memory_bytes: int) -> tuple[Problem, Evaluation]:
    """Return a plan with everything on the first of three devices; the third is of another kind."""
    this = problem(chain(4), devices(*[memory_bytes] * 3))
    specs = [
        replace(spec, name="same" if i < 2 else "other")
        for i, spec in enumerate(this.topology.devices)
    ]
    this = replace(this, topology=replace(this.topology, devices=tuple(specs)))
    return this, evaluate(this, partition_by_device(this.graph, np.array([0, 0, 0, 0])))


def test_all_devices_of_a_kind_get_the_limit_of_the_one_that_lacks_memory() -> None:
    """Even if the tensors left memory of it unused: else the next plan would be the same."""
    this, plan = _on_three(100)
    peak_bytes = plan.devices[0].peak_bytes
    tensors = {"tensors": Interval(peak_bytes, peak_bytes, peak_bytes)}
    need = DeviceMemory(0, tensors | {"driver context": Interval(0, 102 - peak_bytes, 200)}, 100)
    less = with_less_memory(this, plan, [need], in_proportion=False)
    assert [spec.memory_bytes for spec in less.topology.devices] == [
        peak_bytes - 2,
        peak_bytes - 2,
        100,
    ]
    assert [spec.total_bytes for spec in less.topology.devices] == [100, 100, 100]


def test_a_larger_device_of_the_same_name_keeps_its_memory() -> None:
    this = problem(chain(4), devices(100, 200))
    topology = this.topology
    alike = [replace(spec, name="gpu", reserved_bytes=0) for spec in topology.devices]
    this = replace(this, topology=replace(topology, devices=tuple(alike)))
    plan = evaluate(this, partition_by_device(this.graph, np.array([0, 0, 1, 1])))
    need = DeviceMemory(0, {"tensors": Interval(101, 101, 101)}, 100)
    less = with_less_memory(this, plan, [need], in_proportion=False)
    assert [spec.memory_bytes for spec in less.topology.devices] == [
        plan.devices[0].peak_bytes - 1,
        200,
    ]


def test_a_lack_of_a_schedule_is_a_share_of_its_memory() -> None:
    this, plan = _on_three(100)
    peak_bytes = plan.devices[0].peak_bytes
    need = DeviceMemory(0, {"tensors": Interval(200, 200, 200)}, 100)
    less = with_less_memory(this, plan, [need], in_proportion=True)
    assert less.topology.devices[0].memory_bytes == peak_bytes // 2


def test_a_share_of_the_missing_bytes_is_taken_from_those_of_the_plan() -> None:
    this, plan = _on_three(100)
    peak_bytes = plan.devices[0].peak_bytes
    need = DeviceMemory(0, {"tensors": Interval(103, 103, 103)}, 100)
    for share, bytes_less in ((1.0, 3), (1 / 3, 1)):
        less = with_less_memory(this, plan, [need], share, in_proportion=False)
        assert less.topology.devices[0].memory_bytes == peak_bytes - bytes_less


def test_a_device_with_room_keeps_what_it_holds() -> None:
    this, _ = _on_three(100)
    plan = evaluate(this, partition_by_device(this.graph, np.array([0, 1, 1, 2])))
    first, second, third = (device.peak_bytes for device in plan.devices)
    needs = [
        DeviceMemory(0, {"tensors": Interval(first, 100 + first - 1, 200)}, 100),
        DeviceMemory(1, {"tensors": Interval(second, second, second)}, 100),
        DeviceMemory(2, {"tensors": Interval(third, third, third)}, 100),
    ]
    less = with_less_memory(this, plan, needs, in_proportion=False, keeps_fitting=True)
    assert [spec.memory_bytes for spec in less.topology.devices] == [1, second, 100]
    less = with_less_memory(this, plan, needs, in_proportion=False)
    assert [spec.memory_bytes for spec in less.topology.devices] == [1, 1, 100]


def test_nothing_is_reserved_of_the_host_among_other_devices() -> None:
    config = read("devices=1x16gb+1xcpu")
    topology = build_topology(config.devices, config.transfer_rate, config.reserve)
    assert [spec.on_host for spec in topology.devices] == [False, True]
    this = problem(chain(4), topology)
    assignment = partition_by_device(this.graph, np.array([0, 0, 1, 1]))
    first, second = device_memory(config, this, assignment, evaluate(this, assignment))
    assert first.parts["driver context"].expected == config.reserve.context_bytes > 0
    assert "driver context" not in second.parts or not second.parts["driver context"].expected


def _first_plan_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the first of all plans lack a byte; return a list with an entry for each plan."""
    searches: list[int] = []

    def needed(*arguments: Any) -> tuple[DeviceMemory, ...]:  # noqa: ANN401 - passed on
        searches.append(1)
        needs = device_memory(*arguments)
        lacks = len(searches) == 1
        return tuple(replace(need, total_bytes=need.needed.expected - lacks) for need in needs)

    monkeypatch.setattr(fitting_plan, "device_memory", needed)
    return searches


def test_searches_of_plans_that_did_not_fit_count_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    config = read(*OWN, "devices=2x16gb", "mode=optimal", "mode.steps=4")
    alone = plan(config, model_spec(config))
    searches = _first_plan_does_not_fit(monkeypatch)
    both = plan(config, model_spec(config))
    assert len(searches) == 2
    seconds = [progress.seconds for progress in both.curve]
    assert seconds == sorted(seconds)
    assert len(seconds) > len(alone.curve)
    assert both.partition_s >= seconds[-1]


def test_a_search_for_a_plan_that_fits_gets_a_quarter_of_the_time_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    config = read(*OWN, "devices=2x16gb", "mode=optimal", "mode.time_limit_s=0.4")
    limits: list[object] = []

    def chosen(changed: Config) -> Place:
        limits.append(changed.mode.options["time_limit_s"])
        return chosen_mode(changed)

    monkeypatch.setattr(fitting_plan, "chosen_mode", chosen)
    searches = _first_plan_does_not_fit(monkeypatch)
    plan(config, model_spec(config))
    assert (len(searches), limits) == (2, [0.1])


@pytest.mark.parametrize(
    ("allocator", "verdict"),
    [(5, "fits"), (8, "tight, allocator decides"), (11, "does not fit, allocator decides")],
)
def test_the_line_names_what_decides(allocator: int, verdict: str) -> None:
    line = memory_line([_needs(0, 1, 50), _needs(1, allocator, 50)])
    assert line.startswith(f"{verdict}: device 1 needs {40 + allocator} (40 to")
    assert ("reserve.upper_limits=true" in line) == verdict.startswith("tight")


def test_a_plan_with_room_for_the_upper_limits_is_found_if_that_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    context = ["reserve.context_bytes=1000", "reserve.context_range=[0,20]"]

    def needs(size_bytes: int, *overrides: str) -> tuple[DeviceMemory, ...]:
        mb = size_bytes / 10**6
        config = read(*OWN, "mode=kl_based", f"devices=2x{mb}mb", "reserve=none", *overrides)
        return plan(config, model_spec(config)).device_memory

    (alone,) = needs(10**9)
    size_bytes = alone.needed.expected + 1000
    (tight,) = needs(size_bytes, *context)
    assert (tight.verdict, tight.needed.expected) == ("tight", size_bytes)
    both = needs(size_bytes, *context, "reserve.upper_limits=true")
    assert len(both) == 2
    for need in both:
        assert need.verdict == "fits"
        assert need.parts["driver context"] == Interval(0, 20000, 20000)


def test_parts_that_the_unit_does_not_show_are_left_out_of_the_line() -> None:
    assert memory_line([_needs(0, 1, 16 * 10**9)]) == "fits: device 0 needs 0.00 of 14.90 GiB"


def test_a_plan_that_does_not_fit_names_the_parts() -> None:
    error = does_not_fit([_needs(0, 1, 50), _needs(1, 20, 50)])
    assert isinstance(error, InfeasibleError)
    assert "device 1 needs 60 B for the best plan found, it has 50:" in str(error)
    assert "tensors 40, allocator 20; allocator decides" in str(error)
    only = does_not_fit([_needs(0, 20, 50)], is_only=True)
    assert "needs 60 B for this plan, it has 50:" in str(only)


def test_several_tensors_decide() -> None:
    assert "; tensors decide; take" in str(does_not_fit([_tensors(60, 60, 50)]))
    assert memory_line([_tensors(40, 60, 50)]).startswith("tight, tensors decide: device 0")


@pytest.mark.parametrize(
    ("mode", "which"),
    [("single", "this plan"), ("size_based", "the best plan found")],
)
def test_a_mode_with_one_plan_names_no_best_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str, which: str
) -> None:
    monkeypatch.chdir(folder)

    def too_little(*arguments: Any) -> tuple[DeviceMemory, ...]:  # noqa: ANN401 - passed on
        needs = device_memory(*arguments)
        return tuple(replace(need, total_bytes=need.needed.expected - 1) for need in needs)

    monkeypatch.setattr(fitting_plan, "device_memory", too_little)
    config = read(*OWN, f"mode={mode}", "devices=1x16gb")
    with pytest.raises(InfeasibleError, match=f"for {which}, it has"):
        plan(config, model_spec(config))


def _tensors(needed: int, most: int, total: int) -> DeviceMemory:
    return DeviceMemory(0, {"tensors": Interval(needed, needed, most)}, total)


def test_sizes_that_differ_are_shown_with_digits_that_differ() -> None:
    total = 16 * 10**9
    text = str(does_not_fit([_tensors(total + 10**6, total + 10**6, total)]))
    assert "needs 14.902 GiB for the best plan found, it has 14.901: tensors" in text
    assert "needs 14.902 of 14.901 GiB" in memory_line(
        [_tensors(total + 10**6, total + 10**6, total)]
    )
    tight = memory_line([_tensors(total - 10**9, total + 10**6, total)])
    assert "needs 13.97 (13.97 to 14.902) of 14.901 GiB" in tight


def test_baselines_have_one_plan_whatever_the_memory() -> None:
    assert set(BASELINES) <= set(fitting_plan._ONE_PLAN)

"""`run_local`: measurements checked by hand on a model of three operators, and refusals."""

import math
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.inference.export import export_program
from fxpart.capture.inference.from_export import op_graph
from fxpart.core.assignment import Assignment
from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import make_problem
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import ExecutionError, SpecError
from fxpart.execution import local
from fxpart.execution.local import run_local
from fxpart.execution.real_model import RealModel
from tests.execution.scene import at_random, grouped, in_a_row, small

pytestmark = pytest.mark.usefixtures("one_thread")


class Three(nn.Module):
    """Three operators on 4 float32 numbers, which are 16 bytes; the first has a weight of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x * self.weight
        second = first + 1
        return first - second


def _real(module: nn.Module, *args: Tensor) -> RealModel:
    program = export_program(module.eval(), args)
    return RealModel(module, args, {}, program, op_graph(program))


def _three() -> RealModel:
    return _real(Three(), torch.arange(4.0))


def _on(*devices: tuple[int, ...]) -> Assignment:
    return Assignment(np.array([0, 0, 1]), devices)


def test_peaks_by_hand() -> None:
    real = _three()
    together = run_local(real, Assignment(np.zeros(3, dtype=np.int64), ((0,),)), 1, repeats=1)
    # The weight, the input and all three results: the first is read by the last.
    assert together.peak_bytes == (16 + 16 + 3 * 16,)
    apart = run_local(real, _on((0,), (2,)), 3, repeats=1)
    # Device 2 receives the first and the second result, and computes the third.
    assert apart.peak_bytes == (16 + 16 + 2 * 16, 0, 3 * 16)
    back = Assignment(np.array([0, 1, 2]), ((0,), (1,), (0,)))
    # Device 1 computes one value from another; the received one is live meanwhile.
    assert run_local(real, back, 2, repeats=1).peak_bytes == (16 + 16 + 3 * 16, 2 * 16)


def test_a_replica_has_its_weights_and_its_turn() -> None:
    # Input 0 is computed on devices 0 and 2, input 1 on devices 1 and 2.
    run = run_local(_three(), _on((0, 1), (2,)), 3, repeats=1)
    assert run.peak_bytes == (64, 64, 48)


def test_the_report_of_a_run() -> None:
    run = run_local(_three(), _on((0,), (1,)), 2, repeats=3)
    assert run.max_difference == 0.0
    assert len(run.runs_s) == 3
    assert min(*run.runs_s, run.unsplit_latency_s) > 0
    assert run.latency_s == median(run.runs_s)
    assert run.throughput_per_s == pytest.approx(1 / run.latency_s)
    assert run.allocator_peak_bytes == ()
    assert run.threads == 1
    assert run.device_name


@pytest.mark.parametrize("name", ["mixtral_8x7b", "resnet50"])
def test_a_run_with_transfers_computes_the_same(name: str) -> None:
    real = small(name)
    run = run_local(real, at_random(real.graph, 3, 1), 3, repeats=1)
    assert run.max_difference == 0.0
    assert all(peak > 0 for peak in run.peak_bytes)


def test_the_evaluation_agrees_for_every_device() -> None:
    real = small("mixtral_8x7b")
    spec = DeviceSpec("d", 1 << 30, {"float32": 1e9}, 1e9)
    problem = make_problem(real.graph, uniform_topology((spec,) * 4, Link(1e9)), LatencyModel())
    placed = in_a_row(real.graph, 4)
    peaks = tuple(device.peak_bytes for device in evaluate(problem, placed).devices)
    assert run_local(real, placed, 4, repeats=1).peak_bytes == peaks


class Chance(nn.Module):
    """Draws different numbers in every run."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def test_another_result_is_an_error() -> None:
    real = _real(Chance(), torch.ones(4))
    message = r"results differ from the unsplit model's by 0\.\d+ of .*, more than the 0\.000\d+ of"
    with pytest.raises(ExecutionError, match=message) as caught:
        run_local(real, grouped(real.graph, np.arange(real.graph.n_ops)), 2, repeats=1)
    assert "\n" not in str(caught.value)


class Counting(nn.Module):
    """Adds earlier inputs to its input; its rows share memory and cannot be written."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Buffer(torch.zeros(4))
        self.rows = nn.Buffer(torch.arange(4.0).expand(2, -1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x)
        return x * self.seen + self.rows


def test_buffers_written_by_a_run_are_restored() -> None:
    real = _real(Counting(), torch.arange(4.0))
    run = run_local(real, grouped(real.graph, np.arange(real.graph.n_ops)), 3, repeats=2)
    assert run.max_difference == 0.0
    assert not real.module.get_buffer("seen").any()


class Bounded(nn.Module):
    """Refuses tokens outside its table at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.table(x)
        return rows + 1


def test_a_model_that_fails_at_run_time_is_an_error() -> None:
    fine = _real(Bounded(), torch.tensor([0, 1]))
    broken = replace(fine, args=(torch.tensor([0, 7]),))
    with pytest.raises(ExecutionError, match="cannot be run on cpu: IndexError: index out of") as e:
        run_local(broken, Assignment(np.array([0, 1]), ((0,), (1,))), 2, repeats=1)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("assignment", "n_devices", "repeats", "message"),
    [
        (
            Assignment(np.zeros(2, dtype=np.int64), ((0,),)),
            1,
            1,
            "places 2 operators, the model has 3",
        ),
        (_on((0,), (2,)), 2, 1, "uses device 2, there are 2"),
        (_on((-1,), (1,)), 2, 1, "uses device -1, there are 2"),
        (_on((0,), (1,)), 2, 0, "repeats=0 must be 1 or more"),
    ],
)
def test_invalid_settings_are_refused(
    assignment: Assignment, n_devices: int, repeats: int, message: str
) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        run_local(_three(), assignment, n_devices, repeats=repeats)
    assert "\n" not in str(caught.value)


def test_tensors_that_do_not_fit_are_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = _three()
    # The input and three results, and a second copy of the last for the comparison.
    monkeypatch.setattr(local, "free_bytes", lambda _: 4 * 16 + 16)
    run = run_local(real, _on((0,), (1,)), 2, repeats=1)
    assert math.isfinite(run.latency_s)
    monkeypatch.setattr(local, "free_bytes", lambda _: 4 * 16 + 15)
    monkeypatch.setattr(local, "split_by_assignment", None)
    with pytest.raises(SpecError, match="takes 80 B for tensors, and cpu has 79 B left; set a"):
        run_local(real, _on((0,), (1,)), 2, repeats=1)

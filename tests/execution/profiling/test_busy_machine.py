"""Measuring operators on a machine with other work, detected by two clocks."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.inference.export import export_program
from fxpart.capture.inference.from_export import op_graph
from fxpart.cost.profile import OperatorProfile
from fxpart.errors import SpecError
from fxpart.execution.device import torch_threads
from fxpart.execution.profiling.api import profile_operators

PAUSE_S = 0.05


@pytest.fixture(scope="module")
def interrupted() -> Iterator[None]:
    """Register an operator that yields the processor for a while, as if it were taken."""
    library = torch.library.Library("fxpart_busy", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("pause(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]

    def pause(x: Tensor) -> Tensor:
        time.sleep(PAUSE_S)
        return x + 1

    library.impl("pause", pause, "CPU")  # type: ignore[no-untyped-call]
    library.impl("pause", lambda x: x + 1, "Meta")  # type: ignore[no-untyped-call]
    yield
    library._destroy()  # type: ignore[no-untyped-call]


class _Paused(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.fxpart_busy.pause(torch.relu(x))  # type: ignore[no-any-return]


def _profile(
    model: nn.Module, threads: int, most_lost: float = 0.3, cache_dir: Path | None = None
) -> OperatorProfile:
    program = export_program(model, (torch.zeros(64, 64),))
    with torch_threads(threads):
        return profile_operators(
            program, op_graph(program), repeats=1, most_lost=most_lost, cache_dir=cache_dir
        )


@pytest.mark.usefixtures("interrupted")
def test_a_thread_is_not_charged_for_the_work_of_others() -> None:
    profile = _profile(_Paused(), 1)
    assert (profile.seconds < PAUSE_S / 2).all()
    assert (profile.seconds > 0).all()
    assert profile.lost_share > 0.5


@pytest.mark.usefixtures("interrupted")
def test_times_of_a_busy_machine_are_measured_again_or_said_to_be(tmp_path: Path) -> None:
    first = _profile(_Paused(), 1, cache_dir=tmp_path)
    accepted = _profile(_Paused(), 1, most_lost=1.0, cache_dir=tmp_path)
    assert accepted.executed == 0
    assert accepted.lost_share == pytest.approx(first.lost_share)
    assert accepted.lost_share > 0.5
    again = _profile(_Paused(), 1, cache_dir=tmp_path)
    assert again.executed > 0
    assert again.lost_share <= accepted.lost_share


@pytest.mark.usefixtures("interrupted")
def test_several_threads_on_a_busy_machine_are_refused() -> None:
    with pytest.raises(SpecError, match=r"with 2 threads; measure when the machine is idle"):
        _profile(_Paused(), 2)


@pytest.mark.usefixtures("interrupted")
def test_with_several_threads_the_wall_time_counts() -> None:
    """The main thread's clock stands still while it waits for the others."""
    profile = _profile(_Paused(), 2, most_lost=1.0)
    assert profile.seconds.max() >= PAUSE_S
    assert profile.lost_share > 0.5


def test_an_operator_that_computes_all_the_time_is_charged_for_it() -> None:
    x = torch.zeros(512, 512)
    model = nn.Linear(512, 512)
    program = export_program(model, (x,))

    def own_s() -> float:
        for _ in range(5):
            model(x)
        begin = time.thread_time()
        for _ in range(50):
            model(x)
        return (time.thread_time() - begin) / 50

    with torch_threads(1), torch.no_grad():
        # Other work slows the processor down too, more at some times than at others.
        before_s = own_s()
        profile = profile_operators(program, op_graph(program), repeats=9)
        expected_s = (before_s + own_s()) / 2
    assert np.isfinite(profile.seconds).all()
    assert expected_s / 2.5 < profile.total_s < expected_s * 2.5

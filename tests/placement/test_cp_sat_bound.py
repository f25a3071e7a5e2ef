"""Bounds of the largest load by CP-SAT, against brute force."""

import math
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fxpart.placement.published.cp_sat_bound import CpSatBound
from fxpart.placement.published.loads import LoadSearch
from fxpart.placement.published.search import Both, begun
from fxpart.placement.search.load_tables import unit_tables
from tests.placement.workloads import (
    document,
    fits,
    largest_load_s,
    placements,
    problem_of,
    workload_at,
)

pytest.importorskip("ortools")


@pytest.mark.parametrize("seed", range(6))
def test_it_closes_small_problems_and_finds_their_optimum(tmp_path: Path, seed: int) -> None:
    workload = workload_at(tmp_path, document(seed), None)
    optimum_s = min(largest_load_s(workload, p) for p in placements(workload) if fits(workload, p))
    tables, unit_of = unit_tables(workload)
    worst = max(
        (p for p in placements(workload) if fits(workload, p)),
        key=lambda p: largest_load_s(workload, p),
    )
    search = LoadSearch(tables, 0)
    of_unit = np.zeros(len(tables.size_bytes), dtype=np.int64)
    of_unit[unit_of] = worst
    search.take(of_unit)
    assert search.best_s == pytest.approx(largest_load_s(workload, worst))
    proof = CpSatBound(search, 0.0)
    assert not proof.is_done
    for _ in range(3):  # times are rounded relative to the best
        if not proof.is_done:
            proof.step(math.inf)
    assert search.best_s == pytest.approx(optimum_s, rel=1e-5)
    assert proof.bound_s <= optimum_s * (1 + 1e-12)
    assert proof.bound_s == pytest.approx(optimum_s, rel=1e-6)
    assert proof.is_done


def test_it_waits_until_its_share_of_time_is_enough(tmp_path: Path) -> None:
    tables, _ = unit_tables(workload_at(tmp_path, document(0), None))
    search = LoadSearch(tables, 0)
    proof = CpSatBound(search, 0.0)
    assert proof.is_done  # without a placement to measure times by
    while not search.elite:
        search.round()
    proof.step(0.5)
    assert proof.bound_s == 0.0


def test_a_device_that_cannot_run_a_unit_does_not_get_it(tmp_path: Path) -> None:
    tables, _ = unit_tables(workload_at(tmp_path, document(1), None))
    search = LoadSearch(tables, 0)
    while not search.elite:
        search.round()
    home = int(search.elite[0][0])
    time_s = tables.time_s.copy()
    time_s[0, [d for d in range(time_s.shape[1]) if d != home]] = np.inf
    fixed = LoadSearch(tables._replace(time_s=time_s), 0)
    fixed.take(search.elite[0])
    CpSatBound(fixed, 0.0).step(math.inf)
    assert int(fixed.elite[0][0]) == home


def test_a_search_uses_it_beside_the_relaxed_bound(tmp_path: Path) -> None:
    workload = workload_at(tmp_path, document(2), None)
    optimum_s = min(largest_load_s(workload, p) for p in placements(workload) if fits(workload, p))
    search, _, proof = begun(problem_of(workload, "throughput"), workload, 0)
    for _ in range(6):
        search.round()
        if not proof.is_done:
            proof.step(math.inf)
    assert proof.is_done
    assert proof.bound_s == pytest.approx(optimum_s, rel=1e-4)


def test_an_interrupt_ends_a_solution(tmp_path: Path) -> None:
    """OR-Tools would keep the signal to itself, and the search would go on."""
    tables, _ = unit_tables(workload_at(tmp_path, document(3, nodes=300, accelerators=4), None))
    search = LoadSearch(tables, 0)
    while not search.elite:
        search.round()
    proof = CpSatBound(search, 0.0, next_limit_s=32.0)
    # A shell starts its background jobs with the signal ignored.
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            proof.step(64.0)
    finally:
        signal.signal(signal.SIGINT, usual)


class _Relaxed:
    """A bound whose steps take longer than they may."""

    bound_s, name, tolerance, is_done, steps = 0.0, "relaxed", 1e-5, False, 0

    def step(self, limit_s: float) -> None:
        time.sleep(2 * limit_s)  # it is this overspending that is tested
        self.steps += 1


class _Whole:
    """A bound that needs a tenth of a second at once."""

    bound_s, name, is_done, solutions = 0.0, "whole", False, 0

    def step(self, limit_s: float) -> None:
        self.solutions += limit_s >= 0.1


def test_each_bound_gets_its_turn_though_the_other_overspends() -> None:
    relaxed, whole = _Relaxed(), _Whole()
    both = Both(relaxed, whole, 0.0)  # type: ignore[arg-type]
    for limit_s, steps, solutions in ((0.01, 1, 0), (0.05, 1, 0), (0.1, 1, 1), (math.inf, 1, 2)):
        if math.isinf(limit_s):
            relaxed.is_done = True
        both.step(limit_s)
        assert (relaxed.steps, whole.solutions) == (steps, solutions)
    relaxed.is_done, whole.is_done = False, True
    both.step(0.01)
    assert (relaxed.steps, whole.solutions) == (2, 2)

"""Bounds of the largest load by CP-SAT, against brute force."""

import math
from pathlib import Path

import numpy as np
import pytest

from fxpart.placement.published.cp_sat_bound import CpSatBound
from fxpart.placement.published.loads import LoadSearch
from fxpart.placement.published.search import begun
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
        proof.step(math.inf)
    assert search.best_s == pytest.approx(optimum_s, rel=1e-5)
    assert proof.bound_s <= optimum_s * (1 + 1e-12)
    assert proof.bound_s == pytest.approx(optimum_s, rel=1e-4)


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

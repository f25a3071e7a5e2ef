"""Placements of other modes, and random ones, written to a file and read back."""

import json
from pathlib import Path

import numpy as np
import pytest

from fxpart.core.assignment import Assignment
from fxpart.core.saved_assignment import assignment_document
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import Problem
from fxpart.errors import CycleError, InfeasibleError, SpecError
from fxpart.placement import make_mode
from tests.independent_replicas import homes, peak_bytes
from tests.placement.test_sparse_nn_random import random_sparse_problem
from tests.sketch import devices, problem, random_graph


def _through_a_file(folder: Path, this: Problem, placed: Assignment) -> Assignment:
    path = folder / "assignment.json"
    path.write_text(json.dumps(assignment_document(this.graph, this.topology, placed, {})))
    return make_mode("aot_based", {"assignment": str(path)})(this)


def _assert_same(this: Problem, before: Assignment, after: Assignment) -> None:
    assert np.array_equal(after.partition_of, before.partition_of)
    assert after.devices_of_partition == before.devices_of_partition
    costs = [evaluate(this, plan, search_bounds=False) for plan in (before, after)]
    assert costs[0].throughput_per_s == costs[1].throughput_per_s


@pytest.mark.parametrize("mode", ["size_based", "cost_aware", "kl_based"])
def test_the_placement_of_a_mode_is_used_unchanged(mode: str, tmp_path: Path) -> None:
    split = 0
    for seed in range(15):
        this = problem(random_graph(seed, 10 + seed % 16), devices(130, 130, 130))
        try:
            placed = make_mode(mode)(this)
        except InfeasibleError:
            continue
        _assert_same(this, placed, _through_a_file(tmp_path, this, placed))
        split += len(np.unique(placed.device_of)) > 1
    assert split > 2


def test_tables_and_replicas_are_used_unchanged(tmp_path: Path) -> None:
    replicated = alternating = 0
    for seed in range(60):
        this = random_sparse_problem(seed)
        try:
            placed = make_mode("sparse_nn")(this)
        except (InfeasibleError, SpecError):
            continue
        _assert_same(this, placed, _through_a_file(tmp_path, this, placed))
        replicated += placed.replicas > 1
        alternating += placed.replicas > 1 and placed.n_partitions > placed.replicas + 2
    assert min(replicated, alternating) > 7


def _waits_for_itself(this: Problem, placed: Assignment) -> bool:
    """Return whether a partition needs its own result, by trying increasingly long paths."""
    count, parts = placed.n_partitions, placed.partition_of
    needs = np.zeros((count, count), dtype=np.bool_)
    for op in range(this.graph.n_ops):
        for value in this.graph.reads_of(op).tolist():
            maker = int(this.graph.value_producer[value])
            if maker >= 0 and parts[maker] != parts[op]:
                needs[parts[op], parts[maker]] = True
    for _ in range(count):
        needs |= needs @ needs
    return bool(needs.diagonal().any())


def test_random_partitions_of_a_file_are_used_or_refused_for_a_reason(tmp_path: Path) -> None:
    accepted = circles = torn = overfull = replicated = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        n, count = int(rng.integers(2, 10)), int(rng.integers(2, 5))
        this = problem(random_graph(seed, n), devices(*[int(rng.choice([60, 10**6]))] * 4))
        # Usually one part after the other, else nearly all would be cycles.
        order = np.sort(rng.integers(0, count, n)) if seed % 2 else rng.integers(0, count, n)
        parts = np.unique(order, return_inverse=True)[1].astype(np.int64)
        some = [tuple(rng.permutation(4)[: int(rng.integers(1, 4))].tolist()) for _ in range(2)]
        chosen = tuple(some[int(rng.integers(2))] for _ in range(int(parts.max()) + 1))
        placed = Assignment(parts, chosen)
        group = this.graph.group
        apart = any(homes(placed, op) != homes(placed, int(group[op])) for op in range(n))
        over = any(peak_bytes(this, placed, d) > this.topology.memory_bytes[d] for d in range(4))
        try:
            after = _through_a_file(tmp_path, this, placed)
        except SpecError:
            assert apart
            torn += 1
        except CycleError:
            assert _waits_for_itself(this, placed)
            circles += 1
        except InfeasibleError:
            assert over
            overfull += 1
        else:
            assert not apart
            assert not over
            assert not _waits_for_itself(this, placed)
            assert [homes(after, op) for op in range(n)] == [homes(placed, op) for op in range(n)]
            before_s, after_s = (
                evaluate(this, plan, search_bounds=False).latency_s for plan in (placed, after)
            )
            assert after_s == before_s
            accepted += 1
            replicated += after.replicas > 1
    assert min(accepted, circles, torn, overfull, replicated) > 3

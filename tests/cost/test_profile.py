"""Profiles as numbers: times for a problem, files for a warm start, and refusals."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fxpart.core.granularity import group_operators
from fxpart.cost.problem import make_problem
from fxpart.cost.profile import OperatorProfile, profile_path, read_profile, write_profile
from fxpart.cost.roofline import LatencyModel, op_time_s
from fxpart.errors import CacheError, SpecError
from fxpart.placement import make_mode
from tests.cost.planted import PLANTED, graph_of, profile_of
from tests.sketch import devices, random_graph


def test_a_problem_accepts_every_source_of_times() -> None:
    graph, topology = graph_of(0), devices(10**9, 10**9, rate=1e9)
    profile = profile_of(graph)
    for source in (LatencyModel(), profile, PLANTED):
        times = make_problem(graph, topology, source).costs.op_time_s
        assert times.shape == (graph.n_ops, 2)
        np.testing.assert_array_equal(times, source.op_time_s(graph, topology))
    roofline = make_problem(graph, topology, LatencyModel()).costs.op_time_s
    np.testing.assert_array_equal(roofline, op_time_s(graph, topology, LatencyModel()))
    measured = make_problem(graph, topology, profile).costs.op_time_s
    np.testing.assert_array_equal(measured[:, 0], profile.seconds)
    np.testing.assert_array_equal(measured[:, 1], profile.seconds)


def test_a_mode_places_by_a_profile_that_survives_grouping() -> None:
    graph, topology = random_graph(3, 30), devices(10**6, 10**6)
    seconds = np.random.default_rng(0).uniform(1, 2, graph.n_ops)
    profile = OperatorProfile(seconds, np.ones(graph.n_ops, dtype=np.int64), "d")
    grouped = group_operators(graph, "module")
    assignment = make_mode("single")(make_problem(grouped, topology, profile))
    assert len(assignment.partition_of) == graph.n_ops
    assert profile.total_s == pytest.approx(seconds.sum())


def test_a_graph_of_other_operators_is_refused() -> None:
    profile = profile_of(graph_of(0))
    with pytest.raises(SpecError, match="60 operators, but the graph has 61"):
        make_problem(graph_of(0, 61), devices(1), profile)


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf])
def test_invalid_times_are_refused(wrong: float) -> None:
    with pytest.raises(SpecError, match="operator 1 is"):
        OperatorProfile(np.array([1.0, wrong]), np.ones(2, dtype=np.int64), "d")


def test_inconsistent_lengths_are_refused() -> None:
    with pytest.raises(SpecError, match="2 times and 3 counts"):
        OperatorProfile(np.ones(2), np.ones(3, dtype=np.int64), "d")


def test_a_written_profile_is_read_back(tmp_path: Path) -> None:
    graph = graph_of(0)
    profile, path = profile_of(graph), profile_path(tmp_path / "new", {"model": "m"})
    assert read_profile(path, graph) is None
    write_profile(path, graph, profile)
    restored = read_profile(path, graph)
    assert restored is not None
    np.testing.assert_array_equal(restored.seconds, profile.seconds)
    np.testing.assert_array_equal(restored.samples, profile.samples)
    assert (restored.device_name, restored.executed) == (profile.device_name, 0)
    # The grouping of operators does not matter, only the operators.
    assert read_profile(path, replace(graph, group=np.zeros(60, dtype=np.int64))) is not None
    assert read_profile(path, graph_of(1)) is None
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": [1.0]},
        {"seconds": "x"},
        {"samples": None},
        {"seconds": [-1.0] * 60},
        {"schema": "s"},
    ],
)
def test_a_damaged_file_counts_as_missing(tmp_path: Path, change: dict[str, object]) -> None:
    graph, path = graph_of(0), tmp_path / "profile.json"
    write_profile(path, graph, profile_of(graph))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert read_profile(path, graph) is None
    path.write_text("{")
    assert read_profile(path, graph) is None


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    graph = graph_of(0)
    with pytest.raises(CacheError, match="cannot write the profile"):
        write_profile(tmp_path / "file" / "profile.json", graph, profile_of(graph))


def test_the_path_distinguishes_models_and_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [profile_path(tmp_path, {"model": name}) for name in ("a", "b", "a")]
    assert paths[0] == paths[2] != paths[1]
    assert profile_path(tmp_path, {"model": "a"}, "cuda") != paths[0]
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    assert profile_path(tmp_path, {"model": "a"}) != paths[0]


def test_a_warm_start_does_not_import_torch() -> None:
    code = (
        "import sys, fxpart.cost.profile, fxpart.cost.fit, fxpart.cost.problem;"
        "print('torch' in sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "False"

"""A placement given in advance, from a file or by module, on devices of all kinds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.saved_assignment import assignment_document
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import Problem
from fxpart.errors import CycleError, InfeasibleError, SpecError
from fxpart.placement import make_mode
from tests import independent
from tests.sketch import Sketch, chain, devices, problem, random_graph


def _saved(folder: Path, this: Problem, placed: Assignment) -> str:
    document = assignment_document(this.graph, this.topology, placed, {"name": "m"})
    path = folder / "assignment.json"
    path.write_text(json.dumps(document))
    return str(path)


def _four() -> Problem:
    """Return a chain of four operators, each with 10 bytes of weights and 1 of result."""
    return problem(chain(4), devices(100, 100, 100))


PLACED = Assignment(np.array([0, 0, 1, 2]), ((1,), (2, 0), (1,)))


def test_a_file_is_used_unchanged_with_ids_and_replicas(tmp_path: Path) -> None:
    this = _four()
    for path in (_saved(tmp_path, this, PLACED), str(tmp_path)):
        placed = make_mode("aot_based", {"assignment": path})(this)
        assert placed.partition_of.tolist() == [0, 0, 1, 2]
        assert placed.devices_of_partition == ((1,), (2, 0), (1,))


def test_a_placement_costs_the_same_only_on_its_own_devices(tmp_path: Path) -> None:
    this = _four()
    options = {"assignment": _saved(tmp_path, this, PLACED)}
    second = evaluate(this, make_mode("aot_based", options)(this))
    assert second.latency_s == evaluate(this, PLACED).latency_s == 4 + 2
    fast = problem(this.graph, devices(100, 100, 100, speeds=[1.0, 2.0, 1.0]))
    assert evaluate(fast, make_mode("aot_based", options)(fast)).latency_s == 1.5 + 1 + 2


def test_devices_can_be_renamed_and_merged(tmp_path: Path) -> None:
    this = _four()
    options = {"assignment": _saved(tmp_path, this, PLACED), "devices": {2: 0, 1: 0}}
    placed = make_mode("aot_based", options)(problem(this.graph, devices(100)))
    assert placed.devices_of_partition == ((0,), (0,), (0,))


def test_unordered_partitions_are_renumbered(tmp_path: Path) -> None:
    this = _four()
    backwards = Assignment(np.array([1, 1, 0, 0]), ((2,), (0,)))
    placed = make_mode("aot_based", {"assignment": _saved(tmp_path, this, backwards)})(this)
    assert placed.partition_of.tolist() == [0, 0, 1, 1]
    assert placed.devices_of_partition == ((0,), (2,))


def _tree() -> OpGraph:
    sketch = Sketch()
    value = sketch.input(1)
    for module in ("emb", "model.h.1", "model.h.10", "model.h.1.mlp", "model", ""):
        value = sketch.op([value], 1, [sketch.weight(10)], 1, module=module)
    return sketch.graph(value)


@pytest.mark.parametrize(
    ("modules", "device_of"),
    [
        ({"": 1}, [1] * 6),
        ({"*": 2}, [2] * 6),
        ({"model.h.1": 0, "model.h": 1, "*": 2}, [2, 0, 1, 0, 2, 2]),
        ({"model": 1, "emb": 0, "": 2, "model.h.1.mlp": 2}, [0, 1, 1, 2, 1, 2]),
    ],
)
def test_the_longest_path_wins(modules: dict[str, int], device_of: list[int]) -> None:
    this = problem(_tree(), devices(100, 100, 100))
    assert make_mode("aot_based", {"modules": modules})(this).device_of.tolist() == device_of


def test_the_check_of_a_result_follows_the_result() -> None:
    sketch = Sketch()
    first = sketch.op([], 1, [sketch.weight(10)], 1, module="h.0")
    sketch.ops.append(([first], [], 0, 0, "h.1", 0))
    graph = sketch.graph(sketch.op([first], 1, [sketch.weight(10)], 1, module="h.1"))
    this = problem(graph, devices(100, 100))
    placed = make_mode("aot_based", {"modules": {"h.0": 0, "h.1": 1}})(this)
    assert placed.device_of.tolist() == [0, 0, 1]
    document = assignment_document(graph, this.topology, placed, {})
    assert document["modules"] == {"": [0, 1], "h": [0, 1], "h.0": 0, "h.1": 1}


def test_a_number_is_the_path_of_a_child_of_a_sequential() -> None:
    sketch = Sketch()
    first = sketch.op([], 1, module="0")
    graph = sketch.graph(sketch.op([first], 1, module="1"))
    placed = make_mode("aot_based", {"modules": {0: 1, 1: 0}})(problem(graph, devices(9, 9)))
    assert placed.device_of.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "was given neither of mode.assignment=assignment.json and mode.modules"),
        ({"assignment": "a.json", "modules": {"": 0}}, "was given both of"),
        ({"assignment": 3}, "mode.assignment must be a path, got 3"),
        ({"modules": 3}, "mode.modules must be a mapping, got 3"),
        ({"modules": {"": "gpu"}}, "logical ids 0, 1, 2, got 'gpu'"),
        ({"modules": {"": True}}, "logical ids 0, 1, 2, got True"),
        ({"modules": {"": -1}}, "logical ids 0, 1, 2, got -1"),
        ({"modules": {"": [0, 1]}}, r"logical ids 0, 1, 2, got \[0, 1\]"),
        ({"modules": {1.1: 0}}, "the number 1.1 for a path: 1.10 would be read as 1.1"),
        ({"modules": {"": 0}, "devices": {0: 1}}, "changes the devices of mode.assignment; give"),
        ({"assignment": "nowhere.json"}, "there is no file nowhere.json"),
        ({"asignment": "a"}, "no option 'asignment'; nearest: assignment"),
    ],
)
def test_invalid_options_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        make_mode("aot_based", options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"model": 0}, "no entry for operator op0 of emb; there are: model; add one, or *"),
        ({"emb": 0, "model": 0}, "for operator op5 of the model itself; it belongs to no"),
        ({"*": 0, "model.h.2": 1}, "names model.h.2, which the model does not have; nearest: mod"),
        ({"*": 3}, r"mode.modules puts \* on device 3, there are 3, numbered from 0"),
        ({"": 3}, "mode.modules puts the rest on device 3"),
    ],
)
def test_modules_that_do_not_match_are_refused(modules: dict[str, int], message: str) -> None:
    this = problem(_tree(), devices(100, 100, 100))
    with pytest.raises(SpecError, match=message) as caught:
        make_mode("aot_based", {"modules": modules})(this)
    assert "\n" not in str(caught.value)


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    this = _four()
    options = {"assignment": _saved(tmp_path, this, PLACED)}
    fewer = problem(this.graph, devices(100, 100))
    with pytest.raises(
        SpecError, match=r"partition 1 is on device 2, there are 2, .*devices={2: 0"
    ):
        make_mode("aot_based", options)(fewer)
    with pytest.raises(SpecError, match=r"names device 7, the saved assignment uses 0, 1, 2; name"):
        make_mode("aot_based", {**options, "devices": {7: 0}})(this)


def test_modules_on_a_tier_are_not_costed_again(tmp_path: Path) -> None:
    on_gpu = devices(100)
    host = replace(on_gpu.devices[0], name="host8gb", on_host=True, is_tier=True)
    wide = replace(devices(100, 100), devices=(*on_gpu.devices, host))
    placed = Assignment(np.array([0, 0, 1, 1]), ((0,), (1,)))
    options = {"assignment": _saved(tmp_path, problem(chain(4), wide), placed)}
    for topology in (on_gpu, devices(100, 100)):  # of the second, device 1 is no host
        with pytest.raises(SpecError, match=r"computes modules on host8gb, .*devices=\{1: 0\}"):
            make_mode("aot_based", options)(problem(chain(4), topology))
    on_one = make_mode("aot_based", {**options, "devices": {1: 0}})(problem(chain(4), on_gpu))
    assert on_one.devices_of_partition == ((0,), (0,))
    pool = replace(wide, devices=(*on_gpu.devices, replace(host, name="cpu", is_tier=False)))
    options = {"assignment": _saved(tmp_path, problem(chain(4), pool), placed)}
    with pytest.raises(SpecError, match=r"partition 1 is on device 1, there are 1, numbered"):
        make_mode("aot_based", options)(problem(chain(4), on_gpu))


def test_too_little_memory_names_the_device_and_the_bytes(tmp_path: Path) -> None:
    this = _four()
    # Device 1 holds 3 weights and 2 bytes; 2 and 0 one weight and 2 bytes each.
    options = {"assignment": _saved(tmp_path, this, PLACED)}
    assert make_mode("aot_based", options)(problem(this.graph, devices(12, 32, 12)))
    tight = problem(this.graph, devices(12, 31, 12))
    with pytest.raises(InfeasibleError, match=r"device 1 \(d1\) needs 32 B .* has 31 B") as caught:
        make_mode("aot_based", options)(tight)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (32, 31)
    # The replica on device 0 counts although it waits at first.
    with pytest.raises(InfeasibleError, match=r"device 0 .* 12 B .* 11 B .*, too little; move"):
        make_mode("aot_based", options)(problem(this.graph, devices(11, 32, 12)))
    with pytest.raises(InfeasibleError, match=r"device 1 .*, as have 2 others; move"):
        make_mode("aot_based", options)(problem(this.graph, devices(11, 3, 11)))


def test_a_cycle_of_partitions_is_refused(tmp_path: Path) -> None:
    this = _four()
    path = _saved(tmp_path, this, Assignment(np.array([0, 1, 0, 1]), ((0,), (1,))))
    with pytest.raises(CycleError, match="0 reads from 1 reads from 0"):
        make_mode("aot_based", {"assignment": path})(this)


def test_the_file_is_read_only_once(tmp_path: Path) -> None:
    this = _four()
    path = _saved(tmp_path, this, PLACED)
    mode = make_mode("aot_based", {"assignment": path})
    Path(path).unlink()
    assert mode(this).devices_of_partition == PLACED.devices_of_partition


def test_operators_of_a_group_may_not_be_separated(tmp_path: Path) -> None:
    sketch = Sketch()
    a = sketch.op([], 4, module="stem")
    b = sketch.op([a], 4, view_of=a, module="body", group=0)
    this = problem(sketch.graph(b), devices(100, 100))
    with pytest.raises(SpecError, match="op0 of stem and op1 of body must share a device"):
        make_mode("aot_based", {"modules": {"stem": 0, "body": 1}})(this)
    path = _saved(tmp_path, this, Assignment(np.array([0, 1]), ((0,), (1,))))
    with pytest.raises(SpecError, match="op0 of stem and op1 of body must share a device"):
        make_mode("aot_based", {"assignment": path})(this)


@given(seed=st.integers(0, 10_000), n=st.integers(1, 20))
def test_only_plans_that_exceed_a_device_are_refused(seed: int, n: int) -> None:
    graph, rng = random_graph(seed, n), np.random.default_rng(seed)
    this = problem(graph, devices(*rng.integers(40, 120, 3).tolist()))
    modules = {path: int(rng.integers(0, 3)) for path in sorted(set(graph.modules))}
    home_of = np.array([modules[path] for path in graph.modules])
    fits = all(
        independent.peak_bytes(graph, home_of, device) <= spec.memory_bytes
        for device, spec in enumerate(this.topology.devices)
    )
    torn = not (home_of == home_of[graph.group]).all()
    try:
        placed = make_mode("aot_based", {"modules": modules})(this)
    except SpecError:
        assert torn
    except InfeasibleError:
        assert not fits
    else:
        assert fits
        assert not torn
        assert np.array_equal(placed.device_of, home_of)

"""The plan in the words of other tools."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.errors import CacheError
from fxpart.plan_export import split_points
from runner.job.files import write_plan_files
from tests.runner.pipelines import training_graph
from tests.sketch import Sketch


def two_blocks() -> OpGraph:
    """Return two modules of two layers each, a weight of 10 bytes in every layer."""
    sketch = Sketch()
    value = sketch.input(4)
    for name in ("a.first", "a.last", "b.first", "b.last"):
        value = sketch.op([value], 4, [sketch.weight(10)], 1, module=name)
    graph = sketch.graph(value)
    names = tuple(f"{module}.weight" for module in graph.modules)
    return replace(graph, weight_names=names)


def written(folder: Path, graph: OpGraph, part: list[int], *homes: tuple[int, ...]) -> list[str]:
    write_plan_files(folder, graph, Assignment(np.array(part), homes))
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_entries_are_paths_and_devices_alone(tmp_path: Path) -> None:
    names = written(tmp_path, two_blocks(), [0, 0, 1, 1], (3,), (1,))
    assert names == ["device_map.json", "device_map_notes.json", "split_points.json"]
    assert json.loads((tmp_path / "device_map.json").read_text()) == {"a": 3, "b": 1}
    notes = json.loads((tmp_path / "device_map_notes.json").read_text())
    assert notes["weight_bytes"] == {"1": 20, "3": 20}
    assert (notes["operators"], notes["operators_elsewhere"]) == (4, 0)
    assert json.loads((tmp_path / "split_points.json").read_text()) == {"b.first": "BEGINNING"}


def test_one_device_has_a_map_and_no_split(tmp_path: Path) -> None:
    assert written(tmp_path, two_blocks(), [0] * 4, (0,)) == [
        "device_map.json",
        "device_map_notes.json",
    ]
    assert json.loads((tmp_path / "device_map.json").read_text()) == {"": 0}


def test_replicas_leave_nothing(tmp_path: Path) -> None:
    assert written(tmp_path / "out", two_blocks(), [0, 0, 1, 1], (0, 2), (1, 3)) == []


def test_a_cut_inside_a_module_leaves_no_split_points(tmp_path: Path) -> None:
    """The first layer ends where nothing begins: its second operator goes elsewhere."""
    sketch = Sketch()
    value = sketch.input(4)
    for name in ("a", "a", "b"):
        value = sketch.op([value], 4, [sketch.weight(10)], 1, module=name)
    graph = sketch.graph(value)
    assert "split_points.json" not in written(tmp_path, graph, [0, 1, 1], (0,), (1,))
    assert "split_points.json" in written(tmp_path, graph, [0, 0, 1], (0,), (1,))


def test_a_training_step_leaves_no_split_points(tmp_path: Path) -> None:
    """Its cut is before a module, so that it is not refused for that."""
    graph = training_graph()
    plan = Assignment(np.array([0, 1, 1, 1]), ((0,), (1,)))
    assert split_points(graph, plan) == {"second": "BEGINNING"}
    write_plan_files(tmp_path, graph, plan)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "device_map.json",
        "device_map_notes.json",
    ]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="choose another output folder"):
        written(tmp_path / "file", two_blocks(), [0] * 4, (0,))

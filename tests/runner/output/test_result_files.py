import json
from pathlib import Path

import pytest

from fxpart.core.saved_assignment import write_assignment
from fxpart.errors import SpecError
from runner.output.result_files import device_rows, read_result, write_result
from tests.runner.scene import Scene, fork


def saved(folder: Path, what: Scene) -> Path:
    path = folder / "assignment.json"
    write_assignment(path, what.graph, what.topology, what.assignment, {"name": "fork"})
    return path


def test_assignment_holds_the_decisions(tmp_path: Path) -> None:
    document = json.loads(saved(tmp_path, fork()).read_text())
    assert (document["schema"], document["version"]) == ("fxpart.assignment", 1)
    assert document["model"] == {"name": "fork"}
    assert document["devices"][1] == {
        "logical_id": 1,
        "name": "d1",
        "memory_bytes": 200,
        "node": 0,
    }
    assert document["partitions"][2] == {"id": 2, "devices": [1], "operators": ["op2", "op3"]}
    assert document["modules"] == {
        "": [0, 1],
        "stem": 0,
        "body": 1,
        "body.left": 1,
        "body.right": 1,
    }


def test_same_placement_same_bytes(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "a", fork()), saved(tmp_path / "b", fork())
    assert first.read_bytes() == second.read_bytes()


def test_result_holds_metrics_and_devices(tmp_path: Path) -> None:
    path, evaluation = tmp_path / "result.json", fork().evaluation
    write_result(
        path,
        status="finished",
        config={"mode": "single"},
        metrics={"latency_ms": 15e3, "feasible": 1.0},
        devices=device_rows(evaluation),
        sweep="ab12",
    )
    result = read_result(path)
    assert (result["schema"], result["version"]) == ("fxpart.result", 1)
    assert (result["status"], result["error"]) == ("finished", None)
    assert result["config"] == {"mode": "single"}
    assert result["metrics"] == {"latency_ms": 15e3, "feasible": 1.0}
    assert result["sweep"] == "ab12"
    assert result["devices"][0]["weight_bytes"] == 10
    assert result["devices"][0]["free_bytes"] == 100 - result["devices"][0]["peak_bytes"]
    assert result["devices"][1]["partitions"] == [1, 2]


def test_result_of_a_run_that_failed(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_result(path, status="infeasible", config={}, error="too large")
    assert read_result(path)["error"] == "too large"
    document = json.loads(path.read_text())
    del document["status"]
    path.write_text(json.dumps(document))
    with pytest.raises(SpecError, match=r"damaged .no status.; run it again"):
        read_result(path)


def test_result_and_assignment_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"not a fxpart.result file, its schema is 'fxpart.assign"):
        read_result(saved(tmp_path, fork()))

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fxpart.errors import SpecError
from runner.files import (
    assignment_for,
    device_rows,
    read_assignment,
    read_result,
    write_assignment,
    write_result,
)
from tests.runner.scene import Scene, fork, scene
from tests.sketch import chain, devices


def saved(folder: Path, what: Scene) -> Path:
    path = folder / "assignment.json"
    write_assignment(path, what.graph, what.topology, what.assignment, {"name": "fork"})
    return path


def test_assignment_says_what_was_decided(tmp_path: Path) -> None:
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


def test_assignment_comes_back_as_it_was(tmp_path: Path) -> None:
    graph = chain(3)
    before = scene(graph, devices(99, 99, 99), [0, 0, 1], [(2,), (0, 1)])
    read = read_assignment(saved(tmp_path, before))
    after = assignment_for(read, graph)
    assert np.array_equal(after.partition_of, [0, 0, 1])
    assert after.devices_of_partition == ((2,), (0, 1))
    assert read.modules == {"": [0, 1, 2], "layer0": 2, "layer1": 2, "layer2": [0, 1]}
    assert [device["memory_bytes"] for device in read.devices] == [99, 99, 99]


def test_same_placement_same_bytes(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "a", fork()), saved(tmp_path / "b", fork())
    assert one.read_bytes() == two.read_bytes()


def _without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda document: document.pop(key)


def _device_9(document: dict[str, Any]) -> None:
    document["partitions"][0]["devices"] = [9]


def _module_9(document: dict[str, Any]) -> None:
    document["modules"]["stem"] = 9


def _nameless(document: dict[str, Any]) -> None:
    document["devices"][0]["name"] = None


def _gap(document: dict[str, Any]) -> None:
    document["partitions"][1]["id"] = 5


def _hollow(document: dict[str, Any]) -> None:
    document["partitions"][1]["operators"] = []


def _twice(document: dict[str, Any]) -> None:
    document["partitions"][1]["operators"].append("op0")


def _newer(document: dict[str, Any]) -> None:
    document["version"] = 2


def _foreign(document: dict[str, Any]) -> None:
    document["schema"] = "theirs"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without("partitions"), "is damaged .no partitions.; write it again"),
        (_without("modules"), "is damaged .no modules."),
        (_device_9, r"partition 0 is on \[9\], there are 3 devices"),
        (_module_9, "module 'stem' is on 9, there are 3 devices"),
        (_nameless, "a device without a name"),
        (_gap, "partition 5 where 1 should be"),
        (_hollow, "partition 1 has no operators"),
        (_twice, "operator op0 twice, in partitions 0 and 1; keep one"),
        (_newer, "has version 2, this fxpart reads up to 1; upgrade fxpart"),
        (_foreign, "is not a fxpart.assignment file, its schema is 'theirs'"),
    ],
)
def test_a_spoiled_assignment_is_refused(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = saved(tmp_path, fork())
    document = json.loads(path.read_text())
    spoil(document)
    path.write_text(json.dumps(document))
    with pytest.raises(SpecError, match=message) as caught:
        read_assignment(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"schema":', "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b"[" * 100_000, "is damaged"),
        (b"[1]", "is not a fxpart.assignment file"),
    ],
)
def test_a_file_that_is_something_else_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "assignment.json"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=message) as caught:
        read_assignment(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no file"):
        read_assignment(tmp_path / "none.json")
    with pytest.raises(SpecError, match="cannot read"):
        read_assignment(tmp_path)


def test_an_assignment_of_another_model_is_refused(tmp_path: Path) -> None:
    of_four = read_assignment(saved(tmp_path, fork()))
    with pytest.raises(SpecError, match="places op3, which the model does not have; nearest: op"):
        assignment_for(of_four, chain(3))
    with pytest.raises(SpecError, match="leaves out 2 of 6 operators, the first is op4"):
        assignment_for(of_four, chain(6))


def test_result_holds_metrics_and_devices(tmp_path: Path) -> None:
    path, evaluation = tmp_path / "result.json", fork().evaluation
    write_result(
        path,
        status="finished",
        config={"mode": "single"},
        metrics={"latency_ms": 15e3, "feasible": 1.0},
        devices=device_rows(evaluation),
        sweep_id="ab12",
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


def test_result_and_assignment_are_not_confused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"not a fxpart.result file, its schema is 'fxpart.assign"):
        read_result(saved(tmp_path, fork()))

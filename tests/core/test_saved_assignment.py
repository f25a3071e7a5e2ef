"""`assignment.json`: reading it back, and refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from fxpart.core.reserve import Reserve, with_reserve
from fxpart.core.saved_assignment import (
    assignment_document,
    assignment_for,
    assignment_path,
    read_assignment,
)
from fxpart.errors import SpecError
from tests.runner.scene import Scene, fork, scene
from tests.sketch import chain, devices


def saved(folder: Path, this: Scene) -> Path:
    path = folder / "assignment.json"
    document = assignment_document(this.graph, this.topology, this.assignment, {"name": "fork"})
    path.write_text(json.dumps(document))
    return path


def test_an_assignment_is_read_back_unchanged(tmp_path: Path) -> None:
    graph = chain(3)
    before = scene(graph, devices(99, 99, 99), [0, 0, 1], [(2,), (0, 1)])
    read = read_assignment(saved(tmp_path, before))
    after = assignment_for(read, graph)
    assert np.array_equal(after.partition_of, [0, 0, 1])
    assert after.devices_of_partition == ((2,), (0, 1))
    assert read.modules == {"": [0, 1, 2], "layer0": 2, "layer1": 2, "layer2": [0, 1]}
    assert [device["memory_bytes"] for device in read.devices] == [99, 99, 99]


def test_a_device_is_written_with_its_full_memory() -> None:
    whole = devices(99)
    reserved = with_reserve(whole.devices[0], Reserve(context_bytes=9))
    this = scene(chain(1), replace(whole, devices=(reserved,)), [0], [(0,)])
    document = assignment_document(this.graph, this.topology, this.assignment, {})
    (device,) = cast("list[dict[str, object]]", document["devices"])
    assert (this.topology.devices[0].memory_bytes, device["memory_bytes"]) == (90, 99)


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
def test_a_damaged_assignment_is_refused(
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
        (b'{"schema":', "is not a fxpart.assignment file, or it is damaged"),
        (b"\xff\xfe", "is not a fxpart.assignment file, or it is damaged"),
        (b"[" * 100_000, "is not a fxpart.assignment file, or it is damaged"),
        (b"[1]", "is not a fxpart.assignment file"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "assignment.json"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=message) as caught:
        read_assignment(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_or_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no file"):
        read_assignment(tmp_path / "none.json")
    with pytest.raises(SpecError, match="cannot read"):
        read_assignment(tmp_path)


def test_the_folder_of_a_run_stands_for_its_file(tmp_path: Path) -> None:
    path = saved(tmp_path, fork())
    assert assignment_path(str(tmp_path)) == assignment_path(str(path)) == path
    assert assignment_path("nowhere/at/all") == Path("nowhere/at/all")


def test_an_assignment_of_another_model_is_refused(tmp_path: Path) -> None:
    of_four = read_assignment(saved(tmp_path, fork()))
    with pytest.raises(SpecError, match="places op3, which the model does not have; nearest: op"):
        assignment_for(of_four, chain(3))
    with pytest.raises(SpecError, match=r"op3.* capture with another phase or capture\.symbolic"):
        assignment_for(of_four, chain(3))
    with pytest.raises(SpecError, match=r"leaves out 2 of 6 .*, the first is op4; .*\.symbolic"):
        assignment_for(of_four, chain(6))

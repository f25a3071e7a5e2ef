"""Times on disk: round trip, damage, and two concurrent writers."""

import json
import multiprocessing
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from fxpart.errors import CacheError
from fxpart.execution.profiling.api import OperatorTime, read_times, times_path, write_times

WRITES = 20


def _time(seconds: float, samples: int = 5, lost_share: float = 0.0) -> OperatorTime:
    return OperatorTime("aten.linear.default", ((2, 3), (4, 3)), seconds, samples, lost_share)


def test_written_times_are_read_back(tmp_path: Path) -> None:
    path = times_path(tmp_path / "new", "a device")
    assert read_times(path) == {}
    write_times(path, {"b": _time(1.5), "a": _time(0.25)})
    assert read_times(path) == {"a": _time(0.25), "b": _time(1.5)}
    assert times_path(tmp_path, "another device") != times_path(tmp_path, "a device")


def test_entries_are_added_and_more_samples_win(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    write_times(path, {"a": _time(1.0, 5), "b": _time(2.0, 5)})
    write_times(path, {"a": _time(9.0, 2), "b": _time(3.0, 7), "c": _time(4.0)})
    assert read_times(path) == {"a": _time(1.0, 5), "b": _time(3.0, 7), "c": _time(4.0)}
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".json", ".lock"]


def test_of_as_many_samples_those_with_less_other_work_win(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    write_times(path, {"a": _time(1.0, 9, 0.5), "b": _time(2.0, 5, 0.1), "c": _time(3.0, 2)})
    assert read_times(path)["a"].lost_share == 0.5
    write_times(path, {"a": _time(4.0, 5), "b": _time(5.0, 5, 0.2), "c": _time(6.0, 3, 0.4)})
    assert read_times(path) == {
        "a": _time(4.0, 5),
        "b": _time(2.0, 5, 0.1),
        "c": _time(6.0, 3, 0.4),
    }


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        '{"schema": "other", "version": 1}',
        '{"schema": "fxpart-operator-times", "version": 2}',
        '{"schema": "fxpart-operator-times", "version": 1, "entries": []}',
        '{"schema": "fxpart-operator-times", "version": 1, "entries": {"a": {"seconds": 1}}}',
        '{"schema": "fxpart-operator-times", "version": 1, "entries": {"a":'
        ' {"target": "t", "shapes": [], "seconds": NaN, "samples": 5}}}',
        '{"schema": "fxpart-operator-times", "version": 1, "entries": {"a":'
        ' {"target": "t", "shapes": [], "seconds": 1.0, "samples": 0}}}',
        '{"schema": "fxpart-operator-times", "version": 1, "entries": {"a":'
        ' {"target": "t", "shapes": [], "seconds": 1.0, "samples": 5, "lost_share": -1}}}',
    ],
)
def test_a_damaged_file_counts_as_missing(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(damage)
    assert read_times(path) == {}
    write_times(path, {"a": _time(1.0)})
    assert read_times(path) == {"a": _time(1.0)}


def _write_many(path: Path, first: int, begun: Event | None = None) -> None:
    if begun is not None:
        begun.set()
    for index in range(first, first + WRITES):
        write_times(path, {f"{index:03d}": _time(float(index))})


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    spawn = multiprocessing.get_context("spawn")
    begun = spawn.Event()
    other = spawn.Process(target=_write_many, args=(path, 0, begun))
    other.start()
    assert begun.wait(60)
    _write_many(path, 100)
    other.join(60)
    assert other.exitcode == 0
    assert len(read_times(path)) == 2 * WRITES
    assert json.loads(path.read_text())["schema"] == "fxpart-operator-times"


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot write operator times"):
        write_times(tmp_path / "file" / "times.json", {"a": _time(1.0)})

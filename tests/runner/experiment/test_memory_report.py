"""Where memory is fullest, in the terminal, files and MLflow."""

import csv
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from fxpart.core.partitions import partition_by_device
from fxpart.cost.peak_tensors import DevicePeak, LiveTensor, device_peaks
from fxpart.cost.storage_kinds import KINDS, PLURALS
from fxpart.errors import CacheError
from runner.experiment.memory_report import (
    fullest,
    peak_line,
    peak_rows,
    tensor_columns,
    training_metrics,
)
from runner.output.result_files import read_result, write_result, write_table
from tests.cost.training_step import step
from tests.sketch import devices, problem

GIB = 2**30


def step_peaks() -> tuple[DevicePeak, ...]:
    """Return the peaks of a step on the second of two devices."""
    graph = step()
    placed = partition_by_device(graph, np.ones(graph.n_ops, dtype=np.int64))
    return device_peaks(problem(graph, devices(999, 999)), placed)


def peak(device: int, by_kind: dict[str, int]) -> DevicePeak:
    tensors = (LiveTensor("w", "net", "", "weight", by_kind.get("weight", 0)),)
    total = sum(by_kind.values())
    return DevicePeak(device, 7, "mm_3", "net.block", "backward of gelu", total, by_kind, tensors)


def test_the_line_names_device_and_kinds() -> None:
    small = peak(0, {"weight": GIB})
    large = peak(2, {"weight": GIB, "optimizer state": 2 * GIB, "saved activation": GIB // 2})
    assert peak_line([small, large, small]) == (
        "device 2 holds 3.50 GiB at net.block (backward of gelu): weights 1.00,"
        " optimizer state 2.00, saved activations 0.50"
    )


def test_of_equal_devices_the_first_is_the_fullest() -> None:
    first, second = peak(0, {"weight": 5}), peak(1, {"weight": 5})
    assert fullest([first, second]) is first


def test_small_kinds_are_added_up() -> None:
    line = peak_line([peak(0, {"weight": 990, "input": 5, "temporary": 5})])
    assert line.endswith("weights 990, other 10")
    line = peak_line([peak(0, {"weight": GIB, "input": 5})])
    assert line.endswith("weights 1.00")


def test_a_root_module_is_named_by_its_operator() -> None:
    root = DevicePeak(0, 7, "mm_3", "", "mm", 1, {"weight": 1}, ())
    assert "at mm_3 (mm)" in peak_line([root])


def test_every_kind_has_a_plural() -> None:
    assert tuple(PLURALS) == KINDS


def test_kinds_of_training_alone_are_0_elsewhere() -> None:
    assert training_metrics(step_peaks()) == {
        "optimizer_state_gib": 25 / GIB,
        "gradients_gib": 20 / GIB,
        "saved_activations_gib": 0,
    }


def test_largest_tensors_are_columns_of_equal_length() -> None:
    columns = tensor_columns(step_peaks())
    assert {len(column) for column in columns.values()} == {7}
    assert columns["device"] == [1] * 7
    assert columns["bytes"] == [25, 20, 10, 10, 10, 3, 1]
    assert columns["kind"][0] == "optimizer state"
    assert columns["made_by"][3:5] == ["aten.mm.default", "aten.add.Tensor"]
    assert columns["module"][3] == "net.one"
    assert columns["peak_at"] == ["op5"] * 7
    assert tensor_columns(step_peaks(), 2)["bytes"] == [25, 20]
    (row,) = peak_rows(step_peaks(), 2)
    assert row == {**peak_rows(step_peaks())[0], "tensors": row["tensors"]}
    assert [tensor["bytes"] for tensor in cast("list[Any]", row["tensors"])] == [25, 20]


def test_a_table_is_csv_that_other_programs_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "largest.csv"
    write_table(path, {"name": ["a,b", 'say "x"'], "bytes": [1, 2]})
    assert path.read_text().startswith("name,bytes\n")
    assert list(csv.reader(path.read_text().splitlines())) == [
        ["name", "bytes"],
        ["a,b", "1"],
        ['say "x"', "2"],
    ]
    with pytest.raises(CacheError, match="cannot write"):
        write_table(path / "below", {"a": []})


def test_a_result_names_the_fullest_place(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_result(path, status="finished", config={}, peaks=peak_rows(step_peaks()))
    (row,) = read_result(path)["peaks"]
    assert (row["device"], row["op_name"], row["module"]) == (1, "op5", "net.one")
    assert sum(row["by_kind"].values()) == row["bytes"] == 79
    assert row["tensors"][0]["kind"] == "optimizer state"
    write_result(path, status="failed", config={}, error="x")
    assert json.loads(path.read_text())["peaks"] == []

"""`benchmarks.workloads` on our own problems; the published ones stay in their folder."""

import json
import sys
from graphlib import CycleError
from pathlib import Path

import pytest

from benchmarks.published_values import largest_load_ms, sample_ms
from benchmarks.workloads import Known, main, read_known
from tests.placement.workloads import document

README = """
| throughput | nodes / edges | k | bound | best known | contiguous optimum | partitioner | one |
|---|---|--:|--:|--:|--:|--:|--:|
| small | 7/9 | 2 | 1.00 | 4.00 | 5.00 | 4.50 | 30.00 |

| latency | nodes / edges | k | bound (q=1) | best known (q=1) | published greedy | split |
|---|---|--:|--:|--:|--:|--:|
| small | 7/9 | 2 | 1.00 | 20.00 | 50.00 | 45.00 |
"""


def test_a_table_is_printed_for_each_objective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mtkahypar", None)  # restore what was there
    (tmp_path / "README.md").write_text(README)
    for objective in ("throughput", "latency"):
        (tmp_path / objective).mkdir()
        (tmp_path / objective / "small.json").write_text(json.dumps(document(1)))
    known = read_known(tmp_path / "README.md")
    assert known["throughput", "small"] == Known(1.0, 4.0, (5.0,))
    assert known["latency", "small"] == Known(1.0, 20.0, (50.0, 45.0))
    main(["--data", str(tmp_path), "--cpu-limit-s", "0.5", "--without-mtkahypar"])
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.startswith("small")]
    assert len(rows) == 2
    for row, best in zip(rows, (4.0, 20.0), strict=True):
        assert float(row[1]) / best == pytest.approx(float(row[6]), abs=1e-3)
        assert float(row[2]) <= float(row[1])
    assert printed.count("over best known: geometric mean") == 2


def test_an_invalid_placement_has_no_value(tmp_path: Path) -> None:
    """Memory, colours and support; two pieces that read from each other never finish."""
    path = tmp_path / "small.json"
    problem = document(1)
    for node in problem["nodes"]:
        node["size"] = 0.0
    path.write_text(json.dumps(problem))
    alone = {f"op{i}": 0 if i != 3 else 2 for i in range(7)}
    assert largest_load_ms(path, alone) > 0
    with pytest.raises(ValueError, match="cannot run"):
        largest_load_ms(path, {**alone, "op3": 1})
    with pytest.raises(ValueError, match="of its colour"):
        largest_load_ms(path, {**alone, "op0": 1})
    with pytest.raises(ValueError, match="a name of its own"):
        largest_load_ms(path, {"op0": 1})
    problem["edges"] = [{"sourceId": 10 + i, "destId": 11 + i, "cost": 1.0} for i in range(6)]
    path.write_text(json.dumps(problem))
    with pytest.raises(CycleError):
        sample_ms(path, alone)
    problem["maxSizePerFPGA"] = 1.0
    problem["nodes"][1]["size"] = 2.0
    path.write_text(json.dumps(problem))
    with pytest.raises(ValueError, match="too many"):
        largest_load_ms(path, alone)


def test_a_missing_folder_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--data", str(tmp_path / "nowhere")])
    assert capsys.readouterr().out.startswith("skipped: there is no folder")

"""`benchmarks.workloads` on problems of our own; those published stay in their folder."""

import json
from pathlib import Path

import pytest

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


def test_it_prints_a_table_for_each_objective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text(README)
    for objective in ("throughput", "latency"):
        (tmp_path / objective).mkdir()
        (tmp_path / objective / "small.json").write_text(json.dumps(document(1)))
    known = read_known(tmp_path / "README.md")
    assert known["throughput", "small"] == Known(1.0, 4.0, (5.0,))
    assert known["latency", "small"] == Known(1.0, 20.0, (50.0, 45.0))
    main(["--data", str(tmp_path), "--time-limit-s", "0.2"])
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.startswith("small")]
    assert len(rows) == 2
    for row, best in zip(rows, (4.0, 20.0), strict=True):
        assert float(row[1]) / best == pytest.approx(float(row[6]), abs=1e-3)
        assert float(row[2]) <= float(row[1])
    assert printed.count("over best known: geometric mean") == 2


def test_without_the_folder_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--data", str(tmp_path / "nowhere")])
    assert capsys.readouterr().out.startswith("skipped: there is no folder")

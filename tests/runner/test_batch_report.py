"""A plan at other batch sizes: limits, files and figure, by a graph whose numbers are known."""

import csv
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from fxpart.cost.roofline import LatencyModel
from fxpart.partitions import partition_by_device
from fxpart.problem import make_problem
from fxpart.symbolic.graph import SymbolicGraph
from fxpart.topology import Topology
from runner.batch_files import sweep_columns, write_batch_files
from runner.batch_report import BatchReport, batch_line, batch_metrics, batch_report
from tests.sketch import Sketch, devices
from tests.symbolic.drawn import with_sizes


def _symbolic() -> SymbolicGraph:
    """Return two operators in a row that make 10 bytes and take 2 FLOPs an example.

    With a weight of 100 bytes, the peak is 100 + 20 batch, and the latency 4 batch seconds.
    """
    sketch = Sketch()
    first = sketch.op([sketch.input(0)], 10, [sketch.weight(100)], 2)
    graph = sketch.graph(sketch.op([first], 10, [], 2))
    grows = np.array([[10, 0], [10, 0]], dtype=np.int64)
    values = np.vstack([np.zeros((1, 2), dtype=np.int64), grows])
    flops = np.array([[2, 0], [2, 0]], dtype=np.int64)
    return with_sizes(
        graph,
        ("batch",),
        {
            "flops": flops,
            "moved_bytes": np.zeros_like(flops),
            "value_bytes": values,
        },
    )


def _report(
    memory_bytes: int = 200, rounding_bytes: int = 1, replicas: int = 1
) -> tuple[BatchReport, Topology]:
    symbolic, topology = _symbolic(), devices(memory_bytes)
    problem = make_problem(symbolic.at(batch=2), topology, LatencyModel())
    placed = partition_by_device(problem.graph, np.zeros(2, dtype=np.int64))
    report = batch_report(
        symbolic,
        problem,
        placed,
        latency=LatencyModel(),
        sizes={"batch": 2},
        rounding_bytes=rounding_bytes,
        most=8,
        replicas=replicas,
    )
    return report, topology


def test_limits_are_solved_for() -> None:
    report, _ = _report()
    assert report.max_batch_size == 5  # 100 + 20 * 5 is just what there is
    assert report.smallest_memory_bytes == (140,)
    assert report.table.latency_s.tolist() == [4.0 * batch for batch in range(1, 9)]
    assert report.table.peak_bytes[:, 0].tolist() == [100 + 20 * batch for batch in range(1, 9)]
    assert batch_metrics(report) == {
        "max_batch_size": 5.0,
        "smallest_device_memory_gib": 140 / 2**30,
    }
    assert batch_line(report).startswith("largest that fits this plan 5; batch 2 needs 140 B")


def test_the_allocator_rounds_up() -> None:
    # In sixteens: weights 112, and 32 twice for three examples, 48 twice for four: too much.
    report, _ = _report(rounding_bytes=16)
    assert report.max_batch_size == 3
    assert report.smallest_memory_bytes == (112 + 2 * 32,)


def test_no_batch_may_fit() -> None:
    assert _report(memory_bytes=119)[0].max_batch_size == 0
    assert _report(memory_bytes=120)[0].max_batch_size == 1


def test_replicas_share_a_batch(tmp_path: Path) -> None:
    report, topology = _report(replicas=3)
    assert report.max_global_batch_size == 15
    assert "fits this plan 15; batch 6 needs" in batch_line(report)
    columns = sweep_columns(report)
    assert columns["batch"] == [3 * batch for batch in range(1, 9)]
    # A stream of inputs: 2 operators of 2 s an example, on each of three replicas.
    assert columns["examples_per_s"] == pytest.approx([3 / 4] * 8)
    write_batch_files(tmp_path, report, topology)
    assert "batch is that of one replica, of 3" in (tmp_path / "formulas.txt").read_text()


def test_the_files_say_it(tmp_path: Path) -> None:
    report, topology = _report()
    write_batch_files(tmp_path, report, topology)
    text = (tmp_path / "formulas.txt").read_text()
    assert "# peak bytes of tensors on device 0\n100 + 20*batch\n" in text
    assert "equal to the simulation for batch from 1 to 8\n4*batch\n" in text
    latex = (tmp_path / "formulas.tex").read_text()
    assert latex.startswith("\\documentclass")
    assert latex.count("\\begin{") == latex.count("\\end{")
    rows = list(csv.DictReader((tmp_path / "batch_sweep.csv").read_text().splitlines()))
    assert [row["feasible"] for row in rows] == ["True"] * 5 + ["False"] * 3
    assert rows[0]["peak_bytes_device_0"] == "120"


def test_the_figure_marks_the_largest_batch(tmp_path: Path) -> None:
    report, topology = _report()
    write_batch_files(tmp_path, report, topology)
    root = ElementTree.fromstring((tmp_path / "batch_sweep.svg").read_text())
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "largest that fits: 5" in words
    assert "memory 200" in words
    assert "device 0" in words

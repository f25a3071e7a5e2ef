"""A plan at other batch sizes: limits, files and figure, for a graph with known numbers."""

import csv
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from fxpart.core.data_parallel import split_topology
from fxpart.core.partitions import partition_by_device
from fxpart.core.symbolic_graph import SymbolicGraph
from fxpart.core.topology import Link, Topology
from fxpart.cost.problem import make_problem
from fxpart.cost.roofline import LatencyModel
from fxpart.cost.symbolic.sweep import Sums
from runner.experiment.batch_report import BatchReport, batch_line, batch_metrics, batch_report
from runner.job.batch_files import sweep_columns, write_batch_files
from tests.cost.symbolic.drawn import with_sizes
from tests.sketch import Sketch, devices


def _symbolic() -> SymbolicGraph:
    """Return two operators in a row that each make 10 bytes and take 2 FLOPs per example.

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
    memory_bytes: int = 200,
    rounding_bytes: int = 1,
    replicas: int = 1,
    captured: tuple[int, int | None] = (1, None),
) -> tuple[BatchReport, Topology]:
    """Return the report for the least batch, 2 or more; replicas sum the result of the model."""
    symbolic = replace(_symbolic(), ranges=(captured,))
    memory = [memory_bytes] * replicas
    parallel = split_topology(devices(*memory, link=Link(10.0)), replicas)
    topology, batch = parallel.replica, max(2, captured[0])
    problem = make_problem(symbolic.at(batch=batch), topology, LatencyModel())
    placed = partition_by_device(problem.graph, np.zeros(2, dtype=np.int64))
    report = batch_report(
        symbolic,
        problem,
        placed,
        latency=LatencyModel(),
        sizes={"batch": batch},
        rounding_bytes=rounding_bytes,
        max_batch=8,
        sums=Sums(np.array([2]), parallel) if replicas > 1 else None,
    )
    return report, topology


def test_limits_are_solved_for() -> None:
    report, _ = _report()
    assert report.max_batch_size == 5  # 100 + 20 * 5 is exactly the memory
    assert report.smallest_memory_bytes == (140,)
    assert report.table.latency_s.tolist() == [4.0 * batch for batch in range(1, 9)]
    assert report.table.peak_bytes[:, 0].tolist() == [100 + 20 * batch for batch in range(1, 9)]
    assert batch_metrics(report) == {
        "max_batch_size": 5.0,
        "smallest_device_memory_gib": 140 / 2**30,
    }
    assert batch_line(report).startswith(
        "largest whose tensors fit this plan 5; batch 2 needs 140 B"
    )


def test_the_allocator_rounds_up() -> None:
    # In multiples of 16: weights 112, and 32 twice for three examples, 48 twice for four: too much.
    report, _ = _report(rounding_bytes=16)
    assert report.max_batch_size == 3
    assert report.smallest_memory_bytes == (112 + 2 * 32,)
    columns = sweep_columns(report)
    rounded = [-(-10 * batch // 16) * 16 for batch in range(1, 9)]
    assert columns["peak_bytes_device_0"] == [112 + 2 * size for size in rounded]
    assert columns["feasible"] == [True] * 3 + [False] * 5


@pytest.mark.parametrize(
    ("memory_bytes", "largest", "why"),
    [
        (200, 0, None),  # without rounding 4 examples need 180 and 5 need 200
        (208, 4, None),
        (1000, 5, "the model was captured up to there"),
    ],
)
def test_nothing_outside_the_captured_range_is_reported(
    memory_bytes: int, largest: int, why: str | None, tmp_path: Path
) -> None:
    report, topology = _report(memory_bytes, rounding_bytes=16, captured=(4, 5))
    assert (report.max_batch_size, report.no_larger) == (largest, why)
    assert sweep_columns(report)["batch"] == [4, 5]
    limit = f"at least 5 ({why}); batch 4" if why else f"{largest}; batch 4"
    assert batch_line(report).startswith(f"largest whose tensors fit this plan {limit}")
    write_batch_files(tmp_path, report, topology)
    text = (tmp_path / "formulas.txt").read_text()
    assert "device 0, before the allocator rounds, for batch from 4 to 5\n100 + 20*batch" in text
    assert ("at least 5 fit" in (tmp_path / "batch_sweep.svg").read_text()) is bool(why)


def test_where_memory_sets_no_limit_the_search_does() -> None:
    report, _ = _report(memory_bytes=10**9, replicas=2)
    assert report.max_batch_size == 2**20
    line = "largest whose tensors fit this plan at least 2097152 (the search ends there); batch 4"
    assert batch_line(report).startswith(line)


def test_possibly_no_batch_fits() -> None:
    assert _report(memory_bytes=119)[0].max_batch_size == 0
    assert _report(memory_bytes=120)[0].max_batch_size == 1


def test_replicas_share_a_batch(tmp_path: Path) -> None:
    report, topology = _report(replicas=3)
    assert report.max_global_batch_size == 15
    assert "fit this plan 15; batch 6 needs" in batch_line(report)
    columns = sweep_columns(report)
    assert columns["batch"] == [3 * batch for batch in range(1, 9)]
    # 4 s per example, and 4/3 of its 10 bytes round a ring of 10 bytes per second.
    each_s = 4 + 4 / 3
    assert columns["latency_ms"] == pytest.approx([1e3 * each_s * b for b in range(1, 9)])
    assert columns["examples_per_s"] == pytest.approx([3 / each_s] * 8)
    write_batch_files(tmp_path, report, topology)
    text = (tmp_path / "formulas.txt").read_text()
    assert "batch is that of one replica, of 3" in text
    assert "latency in seconds, without sums over replicas, equal to" in text
    assert "allocator" not in text


def test_the_files_hold_the_report(tmp_path: Path) -> None:
    report, topology = _report()
    write_batch_files(tmp_path, report, topology)
    text = (tmp_path / "formulas.txt").read_text()
    assert "# peak bytes of tensors on device 0\n100 + 20*batch\n" in text
    assert "equal to the simulation for batch from 1 to 8\n4*batch\n" in text
    assert "# FLOPs of the whole model\n4*batch\n" in text
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

"""`trace.json` and `schedule_trace.json`."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from fxpart.schedule import PipelineCosts, StageCost, StageLink, simulate_schedule
from runner.output.trace import (
    schedule_trace_document,
    trace_document,
    write_schedule_trace,
    write_trace,
)
from tests.runner.pipelines import step_of_training
from tests.runner.scene import Scene, fork, long_chain, scene
from tests.sketch import Sketch, devices

KEYS = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "C": {"name", "ph", "ts", "pid", "args"},
    "M": {"name", "ph", "ts", "pid", "tid", "args"},
}


def written(folder: Path, what: Scene) -> list[dict[str, Any]]:
    write_trace(folder / "trace.json", what.graph, what.assignment, what.evaluation)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert isinstance(events, list)
    return events


def of(events: list[dict[str, Any]], phase: str, category: str = "") -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == phase and category in e.get("cat", "")]


def test_events_of_a_fork(tmp_path: Path) -> None:
    events = written(tmp_path, fork())
    compute = [(e["name"], e["pid"], e["ts"], e["dur"]) for e in of(events, "X", "compute")]
    assert compute == [
        ("op0", 1, 0.0, 3e6),
        ("op1", 2, 7e6, 2e6),
        ("op2", 2, 9e6, 5e6),
        ("op3", 2, 14e6, 1e6),
    ]
    assert of(events, "X", "compute")[2]["args"] == {
        "module": "body.right",
        "target": "op",
        "partition": 2,
        "flops": 5,
        "moved_bytes": 0,
    }
    (sent,) = of(events, "X", "transfer")
    assert (sent["name"], sent["pid"], sent["tid"], sent["ts"], sent["dur"]) == (
        "v1",
        2,
        2,
        3e6,
        4e6,
    )
    assert sent["args"] == {"bytes": 4, "from_device": 0, "to_device": 1}


def test_names_of_processes_and_threads(tmp_path: Path) -> None:
    named = [
        (e["name"], e["pid"], e["tid"], e["args"]["name"])
        for e in of(written(tmp_path, fork()), "M")
        if "name" in e["args"]
    ]
    assert named == [
        ("process_name", 1, 1, "device 0: d0"),
        ("process_name", 2, 1, "device 1: d1"),
        ("thread_name", 1, 1, "compute"),
        ("thread_name", 2, 1, "compute"),
        ("thread_name", 2, 2, "receive from 0"),
    ]


def test_a_waiting_replica_has_no_events(tmp_path: Path) -> None:
    what = fork()
    homes = [(0, 2), (1,), (1,)]
    copied = scene(what.graph, what.topology, [0, 1, 2, 2], homes)
    assert {event["pid"] for event in written(tmp_path, copied)} == {1, 2}


def test_memory_counter_reaches_the_peak(tmp_path: Path) -> None:
    what = fork()
    counted = of(written(tmp_path, what), "C")
    for use in what.evaluation.devices:
        held_bytes = [e["args"]["held"] for e in counted if e["pid"] == use.logical_id + 1]
        assert max(held_bytes, default=0) == use.peak_bytes
        assert all(a != b for a, b in pairwise(held_bytes))


def test_memory_counter_records_only_changes(tmp_path: Path) -> None:
    """A chain holds its input of 4 and its weight of 10, and one tensor, then always two."""
    sketch = Sketch()
    value, weight = sketch.input(4), sketch.weight(10)
    for _ in range(5):
        value = sketch.op([value], 3, [weight], flops=1)
    what = scene(sketch.graph(value), devices(99), [0] * 5, [(0,)])
    counted = of(written(tmp_path, what), "C")
    assert [(e["ts"], e["args"]["held"]) for e in counted] == [(0.0, 17), (1e6, 20)]


def test_links_into_one_device_are_separate(tmp_path: Path) -> None:
    """Two values are computed at once on two devices and travel at once to a third."""
    sketch = Sketch()
    start = sketch.input(1)
    a, b = (sketch.op([start], 6, flops=2) for _ in range(2))
    joined = sketch.op([a, b], 1, flops=1)
    what = scene(sketch.graph(joined), devices(99, 99, 99), [0, 1, 2], [(0,), (1,), (2,)])
    sent = of(written(tmp_path, what), "X", "transfer")
    assert [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in sent] == [
        (3, 2, 2e6, 6e6),
        (3, 3, 2e6, 6e6),
    ]


def test_large_trace_is_complete_sorted_and_without_overlap(tmp_path: Path) -> None:
    what = long_chain(3000, 60, 6)
    events = written(tmp_path, what)
    for event in events:
        assert set(event) == KEYS[event["ph"]]
        assert event["pid"] >= 1
    timed = [e["ts"] for e in events if e["ph"] != "M"]
    assert timed == sorted(timed)
    assert len(of(events, "X", "compute")) == 3000
    assert len(of(events, "X", "transfer")) == len(what.evaluation.transfers.value) > 60
    # As a viewer reads them: times a thousand, cut to whole nanoseconds.
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for e in of(events, "X"):
        begin, length = int(e["ts"] * 1000.0), int(e["dur"] * 1000.0)
        threads[e["pid"], e["tid"]].append((begin, begin + length))
    for spans in threads.values():
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_times_survive_the_cut_to_nanoseconds() -> None:
    """1.001 us times 1000 is just below 1001; a plain division would lose a nanosecond."""
    what = long_chain(40, 2, 2)
    scaled = what.evaluation.op_finish_s * 1.001
    what.evaluation.op_start_s[:] *= 1.001
    what.evaluation.op_finish_s[:] = scaled
    document = trace_document(what.graph, what.assignment, what.evaluation)
    events = document["traceEvents"]
    assert isinstance(events, list)
    ends = [int(e["ts"] * 1000.0) + int(e["dur"] * 1000.0) for e in of(events, "X", "compute")]
    assert ends == [round(s * 1e9) for s in scaled.tolist()]


def test_same_run_same_bytes(tmp_path: Path) -> None:
    written(tmp_path / "a", fork())
    written(tmp_path / "b", fork())
    first, second = ((tmp_path / folder / "trace.json").read_bytes() for folder in "ab")
    assert first == second


def test_a_training_step_by_hand(tmp_path: Path) -> None:
    write_schedule_trace(tmp_path / "schedule_trace.json", step_of_training())
    events = json.loads((tmp_path / "schedule_trace.json").read_text())["traceEvents"]
    named = [e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]]
    assert named == [
        "device 0",
        "device 1",
        "compute",
        "receive from 1",
        "compute",
        "receive from 0",
    ]
    ran = [
        (e["name"], e["pid"], e["tid"], e["ts"] / 1e6, e["dur"] / 1e6)
        for e in events
        if e["ph"] == "X"
    ]
    assert ran == [
        ("forward 0", 1, 1, 0, 1),
        ("forward 1", 1, 1, 1, 1),
        ("after forward 0", 2, 2, 1, 1),
        ("forward 0", 2, 1, 2, 1),
        ("after forward 1", 2, 2, 2, 1),
        ("forward 1", 2, 1, 3, 1),
        ("backward 0", 2, 1, 4, 1),
        ("backward 1", 2, 1, 5, 1),
        ("after backward 0", 1, 3, 5, 1),
        ("backward 0", 1, 1, 6, 1),
        ("after backward 1", 1, 3, 6, 1),
        ("backward 1", 1, 1, 7, 1),
    ]
    (first, *_) = [e for e in events if e.get("cat") == "transfer"]
    assert first["args"] == {"bytes": 1, "from_stage": 0, "to_stage": 1, "microbatch": 0}


def test_nothing_in_a_thread_overlaps() -> None:
    stages = [StageCost(device=s % 3, forward_s=0.7e-3, backward_s=1.3e-3) for s in range(6)]
    links = [StageLink("F", s, s + 1, 100, 0.4e-3) for s in range(5)]
    links += [StageLink("B", s + 1, s, 100, 0.4e-3) for s in range(5)]
    result = simulate_schedule(
        "interleaved", PipelineCosts(tuple(stages), tuple(links), training=True), 9
    )
    events: Any = schedule_trace_document(result)["traceEvents"]
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            # As a viewer reads them: times a thousand, cut to whole nanoseconds.
            begin, length = int(e["ts"] * 1000.0), int(e["dur"] * 1000.0)
            threads[e["pid"], e["tid"]].append((begin, begin + length))
    assert sum(map(len, threads.values())) == len(result.events) + len(result.transfers)
    assert len(threads) == 3 + 6
    for spans in threads.values():
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_sums_and_updates_are_events_of_their_own() -> None:
    stage = StageCost(2, 1.0, update_s=1.0, reduce_s=2.0)
    result = simulate_schedule("gpipe", PipelineCosts((stage,), (), training=False), 1)
    events: Any = schedule_trace_document(result)["traceEvents"]
    ran = [(e["name"], e["cat"], e["pid"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events[-3:]]
    assert ran == [
        ("forward 0", "forward", 3, 0, 1),
        ("sums over replicas", "sums", 3, 1, 2),
        ("updates of stage 0", "updates", 3, 3, 1),
    ]

"""`schedule_trace.json`."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from fxpart.schedule import PipelineCosts, StageCost, StageLink, simulate_schedule
from runner.output.trace import schedule_trace_document, write_schedule_trace
from tests.runner.pipelines import step_of_training


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

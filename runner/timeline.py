"""`trace.json`: the simulated run in the Chrome trace format, which ui.perfetto.dev opens.

Each device is a process; its threads are the computation and one for each link that it receives
from, so that nothing in a thread overlaps. A counter shows the memory that the device holds.
"""

import json
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path

import numpy as np

from fxpart.assignment import Assignment
from fxpart.cost.evaluation import Evaluation
from fxpart.graph import FloatArray, OpGraph
from runner.writing import write_text

__all__ = [
    "COMPUTE",
    "FIRST_LINK",
    "Event",
    "about",
    "microseconds",
    "trace_document",
    "trace_text",
    "write_trace",
]

COMPUTE = 1
"""Thread of the computation. Viewers give process 0 and thread 0 meanings of their own."""
FIRST_LINK = 2
"""Thread of what comes from device 0."""

Event = dict[str, object]


def write_trace(path: Path, graph: OpGraph, assignment: Assignment, evaluation: Evaluation) -> None:
    """Write `trace_document` to `path`. Raises `CacheError` when the place cannot be written."""
    write_text(path, trace_text(trace_document(graph, assignment, evaluation)))


def trace_text(document: Mapping[str, object]) -> str:
    """Return a trace as JSON without blanks, since it is long."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def trace_document(
    graph: OpGraph, assignment: Assignment, evaluation: Evaluation
) -> dict[str, object]:
    """Return the trace: names first, then all events in order of time.

    Times (``ts``, ``dur``) are microseconds from the start of the run, to the nanosecond.
    """
    events = [
        *_compute_events(graph, assignment, evaluation),
        *_transfer_events(graph, evaluation),
        *_memory_events(evaluation),
    ]
    events.sort(key=itemgetter("ts"))
    return {"displayTimeUnit": "ms", "traceEvents": [*_names(evaluation), *events]}


def microseconds(start_s: FloatArray, finish_s: FloatArray) -> tuple[list[float], list[float]]:
    """Return starts and durations that stay apart when a viewer cuts them to whole nanoseconds.

    Viewers multiply by 1000 and drop what is behind the point, and they throw away an event that
    reaches one nanosecond into the next. So: whole nanoseconds, and floats that are not below them.
    """
    start_ns = np.rint(start_s * 1e9)
    both = []
    for count_ns in (start_ns, np.rint(finish_s * 1e9) - start_ns):
        count_us = count_ns / 1000
        both.append(np.where(count_us * 1000 < count_ns, np.nextafter(count_us, np.inf), count_us))
    return both[0].tolist(), both[1].tolist()


def _compute_events(graph: OpGraph, assignment: Assignment, evaluation: Evaluation) -> list[Event]:
    start_us, duration_us = microseconds(evaluation.op_start_s, evaluation.op_finish_s)
    partition_of = assignment.partition_of.tolist()
    device_of = assignment.device_of.tolist()
    flops, moved_bytes = graph.flops.tolist(), graph.moved_bytes.tolist()
    return [
        {
            "name": graph.names[op],
            "cat": "compute",
            "ph": "X",
            "ts": start_us[op],
            "dur": duration_us[op],
            "pid": device_of[op] + 1,
            "tid": COMPUTE,
            "args": {
                "module": graph.modules[op],
                "target": graph.targets[op],
                "partition": partition_of[op],
                "flops": flops[op],
                "moved_bytes": moved_bytes[op],
            },
        }
        for op in range(graph.n_ops)
    ]


def _transfer_events(graph: OpGraph, evaluation: Evaluation) -> list[Event]:
    moves = evaluation.transfers
    start_us, duration_us = microseconds(moves.start_s, moves.finish_s)
    rows = zip(moves.value.tolist(), moves.source.tolist(), moves.target.tolist(), strict=True)
    return [
        {
            "name": graph.value_names[value],
            "cat": "transfer",
            "ph": "X",
            "ts": start_us[i],
            "dur": duration_us[i],
            "pid": target + 1,
            "tid": FIRST_LINK + source,
            "args": {
                "bytes": int(graph.value_bytes[value]),
                "from_device": source,
                "to_device": target,
            },
        }
        for i, (value, source, target) in enumerate(rows)
    ]


def _memory_events(evaluation: Evaluation) -> list[Event]:
    """Return the memory of each device whenever it changes; the last value stays to the end."""
    events: list[Event] = []
    for device, profile in enumerate(evaluation.memory):
        held_bytes = profile.held_bytes
        changes = np.flatnonzero(np.diff(held_bytes, prepend=-1))
        start_us, _ = microseconds(profile.start_s[changes], profile.start_s[changes])
        events += [
            {
                "name": "memory_bytes",
                "ph": "C",
                "ts": ts,
                "pid": device + 1,
                "args": {"held": held},
            }
            for ts, held in zip(start_us, held_bytes[changes].tolist(), strict=True)
        ]
    return events


def _names(evaluation: Evaluation) -> list[Event]:
    moves = evaluation.transfers
    links = sorted(set(zip(moves.target.tolist(), moves.source.tolist(), strict=True)))
    # A replica that waits for its turn does nothing in the run of the first input.
    busy = [use for use in evaluation.devices if len(evaluation.memory[use.logical_id].op)]
    threads = [(use.logical_id, COMPUTE, "compute") for use in busy]
    threads += [(to, FIRST_LINK + source, f"receive from {source}") for to, source in links]
    events: list[Event] = []
    for use in busy:
        name = {"name": f"device {use.logical_id}: {use.name}"}
        events.append(about("process_name", use.logical_id, name))
        order = {"sort_index": use.logical_id}
        events.append(about("process_sort_index", use.logical_id, order))
    for device, thread, label in sorted(threads):
        events.append(about("thread_name", device, {"name": label}, thread))
        events.append(about("thread_sort_index", device, {"sort_index": thread}, thread))
    return events


def about(kind: str, device: int, args: Mapping[str, object], thread: int = COMPUTE) -> Event:
    """Return what names or orders the process of `device`, or a thread of it."""
    return {
        "name": kind,
        "ph": "M",
        "ts": 0.0,
        "pid": device + 1,
        "tid": thread,
        "args": dict(args),
    }

"""`trace.json`: the simulated run in the Chrome trace format, which ui.perfetto.dev opens.

Each device is a process; its threads are the computation and one for each link that it receives
from, so that nothing in a thread overlaps. A counter shows the memory that the device holds.
"""

import json
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import FloatArray, OpGraph
from fxpart.cost.evaluation import Evaluation
from fxpart.schedule import ReplicaSum, ScheduleResult, StageUpdate
from runner.output.text_files import write_text

__all__ = [
    "COMPUTE",
    "FIRST_LINK",
    "Event",
    "about",
    "microseconds",
    "schedule_trace_document",
    "trace_document",
    "trace_text",
    "write_schedule_trace",
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


# `schedule_trace.json`: a step of the pipeline in the Chrome trace format, as `trace.json` is.
#
# Each device is a process; its threads are the computation, in which sums over replicas stand too,
# and one for each device that it receives from.

_WORDS = {"F": "forward", "B": "backward"}


def write_schedule_trace(path: Path, result: ScheduleResult) -> None:
    """Write `schedule_trace_document` to `path`. Raises `CacheError` when that cannot be done."""
    write_text(path, trace_text(schedule_trace_document(result)))


def schedule_trace_document(result: ScheduleResult) -> dict[str, object]:
    """Return the trace: names first, then all events in order of time.

    Times (``ts``, ``dur``) are microseconds from the start of the step, to the nanosecond.
    """
    events = [
        *_schedule_trace_compute_events(result),
        *_schedule_trace_transfer_events(result),
        *_end_events(result),
    ]
    events.sort(key=itemgetter("ts"))
    return {"displayTimeUnit": "ms", "traceEvents": [*_schedule_trace_names(result), *events]}


def _schedule_trace_compute_events(result: ScheduleResult) -> list[Event]:
    start_us, duration_us = microseconds(
        np.array([event.start_s for event in result.events]),
        np.array([event.finish_s for event in result.events]),
    )
    return [
        {
            "name": f"{_WORDS[event.kind]} {event.microbatch}",
            "cat": _WORDS[event.kind],
            "ph": "X",
            "ts": start_us[i],
            "dur": duration_us[i],
            "pid": event.device + 1,
            "tid": COMPUTE,
            "args": {"stage": event.stage, "microbatch": event.microbatch},
        }
        for i, event in enumerate(result.events)
    ]


def _schedule_trace_transfer_events(result: ScheduleResult) -> list[Event]:
    start_us, duration_us = microseconds(
        np.array([sent.start_s for sent in result.transfers]),
        np.array([sent.finish_s for sent in result.transfers]),
    )
    return [
        {
            "name": f"after {_WORDS[sent.kind]} {sent.microbatch}",
            "cat": "transfer",
            "ph": "X",
            "ts": start_us[i],
            "dur": duration_us[i],
            "pid": _device(result, sent.target) + 1,
            "tid": FIRST_LINK + _device(result, sent.source),
            "args": {
                "bytes": sent.sent_bytes,
                "from_stage": sent.source,
                "to_stage": sent.target,
                "microbatch": sent.microbatch,
            },
        }
        for i, sent in enumerate(result.transfers)
    ]


def _end_events(result: ScheduleResult) -> list[Event]:
    """Return what comes once, at the end of a step."""
    parts: list[ReplicaSum | StageUpdate] = [*result.sums, *result.updates]
    names = ["sums over replicas"] * len(result.sums)
    names += [f"updates of stage {update.stage}" for update in result.updates]
    start_us, duration_us = microseconds(
        np.array([part.start_s for part in parts]), np.array([part.finish_s for part in parts])
    )
    return [
        {
            "name": names[i],
            "cat": "sums" if i < len(result.sums) else "updates",
            "ph": "X",
            "ts": start_us[i],
            "dur": duration_us[i],
            "pid": part.device + 1,
            "tid": COMPUTE,
            "args": {},
        }
        for i, part in enumerate(parts)
    ]


def _device(result: ScheduleResult, stage: int) -> int:
    """Return the device of a stage: stages go over the devices in turn."""
    return result.devices[stage % len(result.devices)]


def _schedule_trace_names(result: ScheduleResult) -> list[Event]:
    pairs = {(_device(result, s.target), _device(result, s.source)) for s in result.transfers}
    threads = [(device, COMPUTE, "compute") for device in result.devices]
    threads += [(to, FIRST_LINK + source, f"receive from {source}") for to, source in sorted(pairs)]
    events: list[Event] = []
    for device in sorted(result.devices):
        events.append(about("process_name", device, {"name": f"device {device}"}))
        events.append(about("process_sort_index", device, {"sort_index": device}))
    for device, thread, label in sorted(threads):
        events.append(about("thread_name", device, {"name": label}, thread))
        events.append(about("thread_sort_index", device, {"sort_index": thread}, thread))
    return events

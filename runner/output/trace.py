"""`trace.json` and `schedule_trace.json`: a simulated run, and a simulated pipeline step.

Both are in the Chrome trace format, for ui.perfetto.dev. Each device is a process, with a thread
for its computation and one for each device that it receives from, so that events of a thread never
overlap. In `trace.json` a counter shows the memory held by the device.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import FloatArray, OpGraph
from fxpart.cost.evaluation import Evaluation
from fxpart.schedule import (
    ReplicaSum,
    ScheduleResult,
    StageEvent,
    StageTransfer,
    StageUpdate,
)
from fxpart.support.text_files import write_text

__all__ = ["schedule_trace_document", "trace_document", "write_schedule_trace", "write_trace"]

_COMPUTE = 1
"""Thread of the computation. Process 0 and thread 0 have special meanings in viewers."""
_FIRST_LINK = 2
"""Thread of transfers from device 0."""
_KINDS = {"F": "forward", "B": "backward"}
_Event = dict[str, object]
_Span = tuple[str, str, int, int, dict[str, object]]
"""Name, category, device, thread and arguments of an event with a duration."""


def write_trace(path: Path, graph: OpGraph, assignment: Assignment, evaluation: Evaluation) -> None:
    """Write `trace_document` to `path`. Raises `CacheError` if it cannot be written."""
    _write(path, trace_document(graph, assignment, evaluation))


def write_schedule_trace(path: Path, result: ScheduleResult) -> None:
    """Write `schedule_trace_document` to `path`. Raises `CacheError` if it cannot be written."""
    _write(path, schedule_trace_document(result))


def _write(path: Path, document: Mapping[str, object]) -> None:
    # Compact, since it is large.
    write_text(path, json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n")


def trace_document(
    graph: OpGraph, assignment: Assignment, evaluation: Evaluation
) -> dict[str, object]:
    """Return the trace of the first input: names, then all events in order of time.

    Times (``ts``, ``dur``) are microseconds from the start, to the nanosecond.
    """
    moves = evaluation.transfers
    links = zip(moves.target.tolist(), moves.source.tolist(), strict=True)
    # Replicas that wait for their turn are idle during the first input.
    busy = [use for use in evaluation.devices if len(evaluation.memory[use.logical_id].op)]
    names = _names({use.logical_id: f"device {use.logical_id}: {use.name}" for use in busy}, links)
    events = [
        *_compute_events(graph, assignment, evaluation),
        *_transfer_events(graph, evaluation),
        *_memory_events(evaluation),
    ]
    return _document(names, events)


def schedule_trace_document(result: ScheduleResult) -> dict[str, object]:
    """Return the trace of a step: names, then all events in order of time.

    Times (``ts``, ``dur``) are microseconds from the start, to the nanosecond. All-reduces and
    updates are in the thread of the computation.
    """
    links = [(_device(result, s.target), _device(result, s.source)) for s in result.transfers]
    names = _names({device: f"device {device}" for device in sorted(result.devices)}, links)
    return _document(names, [*_action_events(result), *_sent_events(result), *_end_events(result)])


def _document(names: list[_Event], events: list[_Event]) -> dict[str, object]:
    events.sort(key=itemgetter("ts"))
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}


def _names(devices: Mapping[int, str], links: Iterable[tuple[int, int]]) -> list[_Event]:
    """Return the metadata events of processes and threads; `links` are (target, source)."""
    threads = [(device, _COMPUTE, "compute") for device in devices]
    threads += [(to, _FIRST_LINK + source, f"receive from {source}") for to, source in set(links)]
    events = []
    for device, name in devices.items():
        events.append(_about("process_name", device, _COMPUTE, {"name": name}))
        events.append(_about("process_sort_index", device, _COMPUTE, {"sort_index": device}))
    for device, thread, name in sorted(threads):
        events.append(_about("thread_name", device, thread, {"name": name}))
        events.append(_about("thread_sort_index", device, thread, {"sort_index": thread}))
    return events


def _about(kind: str, device: int, thread: int, args: _Event) -> _Event:
    return {"name": kind, "ph": "M", "ts": 0.0, "pid": device + 1, "tid": thread, "args": args}


def _spans(start_s: FloatArray, finish_s: FloatArray, spans: Iterable[_Span]) -> list[_Event]:
    """Return a complete event for each of `spans`."""
    return [
        {
            "name": name,
            "cat": category,
            "ph": "X",
            "ts": ts,
            "dur": duration,
            "pid": device + 1,
            "tid": thread,
            "args": args,
        }
        for (name, category, device, thread, args), ts, duration in zip(
            spans, *_microseconds(start_s, finish_s), strict=True
        )
    ]


def _microseconds(start_s: FloatArray, finish_s: FloatArray) -> tuple[list[float], list[float]]:
    """Return starts and durations that do not overlap when a viewer truncates to nanoseconds.

    Viewers multiply by 1000 and truncate, and they drop an event that overlaps the next by one
    nanosecond. So times are whole nanoseconds, as floats that truncate to them.
    """
    start_ns = np.rint(start_s * 1e9)
    ends = []
    for count_ns in (start_ns, np.rint(finish_s * 1e9) - start_ns):
        count_us = count_ns / 1000
        ends.append(np.where(count_us * 1000 < count_ns, np.nextafter(count_us, np.inf), count_us))
    return ends[0].tolist(), ends[1].tolist()


# A run.


def _compute_events(graph: OpGraph, assignment: Assignment, evaluation: Evaluation) -> list[_Event]:
    partition_of = assignment.partition_of.tolist()
    device_of = assignment.device_of.tolist()
    flops, moved_bytes = graph.flops.tolist(), graph.moved_bytes.tolist()
    spans: Iterable[_Span] = (
        (
            graph.names[op],
            "compute",
            device_of[op],
            _COMPUTE,
            {
                "module": graph.modules[op],
                "target": graph.targets[op],
                "partition": partition_of[op],
                "flops": flops[op],
                "moved_bytes": moved_bytes[op],
            },
        )
        for op in range(graph.n_ops)
    )
    return _spans(evaluation.op_start_s, evaluation.op_finish_s, spans)


def _transfer_events(graph: OpGraph, evaluation: Evaluation) -> list[_Event]:
    moves = evaluation.transfers
    rows = zip(moves.value.tolist(), moves.source.tolist(), moves.target.tolist(), strict=True)
    spans: Iterable[_Span] = (
        (
            graph.value_names[value],
            "transfer",
            target,
            _FIRST_LINK + source,
            {
                "bytes": int(graph.value_bytes[value]),
                "from_device": source,
                "to_device": target,
            },
        )
        for value, source, target in rows
    )
    return _spans(moves.start_s, moves.finish_s, spans)


def _memory_events(evaluation: Evaluation) -> list[_Event]:
    """Return the changes of each device's memory; the last value holds until the end."""
    events: list[_Event] = []
    for device, profile in enumerate(evaluation.memory):
        changes = np.flatnonzero(np.diff(profile.held_bytes, prepend=-1))
        start_us, _ = _microseconds(profile.start_s[changes], profile.start_s[changes])
        pid = device + 1
        events += [
            {"name": "memory_bytes", "ph": "C", "ts": ts, "pid": pid, "args": {"held": held_bytes}}
            for ts, held_bytes in zip(start_us, profile.held_bytes[changes].tolist(), strict=True)
        ]
    return events


# A step of a pipeline.


def _device(result: ScheduleResult, stage: int) -> int:
    """Return the device of a stage: stages are assigned to devices round-robin."""
    return result.devices[stage % len(result.devices)]


def _action_events(result: ScheduleResult) -> list[_Event]:
    spans: Iterable[_Span] = (
        (
            f"{_KINDS[event.kind]} {event.microbatch}",
            _KINDS[event.kind],
            event.device,
            _COMPUTE,
            {"stage": event.stage, "microbatch": event.microbatch},
        )
        for event in result.events
    )
    return _spans(*_times(result.events), spans)


def _sent_events(result: ScheduleResult) -> list[_Event]:
    spans: Iterable[_Span] = (
        (
            f"after {_KINDS[sent.kind]} {sent.microbatch}",
            "transfer",
            _device(result, sent.target),
            _FIRST_LINK + _device(result, sent.source),
            {
                "bytes": sent.sent_bytes,
                "from_stage": sent.source,
                "to_stage": sent.target,
                "microbatch": sent.microbatch,
            },
        )
        for sent in result.transfers
    )
    return _spans(*_times(result.transfers), spans)


def _end_events(result: ScheduleResult) -> list[_Event]:
    """Return the all-reduces and updates at the end of a step."""
    sums: list[_Span]
    sums = [("sums over replicas", "sums", part.device, _COMPUTE, {}) for part in result.sums]
    updates: list[_Span] = [
        (f"updates of stage {part.stage}", "updates", part.device, _COMPUTE, {})
        for part in result.updates
    ]
    parts: list[ReplicaSum | StageUpdate] = [*result.sums, *result.updates]
    return _spans(*_times(parts), [*sums, *updates])


def _times(
    parts: Sequence[StageEvent | StageTransfer | ReplicaSum | StageUpdate],
) -> tuple[FloatArray, FloatArray]:
    return np.array([part.start_s for part in parts]), np.array([part.finish_s for part in parts])

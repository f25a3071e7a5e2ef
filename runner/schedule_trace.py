"""`schedule_trace.json`: a step of the pipeline in the Chrome trace format, as `trace.json` is.

Each device is a process; its threads are the computation, in which sums over replicas stand too,
and one for each device that it receives from.
"""

from operator import itemgetter
from pathlib import Path

import numpy as np

from fxpart.schedule import ReplicaSum, ScheduleResult, StageUpdate
from runner.timeline import COMPUTE, FIRST_LINK, Event, about, microseconds, trace_text
from runner.writing import write_text

__all__ = ["schedule_trace_document", "write_schedule_trace"]

_WORDS = {"F": "forward", "B": "backward"}


def write_schedule_trace(path: Path, result: ScheduleResult) -> None:
    """Write `schedule_trace_document` to `path`. Raises `CacheError` when that cannot be done."""
    write_text(path, trace_text(schedule_trace_document(result)))


def schedule_trace_document(result: ScheduleResult) -> dict[str, object]:
    """Return the trace: names first, then all events in order of time.

    Times (``ts``, ``dur``) are microseconds from the start of the step, to the nanosecond.
    """
    events = [*_compute_events(result), *_transfer_events(result), *_end_events(result)]
    events.sort(key=itemgetter("ts"))
    return {"displayTimeUnit": "ms", "traceEvents": [*_names(result), *events]}


def _compute_events(result: ScheduleResult) -> list[Event]:
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


def _transfer_events(result: ScheduleResult) -> list[Event]:
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


def _names(result: ScheduleResult) -> list[Event]:
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

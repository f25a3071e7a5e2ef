"""Incremental estimate of the simulated latency after moving a few operators.

`refresh` simulates the whole model once. Besides the time of every event (heads) it stores the
remaining time from every event to the end (tails), and the state of all devices and links at
regular marks. `estimate` then simulates only from the mark before the first changed operator to the
mark after the last, and adds the tails there: O(changed span + spacing of marks), regardless of the
size of the model. To compare many changes within one span, `set_checkpoints` simulates it once, and
`estimate_from` only what follows the first affected operator. Heads and tails are used like this in
job-shop scheduling, see Taillard: Parallel taboo search techniques for the job shop scheduling
problem. ORSA J. Comput. 6(2), 1994, doi:10.1287/ijoc.6.2.108.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.kernels import ScheduleLog, schedule_log
from fxpart.cost.tables import CostTables
from fxpart.support.compiled import compiled, inlined

__all__ = [
    "Progress",
    "estimate",
    "estimate_from",
    "first_affected",
    "least_square",
    "make_progress",
    "refresh",
    "set_checkpoints",
]

_LEAST_SPACING = 32
_MOST_CHECKPOINTS = 32
_MOST_MARK_BYTES = 64 * 2**20
_ROUNDING = 1e-9


class Progress(NamedTuple):
    """A simulated placement prepared for `estimate`; `C` marks, one every `spacing` operators."""

    log: ScheduleLog
    tail_s: FloatArray
    """From an operator's start to the end of the model, shape (n,)."""
    critical: npt.NDArray[np.bool_]
    """Whether an operator, or a transfer it sends or waits for, is critical. Shape (n,)."""
    spacing: int
    device_free_s: FloatArray
    """When each device becomes free before the operator of a mark, shape (C, D)."""
    link_free_s: FloatArray
    """When each link becomes free, shape (C, D, D)."""
    device_tail_s: FloatArray
    """Time from the start of a device's next operator after a mark to the end, shape (C, D)."""
    link_tail_s: FloatArray
    """Time from the start of a link's next transfer to the end, shape (C, D, D)."""
    issue_tail_s: FloatArray
    """Lower bound of the latency from the launch times of operators after a mark, shape (C,)."""
    trial_finish_s: FloatArray
    """Times of the last trial, which `estimate_from` continues. Shape (n,)."""
    trial_arrival_s: FloatArray
    """Arrivals of values in the last trial, shape (V, D)."""
    checkpoint_device_free_s: FloatArray
    """When each device becomes free before each of `K` checkpoints, shape (K, D)."""
    checkpoint_link_free_s: FloatArray
    """When each link becomes free, shape (K, D, D)."""
    checkpoint_longest_s: FloatArray
    """Longest path known before a checkpoint: of launches, or of values read after the span."""
    checkpoint_sent_s: FloatArray
    """Time of transfers before a checkpoint. Both have shape (K,)."""
    checkpoint_tail_s: FloatArray
    """Least time from an operator's start in the span to the end of the model, shape (n,)."""


def make_progress(t: CostTables) -> Progress:
    """Return an empty `Progress` for the graph and topology of `t`; `refresh` fills it."""
    n, devices = t.op_time_s.shape
    mark_bytes = 16 * devices * (devices + 1)
    spacing = max(_LEAST_SPACING, n * mark_bytes // _MOST_MARK_BYTES)
    marks = n // spacing + 2
    checkpoints = max(1, min(_MOST_CHECKPOINTS, _MOST_MARK_BYTES // mark_bytes))
    return Progress(
        schedule_log(t),
        np.zeros(n),
        np.zeros(n, dtype=np.bool_),
        spacing,
        np.zeros((marks, devices)),
        np.zeros((marks, devices, devices)),
        np.zeros((marks, devices)),
        np.zeros((marks, devices, devices)),
        np.zeros(marks),
        np.zeros(n),
        np.full((len(t.producer), devices), -1.0),
        np.zeros((checkpoints, devices)),
        np.zeros((checkpoints, devices, devices)),
        np.zeros(checkpoints),
        np.zeros(checkpoints),
        np.zeros(n),
    )


@compiled
def _ready_s(t: CostTables, device_of: IntArray, op: int, p: Progress, begin: int) -> float:
    """Return when `op` has been launched and all its operands have arrived.

    Producers from `begin` on use the trial's times. Earlier values that were not sent to this
    device so far are sent at once, ignoring contention on the link.
    """
    device, ready = device_of[op], float(t.issue_s[op])
    for i in range(t.read_start[op], t.read_start[op + 1]):
        value = t.reads[i]
        maker = t.producer[value]
        if maker < 0:
            continue
        source = device_of[maker]
        if maker >= begin:
            available_s = (
                p.trial_finish_s[maker] if source == device else p.trial_arrival_s[value, device]
            )
        elif source == device:
            available_s = p.log.finish_s[maker]
        else:
            available_s = p.log.arrival_s[value, device]
            if available_s < 0.0:
                available_s = p.log.finish_s[maker] + t.link_latency_s[source, device]
                available_s += t.value_bytes[value] * t.s_per_byte[source, device]
        ready = max(ready, available_s)
    return ready


@compiled
def _send(  # noqa: PLR0917 - inlined in the innermost loop
    t: CostTables,
    device_of: IntArray,
    value: int,
    finish: float,
    link_free: FloatArray,
    arrival_s: FloatArray,
) -> float:
    """Send `value`, produced at `finish`, to all its readers' devices; return the transfer time."""
    device, total_s = device_of[t.producer[value]], 0.0
    for j in range(t.reader_start[value], t.reader_start[value + 1]):
        arrival_s[value, device_of[t.readers[j]]] = -1.0
    for j in range(t.reader_start[value], t.reader_start[value + 1]):
        target = device_of[t.readers[j]]
        if target == device or arrival_s[value, target] >= 0.0:
            continue
        transfer_s = (
            t.link_latency_s[device, target] + t.value_bytes[value] * t.s_per_byte[device, target]
        )
        arrival_s[value, target] = max(finish, link_free[device, target]) + transfer_s
        link_free[device, target] = arrival_s[value, target]
        total_s += transfer_s
    return total_s


@inlined
def _mark(
    index: int,
    device_s: FloatArray,
    link_s: FloatArray,
    device_marks_s: FloatArray,
    link_marks_s: FloatArray,
) -> None:
    """Copy times into their marks, element by element: slices take numba seconds to compile."""
    for a in range(device_s.shape[0]):
        device_marks_s[index, a] = device_s[a]
        for b in range(device_s.shape[0]):
            link_marks_s[index, a, b] = link_s[a, b]


class _Trial(NamedTuple):
    """A simulation of the operators between two marks, with other devices."""

    begin: int
    end: int
    last_mark: int
    device_free_s: FloatArray
    link_free_s: FloatArray


@inlined
def _bounds(p: Progress, first: int, last: int, n: int) -> tuple[int, int, int]:
    """Return the operators at the marks around `first` to `last`, and the later mark's number."""
    last_mark = last // p.spacing + 1
    return first // p.spacing * p.spacing, min(last_mark * p.spacing, n), last_mark


@inlined
def _trial(p: Progress, first: int, last: int, n: int) -> _Trial:
    """Return a trial of operators `first` to `last` at the mark before them."""
    begin, end, last_mark = _bounds(p, first, last, n)
    mark = begin // p.spacing
    return _Trial(begin, end, last_mark, p.device_free_s[mark].copy(), p.link_free_s[mark].copy())


@compiled
def _simulate(  # noqa: PLR0917 - compiled: all by position
    t: CostTables,
    device_of: IntArray,
    p: Progress,
    trial: _Trial,
    first: int,
    stop: int,
    longest: float,
    sent_s: float,
    unchanged: int,
    tail_s: FloatArray,
    limit_s: float,
) -> tuple[float, float]:
    """Simulate operators `first` to `stop`; return the longest path and the time of transfers.

    Both begin with the values before `first`. From operator `unchanged` on, `tail_s` is the least
    time from each to the end of the model; the path is infinite if it must exceed `limit_s`.
    """
    device_free, link_free = trial.device_free_s, trial.link_free_s
    for op in range(first, stop):
        device = device_of[op]
        start = max(device_free[device], _ready_s(t, device_of, op, p, trial.begin))
        if op >= unchanged and start + tail_s[op] > limit_s:
            return np.inf, sent_s
        finish = start + t.op_time_s[op, device]
        p.trial_finish_s[op] = finish
        device_free[device] = finish
        for value in range(t.made_start[op], t.made_start[op + 1]):
            sent_s += _send(t, device_of, value, finish, link_free, p.trial_arrival_s)
            for j in range(t.reader_start[value], t.reader_start[value + 1]):
                reader = t.readers[j]
                if reader >= trial.end:
                    target = device_of[reader]
                    available_s = finish if target == device else p.trial_arrival_s[value, target]
                    longest = max(longest, available_s + p.tail_s[reader])
    return longest, sent_s


@inlined
def _at_end(p: Progress, trial: _Trial, longest: float) -> tuple[float, float]:
    """Return the longest path, with those that leave the span at its end, and the mean square."""
    device_free, link_free = trial.device_free_s, trial.link_free_s
    squares = 0.0
    for a in range(device_free.shape[0]):
        through = device_free[a] + p.device_tail_s[trial.last_mark, a]
        longest, squares = max(longest, through), squares + through * through
        for b in range(device_free.shape[0]):
            if p.link_tail_s[trial.last_mark, a, b] > 0.0:
                longest = max(longest, link_free[a, b] + p.link_tail_s[trial.last_mark, a, b])
    return longest, squares / device_free.shape[0]


@compiled
def estimate(  # noqa: PLR0917 - compiled: all by position
    t: CostTables, device_of: IntArray, p: Progress, first: int, last: int, limit_s: float = np.inf
) -> tuple[float, float, float]:
    """Estimate the latency if operators `first` to `last` were on the devices in `device_of`.

    It may be infinite if it is certain to exceed `limit_s`.

    Also returns the total time of transfers that begin in the span, including those that delay
    nothing, and the mean square of the longest path through each device, in s^2, which decreases as
    work is spread.

    Outside the span `device_of` must be the same as at the last `refresh`. Only paths through the
    span are considered; others keep their length, so changes of non-critical operators do not help.
    """
    trial = _trial(p, first, last, device_of.shape[0])
    limit_s *= 1.0 + _ROUNDING
    issued_s, begin, end = p.issue_tail_s[trial.last_mark], trial.begin, trial.end
    longest, sent_s = _simulate(
        t, device_of, p, trial, begin, end, issued_s, 0.0, last + 1, p.tail_s, limit_s
    )
    longest, square = _at_end(p, trial, longest)
    return longest, sent_s, square


@inlined
def _checkpoint_spacing(p: Progress, begin: int, end: int) -> int:
    """Return the number of operators from one checkpoint to the next."""
    return int((end - begin - 1) // p.checkpoint_sent_s.shape[0] + 1)


@inlined
def _set_tails(t: CostTables, device_of: IntArray, p: Progress, trial: _Trial) -> None:
    """Set the least times to the end of the model, as if no transfer waited for another."""
    device_tail_s = p.device_tail_s[trial.last_mark].copy()
    for op in range(trial.end - 1, trial.begin - 1, -1):
        device = device_of[op]
        tail = device_tail_s[device]
        for value in range(t.made_start[op], t.made_start[op + 1]):
            for j in range(t.reader_start[value], t.reader_start[value + 1]):
                reader, target = t.readers[j], device_of[t.readers[j]]
                after = p.checkpoint_tail_s[reader] if reader < trial.end else p.tail_s[reader]
                if target != device:
                    after += t.link_latency_s[device, target]
                    after += t.value_bytes[value] * t.s_per_byte[device, target]
                tail = max(tail, after)
        p.checkpoint_tail_s[op] = device_tail_s[device] = tail + t.op_time_s[op, device]


@compiled
def set_checkpoints(
    t: CostTables, device_of: IntArray, p: Progress, first: int, last: int
) -> tuple[float, float, float]:
    """Return `estimate`, and prepare for `estimate_from`."""
    trial = _trial(p, first, last, device_of.shape[0])
    spacing = _checkpoint_spacing(p, trial.begin, trial.end)
    longest, sent_s = p.issue_tail_s[trial.last_mark], 0.0
    for index, op in enumerate(range(trial.begin, trial.end, spacing)):
        device_free, link_free = trial.device_free_s, trial.link_free_s
        _mark(index, device_free, link_free, p.checkpoint_device_free_s, p.checkpoint_link_free_s)
        p.checkpoint_longest_s[index], p.checkpoint_sent_s[index] = longest, sent_s
        stop, end = min(op + spacing, trial.end), trial.end
        longest, sent_s = _simulate(
            t, device_of, p, trial, op, stop, longest, sent_s, end, p.tail_s, np.inf
        )
    _set_tails(t, device_of, p, trial)
    longest, square = _at_end(p, trial, longest)
    return longest, sent_s, square


@inlined
def first_affected(t: CostTables, p: Progress, unit_ops: IntArray, first: int) -> int:
    """Return the first operator whose times depend on where `unit_ops` are.

    It is the first of them, or a producer that may send to them, from the mark before `first` on.
    """
    begin, affected = first // p.spacing * p.spacing, unit_ops[0]
    for op in unit_ops:
        for i in range(t.read_start[op], t.read_start[op + 1]):
            maker = t.producer[t.reads[i]]
            if maker >= begin:
                affected = min(affected, maker)
    return int(affected)


@inlined
def least_square(p: Progress, first: int, last: int, affected: int, n: int) -> float:
    """Return a lower bound of the mean square that `estimate_from` returns, in s^2."""
    begin, end, last_mark = _bounds(p, first, last, n)
    index, squares = (affected - begin) // _checkpoint_spacing(p, begin, end), 0.0
    devices = p.device_tail_s.shape[1]
    for a in range(devices):
        squares += (p.checkpoint_device_free_s[index, a] + p.device_tail_s[last_mark, a]) ** 2
    return float(squares / devices)


@compiled
def estimate_from(  # noqa: PLR0917 - compiled: all by position
    t: CostTables,
    device_of: IntArray,
    p: Progress,
    first: int,
    last: int,
    affected: int,
    unchanged: int,
    limit_s: float,
) -> tuple[float, float, float]:
    """Return `estimate`; the latency may be infinite if it is certain to exceed `limit_s`.

    Devices must be those of `set_checkpoints` from operator `unchanged` on, and no operator before
    `affected` may be affected (`first_affected`). In a sequence of calls `affected` must not
    increase, and `estimate` must not be called in between: trials overwrite what was simulated
    from there on.
    """
    begin, end, last_mark = _bounds(p, first, last, device_of.shape[0])
    spacing = _checkpoint_spacing(p, begin, end)
    index = (affected - begin) // spacing
    trial = _Trial(
        begin,
        end,
        last_mark,
        p.checkpoint_device_free_s[index].copy(),
        p.checkpoint_link_free_s[index].copy(),
    )
    start, tail_s = begin + index * spacing, p.checkpoint_tail_s
    longest, sent_s = p.checkpoint_longest_s[index], p.checkpoint_sent_s[index]
    limit_s *= 1.0 + _ROUNDING
    longest, sent_s = _simulate(
        t, device_of, p, trial, start, end, longest, sent_s, unchanged, tail_s, limit_s
    )
    longest, square = _at_end(p, trial, longest)
    return longest, sent_s, square


@inlined
def _heads(t: CostTables, device_of: IntArray, p: Progress) -> tuple[float, int]:
    """Simulate as `fxpart.cost.kernels.schedule` and set marks; return latency and transfers."""
    start_s, finish_s, arrival_s, sent, sent_s = p.log
    devices = t.op_time_s.shape[1]
    device_free, link_free = np.zeros(devices), np.zeros((devices, devices))
    arrival_s[:] = -1.0
    latency, count = 0.0, 0
    for op in range(device_of.shape[0]):
        if op % p.spacing == 0:
            _mark(op // p.spacing, device_free, link_free, p.device_free_s, p.link_free_s)
        device = device_of[op]
        # No times of a trial: every producer is before the end.
        start = max(device_free[device], _ready_s(t, device_of, op, p, device_of.shape[0]))
        finish = start + t.op_time_s[op, device]
        start_s[op], finish_s[op], device_free[device] = start, finish, finish
        latency = max(latency, finish)
        for value in range(t.made_start[op], t.made_start[op + 1]):
            _send(t, device_of, value, finish, link_free, arrival_s)
            for target in range(devices):
                if arrival_s[value, target] >= 0.0:
                    carried = t.link_latency_s[device, target]
                    carried += t.value_bytes[value] * t.s_per_byte[device, target]
                    sent[count, 0], sent[count, 1], sent[count, 2] = value, device, target
                    sent_s[count, 0] = arrival_s[value, target] - carried
                    sent_s[count, 1] = arrival_s[value, target]
                    count += 1
    return latency, count


@compiled
def refresh(t: CostTables, device_of: IntArray, p: Progress) -> float:
    """Simulate all of `device_of`, fill `p`, and return the latency in seconds."""
    latency, count = _heads(t, device_of, p)
    start_s, _, _, sent, sent_s = p.log
    devices, tail_s = t.op_time_s.shape[1], p.tail_s
    device_tail, link_tail = np.zeros(devices), np.zeros((devices, devices))
    critical_from = latency * (1.0 - _ROUNDING)
    p.critical[:] = False
    k, issue_tail = count - 1, 0.0
    for op in range(device_of.shape[0] - 1, -1, -1):
        if (op + 1) % p.spacing == 0:
            _mark((op + 1) // p.spacing, device_tail, link_tail, p.device_tail_s, p.link_tail_s)
            p.issue_tail_s[(op + 1) // p.spacing] = issue_tail
        device = device_of[op]
        tail = device_tail[device]
        while k >= 0 and t.producer[sent[k, 0]] == op:
            value, target = sent[k, 0], sent[k, 2]
            after = link_tail[device, target]
            for j in range(t.reader_start[value], t.reader_start[value + 1]):
                if device_of[t.readers[j]] == target:
                    after = max(after, tail_s[t.readers[j]])
            after += sent_s[k, 1] - sent_s[k, 0]
            link_tail[device, target] = after
            tail = max(tail, after)
            if sent_s[k, 0] + after >= critical_from:
                p.critical[op] = True
                for j in range(t.reader_start[value], t.reader_start[value + 1]):
                    p.critical[t.readers[j]] |= device_of[t.readers[j]] == target
            k -= 1
        for value in range(t.made_start[op], t.made_start[op + 1]):
            for j in range(t.reader_start[value], t.reader_start[value + 1]):
                if device_of[t.readers[j]] == device:
                    tail = max(tail, tail_s[t.readers[j]])
        tail_s[op] = tail + t.op_time_s[op, device]
        device_tail[device] = tail_s[op]
        issue_tail = max(issue_tail, t.issue_s[op] + tail_s[op])
        p.critical[op] |= start_s[op] + tail_s[op] >= critical_from
    return latency

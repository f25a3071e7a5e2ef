"""Memory of a stretch of units as a pipeline stage, by one pass over its operators.

For one microbatch the accounting is that of `fxpart.cost.kernels.peak_on_device`; for several, that
of `fxpart.schedule.simulate_schedule`.
"""

from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.cost.kernels import RESIDENT
from fxpart.cost.tables import MemoryTables
from fxpart.support.compiled import compiled, inlined

__all__ = [
    "ONE",
    "Flight",
    "KnownBytes",
    "StretchBytes",
    "StretchScratch",
    "Stretches",
    "UnitTables",
    "known_needs",
    "needed_bytes",
    "no_bytes",
    "stretch_bytes",
    "stretch_needs",
    "stretch_scratch",
]


class UnitTables(NamedTuple):
    """The part of a `StageLine` used by compiled loops."""

    unit_of: IntArray
    first_op: IntArray
    last_op: IntArray
    phase_ops: IntArray
    """First and last operator of each unit in the forward, the backward and the updates; n and -1
    for none. Shape (U, 3, 2)."""
    first_backward: int
    first_update: int


class Flight(NamedTuple):
    """Microbatches of a stage in a step."""

    microbatches: int
    """Total number; their inputs and results are all live together."""
    in_flight: int
    """Most microbatches in flight, with their saved activations."""


ONE = Flight(1, 1)
"""A step with a single microbatch."""


class StretchBytes(NamedTuple):
    """Bytes of a stretch as one stage, for one microbatch.

    ``live`` fields are peaks, including results and gradients but not weights and inputs.
    """

    weights: int
    inputs: int
    outputs: int
    """Model results produced by the forward."""
    gradients: int
    """Model results produced by the backward."""
    saved: int
    """Produced or received in the forward, and read in the backward."""
    forward_live: int
    first_backward_live: int
    backward_live: int
    """For later microbatches, where accumulated gradients coexist with new ones."""
    update_live: int
    update_kept: int
    """Temporaries of updates that live until all updates of the device are done."""


class StretchScratch(NamedTuple):
    """Scratch arrays of `stretch_bytes`; entries with an old stamp count as empty."""

    root: IntArray
    """The value that owns the storage of each value. Length V."""
    root_stamp: IntArray
    last: IntArray
    """Last operator that needs the storage of a value. Length V."""
    used: IntArray
    """The same, ignoring longer lifetimes of results and reads by updates. Length V."""
    is_result: IntArray
    """1 for a storage that contains a result. Length V."""
    weight_stamp: IntArray
    """Length W."""
    kept: IntArray
    """Values that own a storage, in order of appearance. Length V."""
    change: IntArray
    """Change of the live bytes at each operator; 0 between stretches. Length n + 1."""
    shed: IntArray
    """Correction of `change` if gradients are accumulated into existing ones. Length n + 1."""
    has_change: IntArray
    """1 for each run of `_RUN` operators with a change; between stretches, runs without one may
    keep it."""
    stamp: IntArray
    """The current stamp. Length 1."""
    owners: IntArray
    """Number of values in `kept`. Length 1."""


_RUN = 64
"""Operators of a run, most of which have no change in a short stretch of a training step."""


def stretch_scratch(values: int, weights: int, operators: int) -> StretchScratch:
    """Return scratch arrays for a graph of the given size."""
    runs = operators // _RUN + 1
    sizes = (*[values] * 5, weights, values, operators + 1, operators + 1, runs, 1, 1)
    return StretchScratch(*(np.zeros(size, dtype=np.int64) for size in sizes))


@inlined
def _read(
    m: MemoryTables, scratch: StretchScratch, op: int, begin: int, is_update: bool
) -> tuple[int, int]:
    """Process the weights and reads of `op`; return the bytes of new weights, and of new inputs."""
    stamp, root, weights, inputs = scratch.stamp[0], scratch.root, 0, 0
    for i in range(m.use_start[op], m.use_start[op + 1]):
        if scratch.weight_stamp[m.uses[i]] != stamp:
            scratch.weight_stamp[m.uses[i]] = stamp
            weights += m.weight_bytes[m.uses[i]]
    for i in range(m.read_start[op], m.read_start[op + 1]):
        value = m.reads[i]
        if scratch.root_stamp[value] != stamp:
            scratch.root_stamp[value] = stamp
            if m.producer[value] < 0:
                root[value] = RESIDENT
                inputs += m.alloc_bytes[value]
            else:
                _own(scratch, value, op)
                _change(scratch, max(m.producer[value], begin), m.value_bytes[value])
        if root[value] >= 0:
            scratch.last[root[value]] = max(scratch.last[root[value]], op)
            if not is_update:
                scratch.used[root[value]] = max(scratch.used[root[value]], op)
    return weights, inputs


@compiled
def _change(scratch: StretchScratch, op: int, change_bytes: int) -> None:
    """Change the live bytes from `op` on."""
    scratch.change[op] += change_bytes
    scratch.has_change[op // _RUN] = 1


@compiled
def _own(scratch: StretchScratch, value: int, op: int) -> None:
    """Start a storage of `value` at `op`."""
    scratch.root[value], scratch.last[value] = value, op
    scratch.used[value], scratch.is_result[value] = op, 0
    scratch.kept[scratch.owners[0]] = value
    scratch.owners[0] += 1


@inlined
def _make(  # noqa: PLR0917 - compiled code takes no keywords
    m: MemoryTables,
    units: UnitTables,
    scratch: StretchScratch,
    op: int,
    low: int,
    high: int,
    end: int,
) -> None:
    """Process the results of `op`; results of the model live to `end`."""
    stamp, root = scratch.stamp[0], scratch.root
    for value in range(m.made_start[op], m.made_start[op + 1]):
        base = m.base[value]
        if base < 0:
            _own(scratch, value, op)
            _change(scratch, op, m.alloc_bytes[value])
        elif scratch.root_stamp[base] == stamp:
            root[value] = root[base]
        else:
            continue
        scratch.root_stamp[value] = stamp
        if root[value] >= 0:
            # Variables reference the original, not a received copy.
            maker = m.producer[root[value]]
            is_own = low <= units.unit_of[maker] < high
            held_until = max(op, min(m.held[value], end)) if is_own else op
            until = end if m.is_output[value] else held_until
            scratch.last[root[value]] = max(scratch.last[root[value]], until)
            scratch.used[root[value]] = max(scratch.used[root[value]], held_until)
            scratch.is_result[root[value]] |= m.is_output[value]


@inlined
def _end(
    m: MemoryTables, units: UnitTables, scratch: StretchScratch, low: int, high: int
) -> tuple[int, int, int, int]:
    """Free all storages; return the bytes of results, gradients, saved and kept by updates."""
    outputs, gradients, saved, update_bytes = 0, 0, 0, 0
    for k in range(scratch.owners[0]):
        value = scratch.kept[k]
        birth = m.producer[value]
        local = low <= units.unit_of[birth] < high
        size = m.alloc_bytes[value] if local else m.value_bytes[value]
        _change(scratch, scratch.last[value] + 1, -size)
        if birth < units.first_backward:
            if scratch.is_result[value]:
                outputs += size
            elif scratch.used[value] >= units.first_backward:
                saved += size
        elif birth < units.first_update and scratch.is_result[value]:
            gradients += size
            scratch.shed[scratch.used[value] + 1] -= size
            scratch.has_change[(scratch.used[value] + 1) // _RUN] = 1
        elif scratch.is_result[value]:
            update_bytes += size
    return outputs, gradients, saved, update_bytes


@compiled
def stretch_bytes(
    m: MemoryTables, units: UnitTables, scratch: StretchScratch, low: int, high: int
) -> StretchBytes:
    """Return the bytes of units `low` to `high` - 1 (not empty) as one stage.

    Received values count from the first operator of the stretch on. O(operators of the stretch,
    those between them in the same phase, their reads, and a 64th of all operators).
    """
    scratch.stamp[0] += 1
    scratch.owners[0] = 0
    begin, end = units.first_op[low], units.last_op[high]
    weights, inputs = 0, 0
    for phase in range(units.phase_ops.shape[1]):
        first_op, last_op = end + 1, begin - 1
        for unit in range(low, high):
            first_op = min(first_op, units.phase_ops[unit, phase, 0])
            last_op = max(last_op, units.phase_ops[unit, phase, 1])
        for op in range(first_op, last_op + 1):
            if low <= units.unit_of[op] < high:
                added = _read(m, scratch, op, begin, op >= units.first_update)
                weights, inputs = weights + added[0], inputs + added[1]
                _make(m, units, scratch, op, low, high, end)
    outputs, gradients, saved, update_kept = _end(m, units, scratch, low, high)
    peaks = _live_peaks(units, scratch, begin, end, gradients)
    return StretchBytes(weights, inputs, outputs, gradients, saved, *peaks, update_kept)


@compiled
def _live_peaks(
    units: UnitTables, scratch: StretchScratch, begin: int, end: int, gradients: int
) -> tuple[int, int, int, int]:
    """Return the ``live`` fields of `StretchBytes` from the changes, which are set to 0 again."""
    live, shed = 0, 0
    forward, first, later, update = 0, 0, 0, 0
    # Every operator of these runs is looked at, since the stretch or a phase may begin inside.
    scratch.has_change[begin // _RUN] = 1
    scratch.has_change[units.first_backward // _RUN] = 1
    scratch.has_change[units.first_update // _RUN] = 1
    for run in range(begin // _RUN, end // _RUN + 1):
        until = min((run + 1) * _RUN, end + 1) if scratch.has_change[run] else run * _RUN + 1
        scratch.has_change[run] = 0
        for op in range(max(run * _RUN, begin), until):
            live += scratch.change[op]
            shed += scratch.shed[op]
            scratch.change[op] = scratch.shed[op] = 0
            if op < units.first_backward:
                forward = max(forward, live)
            elif op < units.first_update:
                first = max(first, live)
                later = max(later, live + shed + gradients)
            else:
                update = max(update, live)
    # What lives to the end is freed after it.
    scratch.change[end + 1] = scratch.shed[end + 1] = 0
    scratch.has_change[(end + 1) // _RUN] = 0
    return forward, first, later, update


@inlined
def needed_bytes(b: StretchBytes, flight: Flight) -> int:
    """Return a tight upper bound of the memory that a stage needs over a step.

    The results of all microbatches are assumed to be live from the first one on.
    """
    saved_in_flight = (flight.in_flight - 1) * b.saved
    has_later_forwards = flight.microbatches > flight.in_flight
    live = b.forward_live + saved_in_flight + (b.gradients if has_later_forwards else 0)
    live = max(live, b.first_backward_live + saved_in_flight, b.update_live)
    if flight.microbatches > 1:
        # By the second backward, one microbatch less is in flight, or another forward has run.
        live = max(live, b.backward_live + saved_in_flight - (0 if has_later_forwards else b.saved))
    return b.weights + b.inputs + live + (flight.microbatches - 1) * (b.inputs + b.outputs)


@compiled
def stretch_needs(  # noqa: PLR0917 - compiled code takes no keywords
    m: MemoryTables, units: UnitTables, scratch: StretchScratch, low: int, high: int, flight: Flight
) -> int:
    """Return the memory needed for units `low` to `high` - 1; 0 for none."""
    if low == high:
        return 0
    return needed_bytes(stretch_bytes(m, units, scratch, low, high), flight)


# Cache of stretches, shared by searches over schedules, devices and cuts.


class KnownBytes(NamedTuple):
    """A hash table from stretches to their `StretchBytes`, by open addressing."""

    keys: IntArray
    """Key of the stretch in each slot, -1 if empty. The length is a power of two."""
    rows: IntArray
    """Its `StretchBytes`, field by field. Shape (slots, 10)."""
    entries: IntArray
    """Number of entries. Length 1."""
    first: int
    """The first repeated unit; stretches of repeated units are shifted to a canonical one."""
    period: int
    """Period of the repetition in units; 0 for none."""
    end: int
    """End of the repeated units."""


_FIRST_SLOTS, _MAX_SLOTS = 1 << 12, 1 << 16
"""At most 6 MB; further stretches are recomputed each time."""


def no_bytes(slots: int = _FIRST_SLOTS, repeated: tuple[int, int, int] = (0, 0, 0)) -> KnownBytes:
    """Return an empty table; `repeated` are the last three fields of `KnownBytes`."""
    fields = len(StretchBytes._fields)
    return KnownBytes(
        np.full(slots, -1, dtype=np.int64),
        np.empty((slots, fields), dtype=np.int64),
        np.zeros(1, dtype=np.int64),
        *repeated,
    )


@compiled
def _slot_of(keys: IntArray, key: int) -> int:
    """Return the slot of `key`, or the free slot for it."""
    mask: int = keys.shape[0] - 1
    slot: int = ((key ^ (key >> 17)) * 2654435761 >> 9) & mask
    while keys[slot] not in (-1, key):
        slot = (slot + 1) & mask
    return slot


@compiled
def _known_stretch(  # noqa: PLR0917 - compiled code takes no keywords
    m: MemoryTables,
    units: UnitTables,
    scratch: StretchScratch,
    known: KnownBytes,
    low: int,
    high: int,
) -> StretchBytes:
    """Return `stretch_bytes` through the cache."""
    if known.period > 0 and low >= known.first and high <= known.end:
        shift = (low - known.first) // known.period * known.period
        low, high = low - shift, high - shift
    key = low * (units.first_op.shape[0] + 1) + high
    slot = _slot_of(known.keys, key)
    if known.keys[slot] == key:
        r = known.rows[slot]
        return StretchBytes(r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8], r[9])
    b = stretch_bytes(m, units, scratch, low, high)
    if 4 * known.entries[0] < 3 * known.keys.shape[0]:
        known.keys[slot] = key
        known.entries[0] += 1
        r = known.rows[slot]
        r[0], r[1], r[2], r[3], r[4] = b.weights, b.inputs, b.outputs, b.gradients, b.saved
        r[5], r[6] = b.forward_live, b.first_backward_live
        r[7], r[8], r[9] = b.backward_live, b.update_live, b.update_kept
    return b


@inlined
def known_needs(  # noqa: PLR0917 - compiled code takes no keywords
    m: MemoryTables,
    units: UnitTables,
    scratch: StretchScratch,
    known: KnownBytes,
    low: int,
    high: int,
    flight: Flight,
) -> int:
    """Return `stretch_needs` through the cache, for a stretch that is not empty."""
    return needed_bytes(_known_stretch(m, units, scratch, known, low, high), flight)


@compiled
def _copy_entries(old: KnownBytes, new: KnownBytes) -> None:
    """Copy all entries of `old` to `new`, which is empty and large enough."""
    for slot in range(old.keys.shape[0]):
        if old.keys[slot] >= 0:
            new_slot = _slot_of(new.keys, old.keys[slot])
            new.keys[new_slot] = old.keys[slot]
            new.rows[new_slot] = old.rows[slot]
    new.entries[0] = old.entries[0]


@dataclass(eq=False, slots=True)
class Stretches:
    """Cached bytes of the stretches of one graph.

    `lock` protects the tables, which searches in several threads share.
    """

    memory: MemoryTables
    units: UnitTables
    scratch: StretchScratch
    known: KnownBytes
    lock: Lock = field(default_factory=Lock)

    @property
    def tables(self) -> tuple[MemoryTables, UnitTables, StretchScratch, KnownBytes]:
        """The arguments of compiled loops that read and extend the cache."""
        return self.memory, self.units, self.scratch, self.known

    def bytes_of(self, low: int, high: int) -> StretchBytes:
        """Return the bytes of units `low` to `high` - 1 (not empty) for one microbatch."""
        with self.lock:
            self.make_room()
            known = _known_stretch(*self.tables, low, high)
        return StretchBytes(*map(int, known))

    def make_room(self) -> None:
        """Enlarge the table if it is half full; call with the lock held."""
        places = len(self.known.keys)
        if 2 * int(self.known.entries[0]) > places and places < _MAX_SLOTS:
            larger = no_bytes(4 * places, self.known[3:])
            _copy_entries(self.known, larger)
            self.known = larger

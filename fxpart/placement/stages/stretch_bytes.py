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
    "StretchRoom",
    "Stretches",
    "UnitTables",
    "known_needs",
    "needed_bytes",
    "no_bytes",
    "stretch_bytes",
    "stretch_needs",
    "stretch_room",
]


class UnitTables(NamedTuple):
    """The part of a `StageLine` used by compiled loops."""

    unit_of: IntArray
    first_op: IntArray
    last_op: IntArray
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


class StretchRoom(NamedTuple):
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
    """Length n + 1."""
    shed: IntArray
    """Correction of `change` if gradients are accumulated into existing ones. Length n + 1."""
    stamp: IntArray
    """The current stamp. Length 1."""
    owners: IntArray
    """Number of values in `kept`. Length 1."""


def stretch_room(values: int, weights: int, operators: int) -> StretchRoom:
    """Return scratch arrays for a graph of the given size."""
    sizes = (*[values] * 5, weights, values, operators + 1, operators + 1, 1, 1)
    return StretchRoom(*(np.zeros(size, dtype=np.int64) for size in sizes))


@inlined
def _read(
    m: MemoryTables, room: StretchRoom, op: int, begin: int, is_update: bool
) -> tuple[int, int]:
    """Process the weights and reads of `op`; return the bytes of new weights, and of new inputs."""
    stamp, root, weights, inputs = room.stamp[0], room.root, 0, 0
    for i in range(m.use_start[op], m.use_start[op + 1]):
        if room.weight_stamp[m.uses[i]] != stamp:
            room.weight_stamp[m.uses[i]] = stamp
            weights += m.weight_bytes[m.uses[i]]
    for i in range(m.read_start[op], m.read_start[op + 1]):
        value = m.reads[i]
        if room.root_stamp[value] != stamp:
            room.root_stamp[value] = stamp
            if m.producer[value] < 0:
                root[value] = RESIDENT
                inputs += m.alloc_bytes[value]
            else:
                _own(room, value, op)
                room.change[max(m.producer[value], begin)] += m.value_bytes[value]
        if root[value] >= 0:
            room.last[root[value]] = max(room.last[root[value]], op)
            if not is_update:
                room.used[root[value]] = max(room.used[root[value]], op)
    return weights, inputs


@compiled
def _own(room: StretchRoom, value: int, op: int) -> None:
    """Start a storage of `value` at `op`."""
    room.root[value], room.last[value] = value, op
    room.used[value], room.is_result[value] = op, 0
    room.kept[room.owners[0]] = value
    room.owners[0] += 1


@inlined
def _make(  # noqa: PLR0917 - compiled code takes no keywords
    m: MemoryTables, units: UnitTables, room: StretchRoom, op: int, low: int, high: int, end: int
) -> None:
    """Process the results of `op`; results of the model live to `end`."""
    stamp, root = room.stamp[0], room.root
    for value in range(m.made_start[op], m.made_start[op + 1]):
        base = m.base[value]
        if base < 0:
            _own(room, value, op)
            room.change[op] += m.alloc_bytes[value]
        elif room.root_stamp[base] == stamp:
            root[value] = root[base]
        else:
            continue
        room.root_stamp[value] = stamp
        if root[value] >= 0:
            # Variables reference the original, not a received copy.
            maker = m.producer[root[value]]
            is_own = low <= units.unit_of[maker] < high
            held_until = max(op, min(m.held[value], end)) if is_own else op
            until = end if m.is_output[value] else held_until
            room.last[root[value]] = max(room.last[root[value]], until)
            room.used[root[value]] = max(room.used[root[value]], held_until)
            room.is_result[root[value]] |= m.is_output[value]


@inlined
def _end(
    m: MemoryTables, units: UnitTables, room: StretchRoom, low: int, high: int
) -> tuple[int, int, int, int]:
    """Free all storages; return the bytes of results, gradients, saved and kept by updates."""
    outputs, gradients, saved, update_bytes = 0, 0, 0, 0
    for k in range(room.owners[0]):
        value = room.kept[k]
        birth = m.producer[value]
        local = low <= units.unit_of[birth] < high
        size = m.alloc_bytes[value] if local else m.value_bytes[value]
        room.change[room.last[value] + 1] -= size
        if birth < units.first_backward:
            if room.is_result[value]:
                outputs += size
            elif room.used[value] >= units.first_backward:
                saved += size
        elif birth < units.first_update and room.is_result[value]:
            gradients += size
            room.shed[room.used[value] + 1] -= size
        elif room.is_result[value]:
            update_bytes += size
    return outputs, gradients, saved, update_bytes


@compiled
def stretch_bytes(
    m: MemoryTables, units: UnitTables, room: StretchRoom, low: int, high: int
) -> StretchBytes:
    """Return the bytes of units `low` to `high` - 1 (not empty) as one stage.

    Received values count from the first operator of the stretch on. O(operators between its first
    and last, and their reads).
    """
    room.stamp[0] += 1
    room.owners[0] = 0
    begin, end = units.first_op[low], units.last_op[high]
    room.change[begin : end + 2] = 0
    room.shed[begin : end + 2] = 0
    weights, inputs = 0, 0
    for op in range(begin, end + 1):
        if low <= units.unit_of[op] < high:
            more = _read(m, room, op, begin, op >= units.first_update)
            weights, inputs = weights + more[0], inputs + more[1]
            _make(m, units, room, op, low, high, end)
    outputs, gradients, saved, update_kept = _end(m, units, room, low, high)
    live, shed = 0, 0
    forward, first, again, update = 0, 0, 0, 0
    for op in range(begin, end + 1):
        live += room.change[op]
        shed += room.shed[op]
        if op < units.first_backward:
            forward = max(forward, live)
        elif op < units.first_update:
            first = max(first, live)
            again = max(again, live + shed + gradients)
        else:
            update = max(update, live)
    return StretchBytes(
        weights, inputs, outputs, gradients, saved, forward, first, again, update, update_kept
    )


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
    m: MemoryTables, units: UnitTables, room: StretchRoom, low: int, high: int, flight: Flight
) -> int:
    """Return the memory needed for units `low` to `high` - 1; 0 for none."""
    if low == high:
        return 0
    return needed_bytes(stretch_bytes(m, units, room, low, high), flight)


# Cache of stretches, shared by searches over schedules, devices and cuts.


class KnownBytes(NamedTuple):
    """A hash table from stretches to their `StretchBytes`, by open addressing."""

    keys: IntArray
    """Key of the stretch in each slot, -1 if empty. The length is a power of two."""
    rows: IntArray
    """Its `StretchBytes`, field by field. Shape (places, 10)."""
    entries: IntArray
    """Number of entries. Length 1."""
    first: int
    """The first repeated unit; stretches of repeated units are shifted to a canonical one."""
    period: int
    """Period of the repetition in units; 0 for none."""
    end: int
    """End of the repeated units."""


_FIRST_PLACES, _MOST_PLACES = 1 << 12, 1 << 16
"""At most 6 MB; further stretches are recomputed each time."""


def no_bytes(places: int = _FIRST_PLACES, repeated: tuple[int, int, int] = (0, 0, 0)) -> KnownBytes:
    """Return an empty table; `repeated` are the last three fields of `KnownBytes`."""
    fields = len(StretchBytes._fields)
    return KnownBytes(
        np.full(places, -1, dtype=np.int64),
        np.empty((places, fields), dtype=np.int64),
        np.zeros(1, dtype=np.int64),
        *repeated,
    )


@compiled
def _place_of(keys: IntArray, key: int) -> int:
    """Return the slot of `key`, or the free slot for it."""
    mask: int = keys.shape[0] - 1
    place: int = ((key ^ (key >> 17)) * 2654435761 >> 9) & mask
    while keys[place] not in (-1, key):
        place = (place + 1) & mask
    return place


@compiled
def _known_stretch(  # noqa: PLR0917 - compiled code takes no keywords
    m: MemoryTables, units: UnitTables, room: StretchRoom, known: KnownBytes, low: int, high: int
) -> StretchBytes:
    """Return `stretch_bytes` through the cache."""
    if known.period > 0 and low >= known.first and high <= known.end:
        shift = (low - known.first) // known.period * known.period
        low, high = low - shift, high - shift
    key = low * (units.first_op.shape[0] + 1) + high
    place = _place_of(known.keys, key)
    if known.keys[place] == key:
        r = known.rows[place]
        return StretchBytes(r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8], r[9])
    b = stretch_bytes(m, units, room, low, high)
    if 4 * known.entries[0] < 3 * known.keys.shape[0]:
        known.keys[place] = key
        known.entries[0] += 1
        r = known.rows[place]
        r[0], r[1], r[2], r[3], r[4] = b.weights, b.inputs, b.outputs, b.gradients, b.saved
        r[5], r[6] = b.forward_live, b.first_backward_live
        r[7], r[8], r[9] = b.backward_live, b.update_live, b.update_kept
    return b


@inlined
def known_needs(  # noqa: PLR0917 - compiled code takes no keywords
    m: MemoryTables,
    units: UnitTables,
    room: StretchRoom,
    known: KnownBytes,
    low: int,
    high: int,
    flight: Flight,
) -> int:
    """Return `stretch_needs` through the cache, for a stretch that is not empty."""
    return needed_bytes(_known_stretch(m, units, room, known, low, high), flight)


@compiled
def _moved(old: KnownBytes, new: KnownBytes) -> None:
    """Copy all entries of `old` to `new`, which is empty and large enough."""
    for place in range(old.keys.shape[0]):
        if old.keys[place] >= 0:
            there = _place_of(new.keys, old.keys[place])
            new.keys[there] = old.keys[place]
            new.rows[there] = old.rows[place]
    new.entries[0] = old.entries[0]


@dataclass(eq=False, slots=True)
class Stretches:
    """Cached bytes of the stretches of one graph.

    `lock` protects the tables, which searches in several threads share.
    """

    memory: MemoryTables
    units: UnitTables
    room: StretchRoom
    known: KnownBytes
    lock: Lock = field(default_factory=Lock)

    def bytes_of(self, low: int, high: int) -> StretchBytes:
        """Return the bytes of units `low` to `high` - 1 (not empty) for one microbatch."""
        with self.lock:
            self.make_room()
            known = _known_stretch(self.memory, self.units, self.room, self.known, low, high)
        return StretchBytes(*map(int, known))

    def make_room(self) -> None:
        """Enlarge the table if it is half full; call with the lock held."""
        places = len(self.known.keys)
        if 2 * int(self.known.entries[0]) > places and places < _MOST_PLACES:
            larger = no_bytes(4 * places, self.known[3:])
            _moved(self.known, larger)
            self.known = larger

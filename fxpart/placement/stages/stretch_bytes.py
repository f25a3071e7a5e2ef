"""What one stretch of units of a model holds as a pipeline stage, by one walk over its operators.

For one micro-batch the accounting is that of `fxpart.cost.kernels.peak_on_device`; for several,
that of `fxpart.schedule.simulate_schedule`.
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
    """The part of a `StageLine` that compiled loops read."""

    unit_of: IntArray
    first_op: IntArray
    last_op: IntArray
    first_backward: int
    first_update: int


class Flight(NamedTuple):
    """How many micro-batches a stage has in a step."""

    microbatches: int
    """All of them: their inputs and results are there together."""
    in_flight: int
    """The most that wait for their backward at once, with what they saved."""


ONE = Flight(1, 1)
"""A step that is not divided into micro-batches."""


class StretchBytes(NamedTuple):
    """Bytes of a stretch as one stage, of one micro-batch.

    ``live`` is the most alive at once, results and gradients counted, weights and inputs not.
    """

    weights: int
    inputs: int
    outputs: int
    """Of the model's results that the forward makes."""
    gradients: int
    """Of the model's results that the backward makes."""
    saved: int
    """Made or received in the forward, and read in the backward."""
    forward_live: int
    first_backward_live: int
    backward_live: int
    """For a micro-batch that is not the first: gradients are there, and are made once more."""
    update_live: int
    update_kept: int
    """Of what updates make and keep: there until all of the device are done."""


class StretchRoom(NamedTuple):
    """Scratch arrays of `stretch_bytes`; an entry with an old stamp counts as empty."""

    root: IntArray
    """The value whose storage a value is in. Length V."""
    root_stamp: IntArray
    last: IntArray
    """Last operator that needs the storage of a value. Length V."""
    used: IntArray
    """The same, where results are not taken to live longer, and updates not to read. Length V."""
    is_result: IntArray
    """1 for a storage in which a result lies. Length V."""
    weight_stamp: IntArray
    """Length W."""
    kept: IntArray
    """Values that own a storage, in order of appearance. Length V."""
    change: IntArray
    """Length n + 1."""
    shed: IntArray
    """What `change` is more or less by, where gradients are added to what there is. Length n + 1.
    """
    stamp: IntArray
    """The stamp of now, of length 1."""
    owners: IntArray
    """How many values there are in `kept`, of length 1."""


def stretch_room(values: int, weights: int, operators: int) -> StretchRoom:
    """Return room for a graph of so many values, weights and operators."""
    sizes = (*[values] * 5, weights, values, operators + 1, operators + 1, 1, 1)
    return StretchRoom(*(np.zeros(size, dtype=np.int64) for size in sizes))


@inlined
def _read(
    m: MemoryTables, room: StretchRoom, op: int, begin: int, is_update: bool
) -> tuple[int, int]:
    """Let `op` use its weights and read its values; return the bytes of new weights, and inputs."""
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
    """Let `value` have a storage of its own from `op` on."""
    room.root[value], room.last[value] = value, op
    room.used[value], room.is_result[value] = op, 0
    room.kept[room.owners[0]] = value
    room.owners[0] += 1


@inlined
def _make(  # noqa: PLR0917 - compiled code takes no keywords
    m: MemoryTables, units: UnitTables, room: StretchRoom, op: int, low: int, high: int, end: int
) -> None:
    """Let `op` make its values; results of the model live to `end`."""
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
            # Variables hold what was made, not the copy that was received.
            maker = m.producer[root[value]]
            is_own = low <= units.unit_of[maker] < high
            held = max(op, min(m.held[value], end)) if is_own else op
            until = end if m.is_output[value] else held
            room.last[root[value]] = max(room.last[root[value]], until)
            room.used[root[value]] = max(room.used[root[value]], held)
            room.is_result[root[value]] |= m.is_output[value]


@inlined
def _end(
    m: MemoryTables, units: UnitTables, room: StretchRoom, low: int, high: int
) -> tuple[int, int, int, int]:
    """Let storages end; return the bytes of results, gradients, saved and kept by updates."""
    outputs, gradients, saved, kept = 0, 0, 0, 0
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
            kept += size
    return outputs, gradients, saved, kept


@compiled
def stretch_bytes(
    m: MemoryTables, units: UnitTables, room: StretchRoom, low: int, high: int
) -> StretchBytes:
    """Return what units `low` to `high` - 1 hold as one stage; there must be some.

    What is received is there from the first operator on: before that, less of it is. O(operators
    between its first and its last, and their reads).
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
    outputs, gradients, saved, kept = _end(m, units, room, low, high)
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
        weights, inputs, outputs, gradients, saved, forward, first, again, update, kept
    )


@inlined
def needed_bytes(b: StretchBytes, flight: Flight) -> int:
    """Return what a device needs for a stage, at any time of a step, or hardly more.

    The results of all micro-batches are taken to be there from the first one on.
    """
    waiting = (flight.in_flight - 1) * b.saved
    goes_on = flight.microbatches > flight.in_flight
    live = b.forward_live + waiting + (b.gradients if goes_on else 0)
    live = max(live, b.first_backward_live + waiting, b.update_live)
    if flight.microbatches > 1:
        # By the second backward, one micro-batch less waits, or a forward has come between.
        live = max(live, b.backward_live + waiting - (0 if goes_on else b.saved))
    return b.weights + b.inputs + live + (flight.microbatches - 1) * (b.inputs + b.outputs)


@compiled
def stretch_needs(  # noqa: PLR0917 - compiled code takes no keywords
    m: MemoryTables, units: UnitTables, room: StretchRoom, low: int, high: int, flight: Flight
) -> int:
    """Return what a device needs for units `low` to `high` - 1; 0 for none."""
    if low == high:
        return 0
    return needed_bytes(stretch_bytes(m, units, room, low, high), flight)


# Stretches that were walked once: searches of several schedules, devices and cuts ask for the same.


class KnownBytes(NamedTuple):
    """A hash table from stretches to their `StretchBytes`, by open addressing."""

    keys: IntArray
    """Of the stretch in each place, -1 where there is none. Its length is a power of two."""
    rows: IntArray
    """Its bytes, in the order of the fields. Shape (places, 10)."""
    entries: IntArray
    """How many there are, of length 1."""
    first: int
    """The first of units that repeat; a stretch of them stands for all that are shifted."""
    period: int
    """After how many they do; 0 where none do."""
    end: int
    """The one behind them."""


_FIRST_PLACES, _MOST_PLACES = 1 << 12, 1 << 16
"""6 MB at most; what does not fit in is walked each time."""


def no_bytes(places: int = _FIRST_PLACES, repeated: tuple[int, int, int] = (0, 0, 0)) -> KnownBytes:
    """Return a table without entries; units `repeated` are as `KnownBytes` has them."""
    fields = len(StretchBytes._fields)
    return KnownBytes(
        np.full(places, -1, dtype=np.int64),
        np.empty((places, fields), dtype=np.int64),
        np.zeros(1, dtype=np.int64),
        *repeated,
    )


@compiled
def _place_of(keys: IntArray, key: int) -> int:
    """Return where `key` is, or the free place where it would be."""
    mask: int = keys.shape[0] - 1
    place: int = ((key ^ (key >> 17)) * 2654435761 >> 9) & mask
    while keys[place] not in (-1, key):
        place = (place + 1) & mask
    return place


@compiled
def _known_stretch(  # noqa: PLR0917 - compiled code takes no keywords
    m: MemoryTables, units: UnitTables, room: StretchRoom, known: KnownBytes, low: int, high: int
) -> StretchBytes:
    """Return what `stretch_bytes` does, which is asked only for what is not known."""
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
    """Return what `stretch_needs` does, from what is known where it is; of some units."""
    return needed_bytes(_known_stretch(m, units, room, known, low, high), flight)


@compiled
def _moved(old: KnownBytes, new: KnownBytes) -> None:
    """Put all that is in `old` into `new`, which is empty and has room for it."""
    for place in range(old.keys.shape[0]):
        if old.keys[place] >= 0:
            there = _place_of(new.keys, old.keys[place])
            new.keys[there] = old.keys[place]
            new.rows[there] = old.rows[place]
    new.entries[0] = old.entries[0]


@dataclass(eq=False, slots=True)
class Stretches:
    """What stretches of the units of one graph hold, each found once.

    `lock` is for the tables, which searches in several threads share.
    """

    memory: MemoryTables
    units: UnitTables
    room: StretchRoom
    known: KnownBytes
    lock: Lock = field(default_factory=Lock)

    def bytes_of(self, low: int, high: int) -> StretchBytes:
        """Return what units `low` to `high` - 1, which must be some, hold of one micro-batch."""
        with self.lock:
            self.make_room()
            known = _known_stretch(self.memory, self.units, self.room, self.known, low, high)
        return StretchBytes(*map(int, known))

    def make_room(self) -> None:
        """Make the table larger where it is half full; to be called under the lock."""
        places = len(self.known.keys)
        if 2 * int(self.known.entries[0]) > places and places < _MOST_PLACES:
            larger = no_bytes(4 * places, self.known[3:])
            _moved(self.known, larger)
            self.known = larger

"""The peaks of a stretch by phase, from the few runs of operators in which its bytes change."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.core.graph import IntArray
from fxpart.placement.stages.stretch_bytes import (
    _RUN,
    UnitTables,
    _live_peaks,
    stretch_scratch,
)

_SIZES = st.integers(-99, 99)


def _by_operator(
    change: IntArray, shed: IntArray, phases: tuple[int, int], gradients: int
) -> tuple[int, ...]:
    """Return the peaks of forward, first backward, later backwards and updates."""
    live, less = np.cumsum(change), np.cumsum(shed)
    forward, backward, update = (np.split(values, phases) for values in (live, less, live))
    peaks = (forward[0], forward[1], forward[1] + backward[1] + gradients, update[2])
    return tuple(max(0, int(peak.max(initial=0))) for peak in peaks)


def _tables(phases: tuple[int, int]) -> UnitTables:
    none = np.empty(0, dtype=np.int64)
    return UnitTables(none, none, none, none.reshape(0, 3, 2), *phases)


def test_gradients_count_in_a_stretch_of_the_backward_that_changes_nothing() -> None:
    units, scratch = _tables((0, 3 * _RUN)), stretch_scratch(1, 1, 3 * _RUN)
    assert _live_peaks(units, scratch, _RUN + 1, _RUN + 2, 79) == (0, 0, 79, 0)


@settings(max_examples=500)
@given(st.integers(1, 3 * _RUN), st.integers(0, 99), st.data())
def test_they_are_those_of_a_pass_over_all_operators(
    count: int, gradients: int, data: st.DataObject
) -> None:
    # Often without a backward or updates.
    phase = st.integers(0, count) | st.just(count)
    first, second = sorted(data.draw(st.tuples(phase, phase)))
    begin = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(begin, count - 1))
    scratch = stretch_scratch(1, 1, count)
    # What lives to the end is freed after it.
    at = st.lists(st.tuples(st.integers(begin, end + 1), _SIZES), max_size=3)
    for changes in (scratch.change, scratch.shed):
        for op, size in data.draw(at):
            changes[op] += size
            scratch.has_change[op // _RUN] = 1
    within = slice(begin, end + 1)
    phases = (max(first - begin, 0), max(second - begin, 0))
    expected = _by_operator(scratch.change[within], scratch.shed[within], phases, gradients)
    found = _live_peaks(_tables((first, second)), scratch, begin, end, gradients)
    assert found == expected
    assert not scratch.change.any()
    assert not scratch.shed.any()

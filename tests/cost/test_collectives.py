"""Collectives: known answers by hand, and the shape of curves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.core.topology import Link
from fxpart.cost.collectives import COLLECTIVES, CollectiveCurve, collective_time_s, wire_bytes
from fxpart.errors import SpecError

LINK = Link(100.0, 0.5)
CURVE = CollectiveCurve(launch_s=3.0, hop_s=1.0, ramp_s=4.0, share=0.5)


def test_a_ring_takes_one_step_per_other_rank_and_an_all_reduce_two() -> None:
    # Four ranks, parts of 100 bytes: 1 s and a latency per step.
    assert collective_time_s("all_gather", 400, 4, LINK) == pytest.approx(3 * 1.5)
    assert collective_time_s("all_reduce", 400, 4, LINK) == pytest.approx(6 * 1.5)
    assert collective_time_s("all_to_all", 400, 4, LINK) == pytest.approx(3 * 1.5)
    assert collective_time_s("all_reduce", 400, 1, LINK) == 0.0


def test_a_curve_has_its_launch_hops_rate_and_root() -> None:
    # 300 bytes on the wire at half of 100 bytes/s: 6 s, and the root of 4 x 6.
    assert wire_bytes("reduce_scatter", 400, 4) == 300
    seconds = collective_time_s("reduce_scatter", 400, 4, LINK, {"reduce_scatter": CURVE})
    assert seconds == pytest.approx(3 + 3 * 1 + 6 + 24**0.5)
    # Other kinds than that of the curve use the ring.
    assert collective_time_s("all_gather", 400, 4, LINK, {"all_reduce": CURVE}) == 4.5


@given(
    st.sampled_from(sorted(COLLECTIVES)), st.integers(0, 2**40), st.integers(2, 64), st.booleans()
)
def test_more_bytes_and_more_ranks_take_no_less(
    kind: str, size: int, ranks: int, fitted: bool
) -> None:
    curves = {kind: CURVE} if fitted else None
    seconds = collective_time_s(kind, size, ranks, LINK, curves)
    assert seconds <= collective_time_s(kind, 2 * size, ranks, LINK, curves)
    assert seconds <= collective_time_s(kind, size, ranks + 1, LINK, curves) * (1 + 1e-12)


def test_an_unknown_collective_is_refused() -> None:
    with pytest.raises(SpecError, match=r"no collective all_reduc; .*all_reduce"):
        collective_time_s("all_reduc", 1, 2, LINK)
    with pytest.raises(SpecError, match="over 0 ranks"):
        collective_time_s("all_reduce", 1, 0, LINK)
    with pytest.raises(SpecError, match="share must be in"):
        CollectiveCurve(0, 0, 0, 1.5)

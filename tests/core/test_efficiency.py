"""Shares of the peaks that a device states."""

import pytest

from fxpart.core.efficiency import Efficiency, efficiency_from
from fxpart.errors import SpecError


def test_shares_are_read_by_kind_and_dtype() -> None:
    stated = efficiency_from({"gemm": {"bfloat16": 0.7, "memory": 1}, "other": {"memory": 0.9}})
    assert stated == Efficiency(gemm={"bfloat16": 0.7, "memory": 1}, other={"memory": 0.9})
    assert efficiency_from({}) == Efficiency()


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"gem": {"float32": 0.5}}, "efficiency.gem does not exist; nearest: gemm"),
        ({1: 0.5}, "efficiency.1 does not exist"),
        ({"gemm": 0.5}, "efficiency.gemm must have a share for each dtype, or for memory"),
        ({"gemm": {}}, "efficiency.gemm must have a share for each dtype, or for memory"),
        (
            {"attention": None},
            "efficiency.attention must have a share for each dtype, or for memory",
        ),
        ({"gemm": {"float32": 1.5}}, "efficiency.gemm.float32 must be a share of the peak"),
        ({"convolution": {"float32": 0}}, "in (1e-06, 1], got 0"),
        ({"gemm": {"float32": "fast"}}, "in (1e-06, 1], got 'fast'"),
        ({"gemm": {"float32": True}}, "in (1e-06, 1], got True"),
        ({"gemm": {"float32": float("nan")}}, "in (1e-06, 1], got nan"),
        ({"other": {"float32": 0.5}}, "which have a share of memory alone, got float32"),
        ({"gemm": {"memory": -1}}, "efficiency.gemm.memory must be a share of the peak, a number"),
        ({"memory": 0.5}, "efficiency.memory does not exist"),
    ],
)
def test_wrong_shares_are_refused(stated: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        efficiency_from(stated)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)

"""The roofline: known answers by hand, for shares by device, kind of operator and dtype."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.truth.kernel_tables import FAMILIES
from fxpart.core.efficiency import Efficiency
from fxpart.core.graph import OpGraph
from fxpart.core.topology import DeviceSpec, Link, Topology, uniform_topology
from fxpart.cost.curves.model import KernelModel
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import SpecError
from tests.sketch import Sketch

OWN = LatencyModel(compute_efficiency=None, bandwidth_efficiency=None)
PLAIN = DeviceSpec(
    "plain",
    10**9,
    {"float32": 10.0, "tfloat32": 40.0, "bfloat16": 100.0},
    memory_bandwidth_bytes_per_s=8.0,
)
STATED = replace(
    PLAIN,
    name="stated",
    efficiency=Efficiency(
        gemm={"bfloat16": 0.5, "float32": 0.9, "memory": 0.25},
        attention={"bfloat16": 0.2},
        convolution={"tfloat32": 0.25},
        other={"memory": 0.5},
    ),
)
_OPS = (
    # target, dtype, FLOPs, bytes
    ("aten.mm.default", "bfloat16", 1000, 0),
    ("aten.scaled_dot_product_attention.default", "bfloat16", 1000, 0),
    ("aten.scaled_dot_product_attention.default", "bfloat16", 1000, 0),  # causal
    ("aten.convolution.default", "float32", 1000, 0),
    ("aten.convolution.default", "bfloat16", 1000, 0),
    ("aten.linear.default", "float16", 1000, 0),  # at the rate of float32
    ("aten.add.Tensor", "bfloat16", 0, 40),
    ("aten.view.default", "bfloat16", 0, 0),
    ("aten.mm.default", "bfloat16", 1, 40),
    ("aten.scaled_dot_product_attention.default", "bfloat16", 1, 40),
)
_CAUSAL = 2


def _graph() -> OpGraph:
    sketch = Sketch()
    value = sketch.input(1)
    for _ in _OPS:
        value = sketch.op([value], 1)
    targets, dtypes, flops, moved_bytes = zip(*_OPS, strict=True)
    return replace(
        sketch.graph(value),
        targets=targets,
        dtypes=dtypes,
        flops=np.array(flops),
        moved_bytes=np.array(moved_bytes),
        attention=np.array([[1, 64, 0], [_CAUSAL, 64, 1]]),
    )


def _topology(*devices: DeviceSpec) -> Topology:
    return uniform_topology(devices, Link(1.0))


def test_shares_are_those_of_the_device_kind_and_dtype() -> None:
    times = OWN.op_time_s(_graph(), _topology(STATED))[:, 0]
    expected = [
        1000 / (100 * 0.5),
        1000 / (100 * 0.2),
        1000 / (100 * 0.2) / 2,  # half of the scores are masked
        1000 / (40 * 0.25),
        1000 / (100 * 0.7),  # not stated for this dtype
        1000 / (10 * 0.9),
        40 / (8 * 0.5),
        0,
        40 / (8 * 0.25),
        40 / (8 * 0.8),  # not stated for attention
    ]
    assert times.tolist() == pytest.approx(expected)


def test_a_device_that_states_nothing_has_the_usual_shares() -> None:
    usual = LatencyModel(compute_efficiency=0.7, bandwidth_efficiency=0.8)
    assert OWN.of_any_device() == usual
    both = _topology(PLAIN, STATED)
    times = OWN.op_time_s(_graph(), both)
    assert times[:, 0].tolist() == usual.op_time_s(_graph(), both)[:, 0].tolist()


def test_a_given_number_is_the_share_of_all_devices() -> None:
    both = _topology(PLAIN, STATED)
    given_numbers = LatencyModel(compute_efficiency=0.6, bandwidth_efficiency=0.9)
    times = given_numbers.op_time_s(_graph(), both)
    assert times[:, 1].tolist() == times[:, 0].tolist()
    assert times[_CAUSAL, 0] == times[_CAUSAL - 1, 0]  # as counted, whatever the mask
    # Each of the two is given by itself.
    compute_alone = LatencyModel(compute_efficiency=0.6, bandwidth_efficiency=None)
    assert compute_alone.op_time_s(_graph(), both)[6].tolist() == [40 / (8 * 0.8), 40 / (8 * 0.5)]


def test_a_power_limit_holds_beside_a_stated_share() -> None:
    limited = replace(STATED, sustained_flops_per_s={"bfloat16": 30.0})
    times = OWN.op_time_s(_graph(), _topology(limited))[:, 0]
    # The product and the convolution are limited, attention reaches less.
    assert times[[0, 1, 4]].tolist() == pytest.approx([1000 / 30, 1000 / 20, 1000 / 30])


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from([field.name for field in fields(Efficiency)]),
    share=st.floats(1e-6, 1.0),
    less=st.floats(0.01, 1.0),
)
def test_a_larger_share_is_never_slower(kind: str, share: float, less: float) -> None:
    def times(of_peak: float) -> list[float]:
        rates = ("memory",) if kind == "other" else ("float32", "tfloat32", "bfloat16", "memory")
        stated = Efficiency(**{kind: dict.fromkeys(rates, of_peak)})
        device = replace(PLAIN, efficiency=stated)
        return list(OWN.op_time_s(_graph(), _topology(device))[:, 0])

    slower = max(1e-6, share * less)
    assert all(fast <= slow for fast, slow in zip(times(share), times(slower), strict=True))


def test_operators_without_a_curve_reach_the_usual_shares_beside_curves() -> None:
    model = KernelModel(FAMILIES, OWN, carries=False)
    curved = replace(STATED, curves="a100", own_curves=True)
    times = model.op_time_s(_graph(), _topology(curved, STATED, PLAIN))
    moves = 6
    assert times[moves].tolist() == pytest.approx([40 / (8 * 0.8), 40 / (8 * 0.5), 40 / (8 * 0.8)])
    assert model.roofline_on(curved) == OWN.of_any_device()
    assert model.roofline_on(STATED) == OWN
    # Curves do not depend on the shares.
    unstated = replace(curved, efficiency=Efficiency())
    again = model.op_time_s(_graph(), _topology(unstated))
    assert again[:, 0].tolist() == times[:, 0].tolist()


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(SpecError, match=r"latency\.compute_efficiency must be in \(1e-06, 1\]"):
        LatencyModel(compute_efficiency=share)

"""Devices and the links between them."""

from dataclasses import replace

import numpy as np
import pytest

from fxpart.core.efficiency import Efficiency
from fxpart.core.topology import DeviceSpec, Link, uniform_topology, with_pair_links
from fxpart.errors import SpecError


def device(
    name: str = "d",
    memory_bytes: int = 100,
    flops_per_s: dict[str, float] | None = None,
    bandwidth: float = 10.0,
    node: int = 0,
) -> DeviceSpec:
    rates = {"float32": 5.0, "bfloat16": 20.0} if flops_per_s is None else flops_per_s
    return DeviceSpec(name, memory_bytes, rates, bandwidth, node)


def test_a_device_has_a_rate_for_each_dtype() -> None:
    assert device().rate_for("bfloat16") == 20.0


def test_an_unlisted_dtype_runs_at_the_float32_rate() -> None:
    assert device().rate_for("float16") == 5.0


def test_a_power_limit_reduces_only_the_reached_rate() -> None:
    limited = replace(device(), sustained_flops_per_s={"bfloat16": 8.0})
    assert limited.rate_for("bfloat16") == 20.0
    assert [limited.reached_rate_for("bfloat16", share) for share in (0.3, 0.7)] == [6.0, 8.0]
    assert limited.reached_rate_for("bfloat16", 0.7, kernel_share=0.8) == 10.0
    assert limited.reached_rate_for("float16", 1.0) == 5.0  # like float32, which is not limited
    with pytest.raises(SpecError, match=r"sustained_flops_per_s\.bfloat16 must be"):
        replace(device(), sustained_flops_per_s={"bfloat16": 0.0})


def test_a_share_is_stated_for_the_rate_at_which_a_dtype_runs() -> None:
    stated = replace(
        device(), efficiency=Efficiency(gemm={"float32": 0.9}, attention={"memory": 0.8})
    )
    shares = [stated.stated_share("gemm", dtype) for dtype in ("float32", "float16", "bfloat16")]
    assert shares == [0.9, 0.9, None]
    assert stated.stated_share("attention", "float32") is None
    assert stated.stated_share("attention", "memory") == 0.8
    with pytest.raises(SpecError, match=r"gemm\.flaot32 is the share of a rate that .* float32"):
        replace(device(), efficiency=Efficiency(gemm={"flaot32": 0.9}))


def test_an_unlisted_dtype_without_a_float32_rate_is_refused() -> None:
    only_half = device(flops_per_s={"bfloat16": 20.0})
    with pytest.raises(SpecError, match=r"no FLOP/s for float16 or float32; nearest: bfloat16"):
        only_half.rate_for("float16")


@pytest.mark.parametrize("memory_bytes", [0, -1])
def test_a_device_without_memory_is_refused(memory_bytes: int) -> None:
    with pytest.raises(SpecError, match=f"memory must be positive, got {memory_bytes}"):
        device(memory_bytes=memory_bytes)


@pytest.mark.parametrize("multiprocessors", [0, 10**18])
def test_an_invalid_number_of_multiprocessors_is_refused(multiprocessors: int) -> None:
    with pytest.raises(SpecError, match="multiprocessors must be from 1 to 65536, got"):
        replace(device(), multiprocessors=multiprocessors)


@pytest.mark.parametrize("bandwidth", [0.0, -2.0])
def test_a_device_without_bandwidth_is_refused(bandwidth: float) -> None:
    with pytest.raises(SpecError, match=rf"memory bandwidth must be positive .* got {bandwidth}"):
        device(bandwidth=bandwidth)


def test_a_device_without_rates_is_refused() -> None:
    with pytest.raises(SpecError, match="flops_per_s is empty"):
        device(flops_per_s={})


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_rate_that_is_not_positive_is_refused(rate: float) -> None:
    with pytest.raises(SpecError, match=r"flops_per_s\.bfloat16 must be positive"):
        device(flops_per_s={"float32": 1.0, "bfloat16": rate})


@pytest.mark.parametrize(
    ("bytes_per_s", "latency_s"), [(0.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0), (1.0, -1e-6)]
)
def test_an_invalid_link_is_refused(bytes_per_s: float, latency_s: float) -> None:
    with pytest.raises(
        SpecError, match=r"transfer rate .* positive|transfer_rate\.latency_s must be at least 0"
    ):
        Link(bytes_per_s, latency_s)


def test_a_uniform_topology_has_one_link_for_all_pairs() -> None:
    topology = uniform_topology((device(), device(), device()), Link(8.0, 0.5))
    rate, inf = 8.0, np.inf
    assert topology.n_devices == 3
    assert topology.bytes_per_s.tolist() == [
        [inf, rate, rate],
        [rate, inf, rate],
        [rate, rate, inf],
    ]
    assert topology.latency_s.tolist() == [[0.0, 0.5, 0.5], [0.5, 0.0, 0.5], [0.5, 0.5, 0.0]]


def test_nodes_are_joined_by_their_own_link() -> None:
    devices = (device(node=0), device(node=1), device(node=0))
    topology = uniform_topology(devices, Link(8.0, 0.5), Link(2.0, 3.0))
    inf = np.inf
    assert topology.bytes_per_s.tolist() == [[inf, 2.0, 8.0], [2.0, inf, 2.0], [8.0, 2.0, inf]]
    assert topology.latency_s.tolist() == [[0.0, 3.0, 0.5], [3.0, 0.0, 3.0], [0.5, 3.0, 0.0]]


def test_nodes_without_their_own_link_use_the_common_one() -> None:
    topology = uniform_topology((device(node=0), device(node=1)), Link(8.0, 0.5))
    assert topology.bytes_per_s[0, 1] == 8.0
    assert topology.latency_s[1, 0] == 0.5


def test_an_empty_topology_is_refused() -> None:
    with pytest.raises(SpecError, match="no devices"):
        uniform_topology((), Link(1.0))


def test_memory_is_by_device() -> None:
    topology = uniform_topology((device(memory_bytes=3), device(memory_bytes=5)), Link(1.0))
    assert topology.memory_bytes.tolist() == [3, 5]
    assert topology.memory_bytes.dtype == np.int64


def test_memory_beyond_32_bits_survives() -> None:
    topology = uniform_topology((device(memory_bytes=192 * 10**9),), Link(1.0))
    assert topology.memory_bytes.tolist() == [192_000_000_000]


def test_first_keeps_devices_and_their_links() -> None:
    devices = tuple(device(name=str(i), node=i // 2) for i in range(3))
    topology = uniform_topology(devices, Link(8.0, 0.5), Link(2.0, 3.0))
    two = topology.first(2)
    assert [d.name for d in two.devices] == ["0", "1"]
    assert two.bytes_per_s.tolist() == [[np.inf, 8.0], [8.0, np.inf]]
    assert two.latency_s.tolist() == [[0.0, 0.5], [0.5, 0.0]]


def test_a_pair_link_holds_in_both_directions() -> None:
    three = uniform_topology((device(),) * 3, Link(2.0, 0.5))
    topology = with_pair_links(three, {(2, 0): Link(8.0, 0.25)})
    assert topology.bytes_per_s.tolist() == [[np.inf, 2, 8], [2, np.inf, 2], [8, 2, np.inf]]
    assert topology.latency_s.tolist() == [[0, 0.5, 0.25], [0.5, 0, 0.5], [0.25, 0.5, 0]]
    assert three.bytes_per_s[0, 2] == 2.0


@pytest.mark.parametrize(
    ("pair", "message"),
    [((0, 2), "joins device 2, there are 2"), ((1, 1), "joins device 1 with itself")],
)
def test_an_invalid_pair_is_refused(pair: tuple[int, int], message: str) -> None:
    two = uniform_topology((device(),) * 2, Link(2.0))
    with pytest.raises(SpecError, match=message):
        with_pair_links(two, {pair: Link(1.0)})


def test_the_reserve_is_added_to_the_memory_for_tensors() -> None:
    spec = DeviceSpec("d", 90, {"float32": 1.0}, 1.0, reserved_bytes=10)
    assert spec.total_bytes == 100
    assert uniform_topology((spec,), Link(1.0)).memory_bytes.tolist() == [90]


def test_a_negative_reserve_is_refused() -> None:
    with pytest.raises(SpecError, match="reserved_bytes must be at least 0, got -1"):
        DeviceSpec("d", 90, {"float32": 1.0}, 1.0, reserved_bytes=-1)

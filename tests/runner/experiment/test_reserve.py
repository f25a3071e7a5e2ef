"""Memory of devices that the configuration reserves."""

from pathlib import Path

import pytest

from fxpart.errors import InfeasibleError, SpecError
from runner.config.device_schema import DevicesConfig, LinkConfig, PoolConfig
from runner.config.schema import ReserveConfig
from runner.config.specs import read_accelerator
from runner.experiment.topology import build_topology, rounding_bytes
from tests.runner.composed import read

MIB = 2**20


def test_cuda_reserves_its_context_and_workspace_on_every_accelerator() -> None:
    config = read("reserve=cuda", "devices=2x80gb+1x16gb")
    topology = build_topology(config.devices, config.transfer_rate, config.reserve)
    assert [d.reserved_bytes for d in topology.devices] == [576 * MIB] * 3
    assert [d.total_bytes for d in topology.devices] == [80 * 10**9] * 2 + [16 * 10**9]
    assert rounding_bytes(config.devices, config.reserve) == 512
    assert config.reserve.source


def test_nothing_is_reserved_on_the_host() -> None:
    config = read("reserve=cuda", "devices=1xcpu+1xt4")
    topology = build_topology(config.devices, config.transfer_rate, config.reserve)
    assert [d.reserved_bytes for d in topology.devices] == [0, 576 * MIB]
    assert rounding_bytes(config.devices, config.reserve) == 512
    alone = read("reserve=cuda", "devices=2xcpu")
    assert rounding_bytes(alone.devices, alone.reserve) == 1


def test_none_reserves_nothing() -> None:
    config = read("reserve=none")
    topology = build_topology(config.devices, config.transfer_rate, config.reserve)
    assert topology.memory_bytes.tolist() == [16 * 10**9] * 4
    assert rounding_bytes(config.devices, config.reserve) == 1


def test_every_number_can_be_given() -> None:
    overrides = [
        "reserve.context_bytes=1000",
        "reserve.workspace_bytes=0",
        "reserve.fragmentation=0.5",
    ]
    config = read("reserve=cuda", "devices=1x1gb", *overrides)
    topology = build_topology(config.devices, config.transfer_rate, config.reserve)
    assert topology.devices[0].reserved_bytes == 1000 + (10**9 - 1000) // 2


LINK = LinkConfig("l", 8.0, 0.5)


def test_a_device_smaller_than_its_reserve_is_refused() -> None:
    small = DevicesConfig("s", [PoolConfig(1, "d", 10, {"float32": 1.0}, 1.0)])
    with pytest.raises(
        InfeasibleError, match="device d has 10 B, but its reserve alone takes 20 B"
    ):
        build_topology(small, LINK, ReserveConfig("r", context_bytes=20))
    assert build_topology(small, LINK).devices[0].memory_bytes == 10


def test_meaningless_numbers_are_refused() -> None:
    small = DevicesConfig("s", [PoolConfig(1, "d", 10, {"float32": 1.0}, 1.0)])
    with pytest.raises(SpecError, match=r"reserve\.rounding_bytes must be from 1, .*, got 0"):
        build_topology(small, LINK, ReserveConfig("r", rounding_bytes=0))


def test_whether_it_is_the_host_must_be_yes_or_no(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "memory: 8gb\non_host: maybe\nflops_per_s: {float32: 1e12}\n"
        "memory_bandwidth_bytes_per_s: 1e9\nsource: me\n"
    )
    with pytest.raises(SpecError, match="on_host must be true or false, is 'maybe'"):
        read_accelerator(path)

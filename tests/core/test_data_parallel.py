"""Division of devices into equal replicas."""

import re
from dataclasses import replace

import numpy as np
import pytest

from fxpart.core.data_parallel import ring_links, share_of_batch, split_topology
from fxpart.core.efficiency import Efficiency
from fxpart.core.topology import Link, Topology
from fxpart.errors import SpecError
from tests.sketch import devices


def test_neighbouring_devices_form_a_replica() -> None:
    parts = split_topology(devices(16, 16, 16, 16), 2)
    assert parts.rings.tolist() == [[0, 1], [2, 3]]
    assert parts.replica.n_devices == 2
    assert parts.n_replicas == 2


def test_one_replica_has_all_devices() -> None:
    whole = devices(16, 24)
    parts = split_topology(whole, 1)
    assert parts.rings.tolist() == [[0, 1]]
    assert np.array_equal(parts.replica.bytes_per_s, whole.bytes_per_s)


def test_device_kinds_are_divided_evenly_over_replicas() -> None:
    # Devices are named d0, d1, ...: kinds differ by memory, whatever the names.
    parts = split_topology(devices(80, 80, 16, 16, 16, 16), 2)
    assert parts.rings.tolist() == [[0, 2, 3], [1, 4, 5]]
    assert [device.memory_bytes for device in parts.replica.devices] == [80, 16, 16]


def test_devices_that_state_other_shares_are_another_kind() -> None:
    topology = devices(16, 16, 16, 16)
    stated = replace(topology.devices[0], efficiency=Efficiency(other={"memory": 0.5}))
    mixed = (stated, stated, *topology.devices[2:])
    parts = split_topology(replace(topology, devices=mixed), 2)
    assert parts.rings.tolist() == [[0, 2], [1, 3]]


def test_a_ring_runs_at_its_slowest_link() -> None:
    fast, slow = Link(100.0, 0.5), Link(10.0, 2.0)
    parts = split_topology(devices(*[16] * 4, link=fast, nodes=[0, 0, 1, 1], far=slow), 2)
    assert parts.links == (slow, slow)
    assert parts.replica.bytes_per_s[0, 1] == 100.0


def _on_two_machines(*, adapters: float = 1.0) -> Topology:
    """Return four devices on each of two machines, numbered in turn."""
    fast, slow = Link(100.0, 0.5), Link(10.0, 2.0)
    topology = devices(*[16] * 8, link=fast, nodes=[0, 1] * 4, far=slow)
    specs = tuple(replace(device, adapters=adapters) for device in topology.devices)
    return replace(topology, devices=specs)


@pytest.mark.parametrize(
    ("members", "adapters", "rate"),
    [
        ([0, 1], 1.0, 10.0),  # one device on each machine
        ([0, 1, 2, 3], 1.0, 20.0),  # two of each, in whatever order they are numbered
        ([0, 2, 4, 1], 1.0, 10.0),  # the machine with one device limits the other
        ([0, 1, 2, 3, 4, 5, 6, 7], 1.0, 40.0),
        ([0, 1, 2, 3, 4, 5, 6, 7], 0.25, 10.0),  # one adapter for the whole machine
        ([0, 1], 0.25, 2.5),  # beside three other rings over the same adapter
        ([0, 2, 4, 6], 0.25, 100.0),  # within a machine
    ],
)
def test_rings_between_machines_use_the_adapters_of_their_devices(
    members: list[int], adapters: float, rate: float
) -> None:
    rings = np.array(members)[:, None]
    (link,) = ring_links(_on_two_machines(adapters=adapters), rings)
    assert link.bytes_per_s == rate
    assert link.latency_s == (0.5 if rate == 100.0 else 2.0)


def test_devices_that_exchange_values_have_their_own_adapters_only() -> None:
    everyone = np.arange(8)[:, None]
    for adapters, rate in ((1.0, 10.0), (0.25, 2.5)):
        (link,) = ring_links(_on_two_machines(adapters=adapters), everyone, exchanges=True)
        assert link == Link(rate, 2.0)
    within = np.array([[0], [2], [4]])
    assert ring_links(_on_two_machines(), within, exchanges=True) == (Link(100.0, 0.5),)


def test_a_ring_is_as_fast_as_the_links_within_its_machines_allow() -> None:
    topology = devices(*[16] * 8, link=Link(30.0), nodes=[0, 1] * 4, far=Link(10.0))
    (link,) = ring_links(topology, np.arange(8)[:, None])
    assert link.bytes_per_s == 30.0


def test_replicas_on_one_machine_of_three_have_other_links() -> None:
    # Two replicas of two: the first has both devices on one machine, the second on two.
    fast, slow = Link(100.0), Link(10.0)
    topology = devices(*[16] * 4, link=fast, nodes=[0, 0, 1, 2], far=slow)
    with pytest.raises(SpecError, match="equal parts"):
        split_topology(topology, 2)


@pytest.mark.parametrize(("sizes", "replicas"), [([16] * 3, 2), ([16, 16, 24], 3), ([16, 24], 2)])
def test_devices_that_cannot_form_equal_replicas_are_refused(
    sizes: list[int], replicas: int
) -> None:
    with pytest.raises(SpecError, match=re.escape(f"there are {len(sizes)}")):
        split_topology(devices(*sizes), replicas)


def test_zero_replicas_are_refused() -> None:
    with pytest.raises(SpecError, match="data_parallel=0 must be 1 or more"):
        split_topology(devices(16), 0)


def test_the_batch_is_shared_evenly() -> None:
    assert share_of_batch(12, 4) == 3
    with pytest.raises(SpecError, match="such as 12"):
        share_of_batch(10, 4)
    with pytest.raises(SpecError, match="must be 1 or more"):
        share_of_batch(10, 0)

"""Devices in groups that share every operator."""

import re
from dataclasses import replace

import pytest

from fxpart.core.efficiency import Efficiency
from fxpart.core.tensor_groups import tensor_groups
from fxpart.core.topology import Link
from fxpart.errors import NotApplicableError, SpecError
from tests.sketch import devices


def test_neighbouring_devices_form_groups_that_act_as_one_device() -> None:
    fast, slow = Link(100.0, 0.5), Link(10.0, 2.0)
    groups = tensor_groups(devices(*[16] * 4, link=fast, nodes=[0, 0, 1, 1], far=slow), 2)
    assert groups.members.tolist() == [[0, 1], [2, 3]]
    assert groups.links == (fast, fast)
    assert groups.topology.n_devices == 2
    assert groups.topology.bytes_per_s[0, 1] == 10.0
    assert groups.topology.latency_s[1, 0] == 2.0


def test_a_group_ring_runs_at_its_slowest_link() -> None:
    fast, slow = Link(100.0, 0.5), Link(10.0, 2.0)
    groups = tensor_groups(devices(*[16] * 4, link=fast, nodes=[0, 0, 1, 1], far=slow), 4)
    # Both devices of a machine send to the other machine, each over its own adapter.
    assert groups.links == (Link(20.0, 2.0),)
    assert groups.topology.n_devices == 1


def test_groups_of_one_are_the_devices_themselves() -> None:
    whole = devices(16, 24)
    groups = tensor_groups(whole, 1)
    assert groups.topology is whole
    assert groups.size == 1


def test_a_size_that_does_not_divide_the_devices_lists_those_that_do() -> None:
    with pytest.raises(NotApplicableError, match=re.escape("there are 6; use 3 or 6")):
        tensor_groups(devices(*[16] * 6), 4)
    with pytest.raises(SpecError, match="tensor_parallel=0 must be 1 or more"):
        tensor_groups(devices(16), 0)


def test_a_group_of_unequal_devices_is_refused() -> None:
    with pytest.raises(NotApplicableError, match="devices 0 to 1 are d0 and d1"):
        tensor_groups(devices(16, 24), 2)
    alike = devices(16, 16)
    stated = replace(alike.devices[0], efficiency=Efficiency(other={"memory": 0.5}))
    with pytest.raises(NotApplicableError, match="use equal devices"):
        tensor_groups(replace(alike, devices=(stated, alike.devices[1])), 2)
    weak, strong = (replace(alike.devices[0], power_w=power_w) for power_w in (300.0, 700.0))
    with pytest.raises(NotApplicableError, match="use equal devices"):
        tensor_groups(replace(alike, devices=(weak, strong)), 2)


def test_a_group_has_whole_machines_or_lies_in_one() -> None:
    six = devices(*[16] * 6, nodes=[0, 0, 0, 1, 1, 1], far=Link(1.0))
    with pytest.raises(NotApplicableError, match="devices 2 to 3, which are parts of 2 machines; "):
        tensor_groups(six, 2)
    assert tensor_groups(six, 3).members.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensor_groups(six, 6).size == 6

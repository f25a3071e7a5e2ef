"""Resources that no machine of a Ray cluster has."""

import pytest

from runner.sweep.launchers.ray_tasks import lacking

MACHINES = [
    {"Alive": True, "Resources": {"CPU": 2.0, "memory": 1e9, "special": 1.0}},
    {"Alive": True, "Resources": {"CPU": 1.0, "GPU": 1.0}},
    {"Alive": False, "Resources": {"CPU": 64.0}},
]


@pytest.mark.parametrize(
    "remote",
    [
        {},
        {"num_cpus": 2},
        {"num_cpus": 0.5, "num_gpus": 1},
        {"num_cpus": None, "num_gpus": 0, "resources": None},
        {"memory": 5e8, "resources": {"special": 0.5, "none": 0}, "max_retries": 0},
    ],
)
def test_a_machine_has_all(remote: dict[str, object]) -> None:
    assert lacking(remote, MACHINES) is None


@pytest.mark.parametrize(
    ("remote", "expected"),
    [
        ({"num_cpus": 3, "num_gpus": 1}, "num_cpus=3"),  # a lost machine had this number
        ({"num_cpus": 2, "num_gpus": 1}, "num_cpus=2, num_gpus=1"),  # not the same machine
        ({"num_cpus": 1, "memory": 2e9}, "memory=2e+09"),
        ({"resources": {"other": 1}}, "other=1"),
    ],
)
def test_no_machine_has_it(remote: dict[str, object], expected: str) -> None:
    assert lacking(remote, MACHINES) == expected


def test_without_a_machine_nothing_is_known() -> None:
    assert lacking({"num_cpus": 3}, MACHINES[2:]) is None

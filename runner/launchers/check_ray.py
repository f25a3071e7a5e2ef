"""Whether Ray could run a job at all, asked before anything of a sweep is kept."""

import os
from collections.abc import Mapping
from typing import Any

from fxpart.errors import SpecError
from runner.launchers.ray_address import LOCAL, address_of, check_address

__all__ = ["check_cluster", "check_cores"]


def check_cluster(given: Mapping[str, Any]) -> None:
    """Connect to a cluster that is there already, for the sweep to come; one here starts later.

    Raises:
        SpecError: in one line, where nobody answers or Ray cannot connect.

    """
    init = given["init"]
    address = address_of(init)
    if address == LOCAL:
        return
    check_address(address)
    from runner.launchers.ray_apart import connect_apart

    connect_apart(init)


def check_cores(given: Mapping[str, Any]) -> None:
    """Refuse jobs that ask for more cores than a cluster of this machine is given: Ray waits."""
    named = given["init"].get("num_cpus")
    there = os.cpu_count() if named is None else named  # Ray takes no more by itself
    asked = given["remote"].get("num_cpus", 1)  # Ray's own number where none is given
    if address_of(given["init"]) == LOCAL and asked and there is not None and asked > there:
        what = f"the {there} of this machine"
        if named is not None:
            what = f"hydra.launcher.init.num_cpus={named}"
        raise SpecError(
            f"hydra.launcher.remote.num_cpus={asked:g} is more than {what}; no job could start; ask"
            " for fewer, or give the cluster more"
        )

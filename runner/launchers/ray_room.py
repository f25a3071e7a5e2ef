"""Whether a Ray cluster has room for a job at all: Ray itself waits for ever, without a word."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["lacking"]

_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
"""How Ray names for a machine what a task asks for."""


def lacking(remote: Mapping[str, Any], machines: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what a job asks for that no machine has, such as ``num_cpus=4``; None if one has it.

    `remote` are the options of its task, `machines` what ``ray.nodes`` returns. What others use at
    the moment counts as there.
    """
    own = {name: remote.get(name) for name in _NAMES}
    every: dict[str, Any] = {**own, **(remote.get("resources") or {})}
    wanted: dict[str, float] = {name: amount for name, amount in every.items() if amount}
    there = [machine["Resources"] for machine in machines if machine["Alive"]]
    # Without any machine nothing is known yet.
    if not there or any(_fits(wanted, one) for one in there):
        return None
    alone = {name: n for name, n in wanted.items() if not any(_fits({name: n}, m) for m in there)}
    return ", ".join(f"{name}={amount:g}" for name, amount in (alone or wanted).items())


def _fits(wanted: Mapping[str, float], machine: Mapping[str, float]) -> bool:
    return all(machine.get(_NAMES.get(name, name), 0) >= n for name, n in wanted.items())

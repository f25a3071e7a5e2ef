"""Make a placement fit its devices, by random moves and exchanges."""

import numpy as np

from fxpart.compiled import compiled
from fxpart.graph import IntArray
from fxpart.static.placing import overflow, placing_of, shift
from fxpart.static.tables import Tables

__all__ = ["settle"]


@compiled
def settle(  # noqa: PLR0917 - a compiled loop takes arrays
    tables: Tables, memory: IntArray, start: IntArray, tries: int, heat_bytes: float, seed: int
) -> tuple[bool, IntArray]:
    """Return whether the placement that was reached fits, and its devices.

    Each try moves an operator; every second one also moves an operator back from the other device,
    so that two are exchanged. What exceeds the devices, in all, is lowered by simulated annealing.

    Args:
        tables: the operators.
        memory: bytes of each device. Shape (D,).
        start: device of each operator. Shape (n,).
        tries: how often to try.
        heat_bytes: first temperature; with 0, no try that raises what exceeds the devices is kept.
        seed: of chance.

    """
    np.random.seed(seed)
    n, devices = start.shape[0], memory.shape[0]
    placing = placing_of(tables, start, devices)
    over = overflow(placing, memory)
    for done in range(tries):
        if over == 0:
            break
        op, there = np.random.randint(0, n), np.random.randint(0, devices)
        here = int(placing.device[op])
        if here == there:
            continue
        other = -1
        if np.random.random() < 0.5:
            other = np.random.randint(0, n)
            there = int(placing.device[other])
            if there == here:
                continue
            shift(tables, placing, other, here)
        shift(tables, placing, op, there)
        now = overflow(placing, memory)
        allowed = -heat_bytes * np.exp(-7.0 * done / tries) * np.log(1.0 - np.random.random())
        if now <= over + allowed:
            over = now
            continue
        shift(tables, placing, op, here)
        if other >= 0:
            shift(tables, placing, other, there)
    return over == 0, placing.device

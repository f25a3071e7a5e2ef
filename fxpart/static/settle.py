"""Make a placement fit its devices: random moves that never raise what exceeds them."""

import numpy as np

from fxpart.compiled import compiled
from fxpart.graph import IntArray
from fxpart.static.placing import overflow, placing_of, shift
from fxpart.static.tables import Tables

__all__ = ["settle"]


@compiled
def settle(
    tables: Tables, memory: IntArray, start: IntArray, tries: int, seed: int
) -> tuple[bool, IntArray]:
    """Return whether the placement that was reached fits, and its devices.

    Each try moves an operator away from a device that holds too much; every second one also moves
    an operator of the other device, so that two are exchanged. A try that raises what exceeds the
    devices is taken back.
    """
    np.random.seed(seed)
    n, devices = start.shape[0], memory.shape[0]
    placing = placing_of(tables, start, devices)
    over = overflow(placing, memory)
    for _ in range(tries):
        if over == 0:
            break
        op, there = np.random.randint(0, n), np.random.randint(0, devices)
        here = int(placing.device[op])
        if here == there or placing.used[here] <= memory[here]:
            continue
        other, home = -1, -1
        if np.random.random() < 0.5:
            other = np.random.randint(0, n)
            home = int(placing.device[other])
            if home == here or other == op:
                continue
            there = home
            shift(tables, placing, other, here)
        shift(tables, placing, op, there)
        now = overflow(placing, memory)
        if now <= over:
            over = now
            continue
        shift(tables, placing, op, here)
        if other >= 0:
            shift(tables, placing, other, home)
    return over == 0, placing.device

"""Make a placement fit its devices, by random moves and exchanges."""

from fxpart.chance import below, chance, share
from fxpart.compiled import compiled
from fxpart.graph import IntArray
from fxpart.static.annealing import allowance
from fxpart.static.placing import Placing, overflow, placing_of, shift
from fxpart.static.tables import Tables

__all__ = ["settle"]


@compiled
def _move_or_exchange(
    tables: Tables, placing: Placing, devices: int, state: IntArray
) -> tuple[int, int, int, int]:
    """Move a random operator, in half of the cases in exchange for another.

    Returns the operator, the one that came back, and the devices that they were on. Both are -1
    when nothing moved, the second when there was no exchange.
    """
    n = placing.device.shape[0]
    op, there, other = below(state, n), below(state, devices), -1
    here = int(placing.device[op])
    if here != there and share(state) < 0.5:
        other = below(state, n)
        there = int(placing.device[other])
    if here == there:
        return -1, -1, here, there
    if other >= 0:
        shift(tables, placing, other, here)
    shift(tables, placing, op, there)
    return op, other, here, there


@compiled
def settle(  # noqa: PLR0917 - a compiled loop takes arrays
    tables: Tables, memory: IntArray, start: IntArray, tries: int, heat_bytes: float, seed: int
) -> tuple[bool, IntArray]:
    """Return whether the placement that was reached fits, and its devices.

    Each try moves an operator or exchanges two. What exceeds the devices, in all, is lowered by
    simulated annealing.

    Args:
        tables: the operators.
        memory: bytes of each device. Shape (D,).
        start: device of each operator. Shape (n,).
        tries: how often to try.
        heat_bytes: first temperature; with 0, no try that raises what exceeds the devices is kept.
        seed: of chance.

    """
    devices, state = memory.shape[0], chance(seed)
    placing = placing_of(tables, start, devices)
    over = overflow(placing, memory)
    for done in range(tries):
        if over == 0:
            break
        op, other, here, there = _move_or_exchange(tables, placing, devices, state)
        if op < 0:
            continue
        now = overflow(placing, memory)
        if now <= over + allowance(heat_bytes, done, tries, state):
            over = now
            continue
        shift(tables, placing, op, here)
        if other >= 0:
            shift(tables, placing, other, there)
    return over == 0, placing.device

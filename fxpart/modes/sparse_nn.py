"""`sparse_nn`: embedding tables are spread over devices, the dense rest is on each of them.

For recommendation models, whose tables exceed any device while the rest is small. The rule is that
of torch's partitioner (`torch.fx.experimental.accelerator_partitioner`), with liveness memory.
Where torch combines partitions of neighbouring levels, tables are packed largest first, each where
it leaves the least memory free (best fit decreasing), which opens fewer devices. Over as many
devices, they are then spread by computing time as far as memory allows.
"""

import numpy as np
import numpy.typing as npt

from fxpart.assignment import Assignment
from fxpart.cost.holding import live_bytes, weight_bytes_of
from fxpart.errors import InfeasibleError, SpecError
from fxpart.graph import IntArray, OpGraph
from fxpart.modes.embeddings import embedding_units
from fxpart.modes.infeasible import describe_devices
from fxpart.modes.options import NoOptions
from fxpart.modes.single import single_device
from fxpart.partitions import partition_by_device
from fxpart.problem import Problem
from fxpart.sizes import show_bytes

__all__ = ["sparse_nn"]

_DENSE, _ELSEWHERE = 0, -1
BoolArray = npt.NDArray[np.bool_]


def sparse_nn(problem: Problem, _: NoOptions | None = None) -> Assignment:
    """Return the model on one device if it fits there, else its tables packed onto several.

    Every device so used holds the dense partitions as well, and these take inputs in turn.

    Raises:
        SpecError: when devices have unequal memory, or the model has no embeddings.
        InfeasibleError: when the dense rest and one table exceed a device, or the tables need more
            devices than there are.

    """
    whole = single_device(problem)
    if whole is not None:
        return whole
    _refuse_unequal(problem)
    units = embedding_units(problem.graph)
    if not units:
        raise SpecError(
            "mode=sparse_nn spreads embedding tables over devices, this model has no embedding"
            " operators; take mode=size_based or mode=kl_based"
        )
    bins = _packed(problem, units)
    # Partitions as if the dense rest had a device of its own: they are right wherever it runs.
    place = np.full(problem.graph.n_ops, _DENSE, dtype=np.int64)
    for device, tables in enumerate(bins):
        place[tables] = device + 1
    if not (place == _DENSE).any():
        return partition_by_device(problem.graph, place - 1)
    apart = partition_by_device(problem.graph, place)
    everywhere = tuple(range(len(bins)))
    homes = (
        everywhere if home == _DENSE else (home - 1,) for (home,) in apart.devices_of_partition
    )
    return Assignment(apart.partition_of, tuple(homes))


def _refuse_unequal(problem: Problem) -> None:
    sizes = problem.topology.memory_bytes.tolist()
    if len(set(sizes)) > 1:
        raise SpecError(
            f"mode=sparse_nn needs devices of equal memory, there are {describe_devices(sizes)};"
            " take equal ones such as devices=8x24gb, or mode=size_based or mode=kl_based"
        )


def _packed(problem: Problem, units: list[IntArray]) -> list[IntArray]:
    """Return the embedding operators of each device, in order of the devices."""
    sizes = problem.topology.memory_bytes.tolist()
    dense = np.ones(problem.graph.n_ops, dtype=np.bool_)
    dense[np.concatenate(units)] = False
    # A stable sort: of equal tables, the first in graph order first.
    largest_first = sorted(units, key=lambda ops: -weight_bytes_of(problem.memory, ops))
    bins = _fewest(problem, dense, largest_first)
    if len(bins) > len(sizes):
        needs = [_needed_bytes(problem, dense, tables) for tables in bins]
        raise InfeasibleError(
            f"sparse_nn: the embedding tables make {len(bins)} partitions of up to"
            f" {show_bytes(max(needs))} with the dense rest ({sum(needs)} bytes in all), one for"
            f" each device, the devices are {describe_devices(sizes)} ({sum(sizes)} bytes); take"
            f" {len(bins)} such devices, or larger ones",
            needed_bytes=sum(needs),
            available_bytes=sum(sizes),
            devices_that_fit=len(bins),
        )
    return _spread(problem, dense, largest_first, len(bins)) or bins


def _fewest(problem: Problem, dense: BoolArray, units: list[IntArray]) -> list[IntArray]:
    """Return units packed by best fit: each where it leaves least free, else on a new device."""
    capacity = problem.topology.devices[0].memory_bytes
    bins: list[IntArray] = []
    for unit in units:
        needed = [_needed_bytes(problem, dense, np.concatenate([held, unit])) for held in bins]
        fits = [(size, -index) for index, size in enumerate(needed) if size <= capacity]
        if fits:
            tightest = -max(fits)[1]
            bins[tightest] = np.concatenate([bins[tightest], unit])
            continue
        alone = _needed_bytes(problem, dense, unit)
        if alone > capacity:
            raise _too_large(problem.graph, unit, alone, capacity)
        bins.append(unit)
    return bins


def _spread(
    problem: Problem, dense: BoolArray, units: list[IntArray], count: int
) -> list[IntArray] | None:
    """Return units on `count` devices, each on the one that is least busy of those with room.

    None when one finds no room: tightly filled devices leave no choice.
    """
    capacity, op_time_s = problem.topology.devices[0].memory_bytes, problem.costs.op_time_s
    bins = [np.empty(0, dtype=np.int64) for _ in range(count)]
    for unit in units:
        trials = [np.concatenate([held, unit]) for held in bins]
        busy_s = [float(op_time_s[ops, device].sum()) for device, ops in enumerate(trials)]
        needed = [_needed_bytes(problem, dense, ops) for ops in trials]
        fits = [(busy_s[d], needed[d], d) for d in range(count) if needed[d] <= capacity]
        if not fits:
            return None
        best = min(fits)[2]
        bins[best] = trials[best]
    return bins


def _needed_bytes(problem: Problem, dense: BoolArray, tables: IntArray) -> int:
    """Return what a device needs that holds `tables` and, in its turn, computes `dense`."""
    memory, turn = problem.memory, np.where(dense, 0, _ELSEWHERE).astype(np.int64)
    turn[tables] = 0
    rest = np.full(len(dense), _ELSEWHERE, dtype=np.int64)
    rest[tables] = 0
    live = max(int(live_bytes(memory, place, 0).max()) for place in (turn, rest))
    return weight_bytes_of(memory, np.flatnonzero(turn == 0)) + live


def _too_large(graph: OpGraph, unit: IntArray, needed: int, capacity: int) -> InfeasibleError:
    name, module = graph.names[int(unit[0])], graph.modules[int(unit[0])]
    return InfeasibleError(
        f"sparse_nn: the dense rest and the tables of {module or name} alone need"
        f" {show_bytes(needed)} ({needed} bytes), a device has {show_bytes(capacity)} ({capacity}"
        " bytes): take larger devices, a smaller batch, or mode=size_based or mode=kl_based, which"
        " spread the dense rest too",
        needed_bytes=needed,
        available_bytes=capacity,
    )

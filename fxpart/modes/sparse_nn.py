"""`sparse_nn`: embedding tables are spread over devices, the dense rest is on each of them.

For recommendation models, whose tables exceed any device while the rest is small. The rule is that
of torch's partitioner (`torch.fx.experimental.accelerator_partitioner`), with liveness memory.
Where torch combines partitions of neighbouring levels, tables are packed largest first, each on the
fullest device that takes it (best fit decreasing), which opens fewer devices; where those are still
too many, a search tries other packings. Over as many devices, tables are then spread by computing
time as far as memory allows.
"""

import numpy as np

from fxpart.assignment import Assignment
from fxpart.cost.holding import weight_bytes_of
from fxpart.errors import InfeasibleError, SpecError
from fxpart.graph import IntArray
from fxpart.modes.embeddings import embedding_units
from fxpart.modes.infeasible import describe_devices, describe_reserve
from fxpart.modes.options import NoOptions
from fxpart.modes.single import single_device
from fxpart.modes.table_packing import packed_by_search, packed_tightly, spread_by_time
from fxpart.modes.table_sizes import TableSizes, table_sizes
from fxpart.partitions import partition_by_device, partition_by_homes
from fxpart.problem import Problem
from fxpart.sizes import show_bytes

__all__ = ["sparse_nn"]


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
    # Homes 0: of the dense rest; d + 1: of the tables of device d.
    home_of = np.zeros(problem.graph.n_ops, dtype=np.int64)
    for device, tables in enumerate(bins):
        for unit in tables:
            home_of[units[unit]] = device + 1
    if home_of.all():
        return partition_by_device(problem.graph, home_of - 1)
    homes = (tuple(range(len(bins))), *((device,) for device in range(len(bins))))
    return partition_by_homes(problem.graph, home_of, homes)


def _refuse_unequal(problem: Problem) -> None:
    sizes = problem.topology.memory_bytes.tolist()
    if len(set(sizes)) > 1:
        raise SpecError(
            f"mode=sparse_nn needs devices of equal memory, there are {describe_devices(sizes)};"
            " take equal ones such as devices=8x24gb, or mode=size_based or mode=kl_based"
        )


def _packed(problem: Problem, units: list[IntArray]) -> list[tuple[int, ...]]:
    """Return the tables of each device that is used, in order of the devices."""
    devices = problem.topology.memory_bytes.tolist()
    capacity, sizes = devices[0], table_sizes(problem, units)
    # A stable sort: of equal tables, the first in graph order first.
    table_bytes = [weight_bytes_of(problem.memory, operators) for operators in units]
    order = sorted(range(len(units)), key=lambda unit: -table_bytes[unit])
    for unit in order:
        alone = sizes.needed_bytes((unit,))
        if alone > capacity:
            raise _too_large(problem, units[unit], alone)
    bins = packed_tightly(sizes, order, capacity)
    if len(bins) > len(devices):
        found = packed_by_search(sizes, order, capacity, len(devices))
        if found is None:
            raise _too_few(problem, sizes, bins)
        bins = found
    op_time_s = problem.costs.op_time_s[:, : len(bins)]
    return spread_by_time(sizes, order, capacity, op_time_s) or bins


def _too_few(problem: Problem, sizes: TableSizes, bins: list[tuple[int, ...]]) -> InfeasibleError:
    devices = problem.topology.memory_bytes.tolist()
    needs = [sizes.needed_bytes(tables) for tables in bins]
    return InfeasibleError(
        f"sparse_nn: the embedding tables make {len(bins)} partitions of up to"
        f" {show_bytes(max(needs))} with the dense rest ({sum(needs)} bytes in all), one for"
        f" each device, the devices are {describe_devices(devices)} ({sum(devices)} bytes)"
        f"{describe_reserve(problem.topology.devices)}; take {len(bins)} such devices, or larger"
        " ones",
        needed_bytes=sum(needs),
        available_bytes=sum(devices),
        devices_that_fit=len(bins),
    )


def _too_large(problem: Problem, unit: IntArray, needed: int) -> InfeasibleError:
    name, module = problem.graph.names[int(unit[0])], problem.graph.modules[int(unit[0])]
    device = problem.topology.devices[0]
    capacity = device.memory_bytes
    return InfeasibleError(
        f"sparse_nn: the dense rest and the tables of {module or name} alone need"
        f" {show_bytes(needed)} ({needed} bytes), a device has {show_bytes(capacity)} ({capacity}"
        f" bytes){describe_reserve([device])}: take larger devices, a smaller batch, or"
        " mode=size_based or mode=kl_based, which spread the dense rest too",
        needed_bytes=needed,
        available_bytes=capacity,
    )

"""`sparse_nn`: distribute embedding tables over devices, and replicate the dense rest on each.

This is for recommendation models, whose tables exceed any device while the rest is small. The rule
is that of torch's partitioner (`torch.fx.experimental.accelerator_partitioner`), with liveness
memory. Where torch combines partitions of neighbouring levels, tables are packed by best fit
decreasing, which uses fewer devices; if these are still too many, a search tries other packings.
Tables are then balanced by compute time over the same number of devices, as far as memory allows.
"""

import itertools
import re

import numpy as np
import numpy.typing as npt

from fxpart.core.assignment import Assignment
from fxpart.core.granularity import first_of_each
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.partitions import partition_by_device, partition_by_homes
from fxpart.cost.holding import weight_bytes_of
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError, SpecError, show_bytes
from fxpart.placement.device_order import fastest_first
from fxpart.placement.infeasible import describe_devices, describe_reserve
from fxpart.placement.options import NoOptions
from fxpart.placement.search.table_packing import (
    TableSizes,
    packed_by_search,
    packed_tightly,
    spread_by_time,
    table_sizes,
)
from fxpart.placement.single import single_device

__all__ = ["embedding_units", "looks_up", "sparse_nn"]


# Embedding lookups of a graph, and the operators that go with them.

_LOOKUP = re.compile(
    r"(?:aten\.)?_?embedding(?:_bag)?(?:_forward_only|_renorm_?)?(?:\.\w+)?|Embedding(?:Bag)?"
)
"""Operators of torch, functions, and module classes if whole modules are captured."""


def looks_up(target: str) -> bool:
    """Return whether an operator that calls `target` looks up rows of an embedding table."""
    return _LOOKUP.fullmatch(target) is not None


def embedding_units(graph: OpGraph) -> list[IntArray]:
    """Return the operators of each embedding table, in order of the first lookup.

    A unit consists of the lookups that share a table, operators grouped with them, and operators
    without weights that only prepare indices for them from model inputs. Empty if there is no
    lookup.
    """
    unit_of = _units_by_table(graph)
    _add_preparation(graph, unit_of)
    by_unit = np.argsort(unit_of, kind="stable")
    starts = np.searchsorted(unit_of[by_unit], np.arange(int(unit_of.max()) + 2))
    return [by_unit[first:end] for first, end in itertools.pairwise(starts)]


def _units_by_table(graph: OpGraph) -> IntArray:
    """Return the unit of each operator, -1 for dense ones; numbered by their first lookup."""
    lookups = [op for op in range(graph.n_ops) if looks_up(graph.targets[op])]
    first_use: dict[int, int] = {}
    pairs = []
    for op in lookups:
        group = int(graph.group[op])
        pairs += [(group, first_use.setdefault(w, group)) for w in graph.uses_of(op).tolist()]
    first = first_of_each(graph.n_ops, pairs)
    tables = {int(group) for group in graph.group[lookups]}
    number = {group: i for i, group in enumerate(sorted({first[group] for group in tables}))}
    unit = [number[first[g]] if g in tables else -1 for g in graph.group.tolist()]
    return np.array(unit, dtype=np.int64)


def _add_preparation(graph: OpGraph, unit_of: IntArray) -> None:
    """Assign operators that prepare indices to their unit, in `unit_of`."""
    only_unit = _only_for_one_unit(graph, unit_of)
    alone = np.bincount(graph.group, minlength=graph.n_ops)[graph.group] == 1
    for op in np.flatnonzero((only_unit >= 0) & alone).tolist():
        makers = [int(graph.value_producer[value]) for value in graph.reads_of(op)]
        if all(maker < 0 or unit_of[maker] == only_unit[op] for maker in makers):
            unit_of[op] = only_unit[op]


def _only_for_one_unit(graph: OpGraph, unit_of: IntArray) -> IntArray:
    """Return the only unit that depends on each dense operator without weights, else -1.

    Dependencies may be direct or through other such operators.
    """
    none, several = -1, -2
    reader_unit = np.full(graph.n_ops, none, dtype=np.int64)
    outputs: npt.NDArray[np.int64] = graph.value_producer[graph.value_is_output]
    reader_unit[outputs[outputs >= 0]] = several
    unit_for = np.full(graph.n_ops, none, dtype=np.int64)
    for op in range(graph.n_ops - 1, -1, -1):
        if unit_of[op] < 0 and len(graph.uses_of(op)) == 0 and reader_unit[op] >= 0:
            unit_for[op] = reader_unit[op]
        unit = unit_of[op] if unit_of[op] >= 0 else unit_for[op]
        for value in graph.reads_of(op).tolist():
            maker = int(graph.value_producer[value])
            if maker >= 0:
                is_first_reader = reader_unit[maker] == none and unit >= 0
                same = is_first_reader or reader_unit[maker] == unit
                reader_unit[maker] = unit if same and unit >= 0 else several
    return unit_for


@fastest_first
def sparse_nn(problem: Problem, _: NoOptions | None = None) -> Assignment:
    """Place the model on one device if it fits, or else pack its tables onto several.

    Every device in use also has the dense partitions, which take inputs round-robin.

    Raises:
        SpecError: if devices have unequal memory, or the model has no embeddings.
        InfeasibleError: if the dense rest and one table exceed a device, or the tables need more
            devices than there are.

    """
    whole = single_device(problem)
    if whole is not None:
        return whole
    _refuse_unequal(problem)
    units = embedding_units(problem.graph)
    if not units:
        raise SpecError(
            "mode=sparse_nn spreads embedding tables over devices, but this model has no embedding "
            "operators; take mode=size_based or mode=kl_based"
        )
    bins = _packed(problem, units)
    # Home 0 is the dense rest; home d + 1 is the tables of device d.
    home_of = np.zeros(problem.graph.n_ops, dtype=np.int64)
    for device, tables in enumerate(bins):
        for unit in tables:
            home_of[units[unit]] = device + 1
    if home_of.all():
        return partition_by_device(problem.graph, home_of - 1)
    homes = (tuple(range(len(bins))), *((device,) for device in range(len(bins))))
    return partition_by_homes(problem.graph, home_of, homes)


def _refuse_unequal(problem: Problem) -> None:
    # Less of a device may be for tensors than of another like it, if a plan was too large there.
    sizes = [device.total_bytes for device in problem.topology.devices]
    if len(set(sizes)) > 1:
        raise SpecError(
            "mode=sparse_nn needs devices of equal memory, but there are "
            f"{describe_devices(sizes)}; take equal ones such as devices=8x24gb, or "
            "mode=size_based or mode=kl_based"
        )


def _packed(problem: Problem, units: list[IntArray]) -> list[tuple[int, ...]]:
    """Return the tables of each device in use, in device order."""
    devices = problem.topology.memory_bytes.tolist()
    capacity, sizes = min(devices), table_sizes(problem, units)
    # A stable sort keeps equal tables in graph order.
    table_bytes = [weight_bytes_of(problem.memory, operators) for operators in units]
    order = sorted(range(len(units)), key=lambda unit: -table_bytes[unit])
    for unit in order:
        alone = sizes.needed_bytes((unit,))
        if alone > capacity:
            raise _too_large(problem, units[unit], alone)
    bins = packed_tightly(sizes, order, capacity)
    if len(bins) > len(devices):
        packed = packed_by_search(sizes, order, capacity, len(devices))
        if packed is None:
            raise _too_few(problem, sizes, bins)
        bins = packed
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

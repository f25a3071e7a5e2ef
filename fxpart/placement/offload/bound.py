"""Lower bounds of latency and largest load over all plans for given devices and tiers."""

from dataclasses import replace

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.bounds import load_bound_s, lower_bound_s
from fxpart.cost.problem import Problem
from fxpart.placement.device_order import used_weight_bytes
from fxpart.placement.offload.machine import Machine
from fxpart.placement.offload.units import cache_writes

__all__ = ["bound_s", "least_load_s"]


def bound_s(machine: Machine) -> float:
    """Return a lower bound of the latency of plans for these devices and tiers.

    It is the maximum of the bound with unlimited device memory, and the least time for the excess:
    this is copied over all links at once, or used on the host in the cheapest order (a fractional
    knapsack), while the devices compute.
    """
    return max(lower_bound_s(_roomy(machine)), _offloaded_s(machine))


def least_load_s(machine: Machine) -> float:
    """Return a lower bound of the largest load of plans for these devices and tiers.

    As `bound_s`, since each input's copies also occupy links and the disk.
    """
    return max(load_bound_s(_roomy(machine)), _offloaded_s(machine))


def _roomy(machine: Machine) -> Problem:
    """Return the problem with unlimited memory, and with the host if it computes."""
    base = machine.with_host if machine.computes else machine.problem
    total = machine.problem.graph.total_weight_bytes + int(
        machine.problem.graph.value_alloc_bytes.sum()
    )
    roomy = tuple(
        replace(spec, memory_bytes=max(spec.memory_bytes, total), reserved_bytes=0)
        for spec in base.topology.devices
    )
    return replace(base, topology=replace(base.topology, devices=roomy))


def _offloaded_s(machine: Machine) -> float:
    """Return the least time to handle the weights and caches that do not fit the devices."""
    first, graph = machine.first or machine.problem, machine.problem.graph
    caches = cache_writes(first.graph).copied_bytes
    if machine.begins:
        caches = np.zeros_like(caches)
    sizes = np.concatenate([graph.weight_bytes, caches])
    excess = used_weight_bytes(first) + int(caches.sum()) - int(first.topology.memory_bytes.sum())
    rate = 0.0
    if machine.options.stream:
        links = machine.link[0] * machine.problem.topology.n_devices
        share = max(machine.options.pinned_share, machine.options.pageable_share)
        rate = min(links * share, machine.options.host_bytes_per_s or np.inf)
    from_disk_s = 0.0
    if machine.tiers.disk and machine.tiers.disk.bytes_per_s:
        beyond = max(0, excess - machine.tiers.host.memory_bytes)
        from_disk_s = beyond / machine.tiers.disk.bytes_per_s
    copied_s = _least_s(excess, rate, sizes, _used_s(machine, sizes))
    return max(copied_s, from_disk_s)


def _used_s(machine: Machine, sizes: IntArray) -> FloatArray:
    """Return the host time attributed to each weight, then each value, shape (W + V,).

    The time of an operator is divided over its weights and caches in proportion to their bytes.
    """
    graph = machine.problem.graph
    if not machine.computes:
        return np.full(len(sizes), np.inf)
    users = np.concatenate([graph.users, graph.readers])
    used = np.concatenate([graph.uses, len(graph.weight_names) + graph.reads])
    users, used = users[sizes[used] > 0], used[sizes[used] > 0]
    of_op = np.zeros(graph.n_ops)
    np.add.at(of_op, users, sizes[used])
    seconds = np.zeros(len(sizes))
    times = machine.with_host.costs.op_time_s[:, -1]
    np.add.at(seconds, used, times[users] * sizes[used] / of_op[users])
    return seconds


def _least_s(excess: int, rate: float, sizes: IntArray, host_s: FloatArray) -> float:
    """Return the least time in which `excess` bytes are copied at `rate` or used on the host."""
    if excess <= 0:
        return 0.0
    copy_all_s = excess / rate if rate > 0 else np.inf
    usable = np.isfinite(host_s) & (sizes > 0)
    order = np.argsort(host_s[usable] / np.maximum(sizes[usable], 1), kind="stable")
    spent_s = np.concatenate([[0.0], np.cumsum(host_s[usable][order])])
    done_bytes = np.concatenate([[0.0], np.cumsum(sizes[usable][order], dtype=np.float64)])
    # The bytes handled by a time are piecewise linear: find the first piece that reaches the
    # excess.
    for index in range(1, len(done_bytes)):
        if spent_s[index] * rate + done_bytes[index] >= excess:
            before = spent_s[index - 1] * rate + done_bytes[index - 1]
            step_s = spent_s[index] - spent_s[index - 1]
            step = rate * step_s + done_bytes[index] - done_bytes[index - 1]
            return float(spent_s[index - 1] + step_s * max(0.0, excess - before) / step)
    rest = excess - done_bytes[-1]
    return float(min(copy_all_s, rest / rate)) if rate > 0 else float(spent_s[-1])

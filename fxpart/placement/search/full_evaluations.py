"""Searches for the objectives memory and energy, by full evaluations."""

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.energy import IDLE_SHARE, energy_bound_j, energy_j, powers_w
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.kernels import ScheduleLog, peak_on_device, schedule, schedule_log
from fxpart.cost.least_placement import are_few
from fxpart.cost.possible_times import needed_bytes
from fxpart.cost.problem import OBJECTIVES, Problem
from fxpart.cost.tables import CostTables, MemoryTables
from fxpart.placement.search.refine import latency_of
from fxpart.placement.search.units import Units, atomic_units, module_units
from fxpart.support.compiled import compiled, inlined
from fxpart.support.random_numbers import below, chance, share

__all__ = ["BY_WHOLE", "annealed_whole", "bound_of", "value_of"]

BY_WHOLE = OBJECTIVES[2:]
"""Objectives searched here; memory is in bytes, energy in J."""
_COLD, _POWER = 1e-5, 16.0
_STEPS_A_UNIT, _LEAST_STEPS, _MOST_STEPS = 40, 400, 20_000
_MOST_WORK = 6_000_000
"""Most operators times steps per level of units, about a second."""


def value_of(problem: Problem, device_of: IntArray) -> float:
    """Return the objective: bytes of the fullest device, or J per input."""
    devices = problem.topology.n_devices
    if problem.objective == "memory":
        return float(peak_bytes(problem.memory, device_of, devices).max())
    op_s = problem.costs.op_time_s[np.arange(len(device_of)), device_of]
    busy_s = np.bincount(device_of, weights=op_s, minlength=devices).astype(np.float64)
    used = np.bincount(device_of, minlength=devices) > 0
    return energy_j(powers_w(problem.topology), busy_s, used, latency_of(problem, device_of))


def bound_of(problem: Problem, latency_s: float) -> tuple[float, str]:
    """Return a lower bound and the name of its proof, given a lower bound of the latency.

    For memory it is the maximum of an equal share of all weights with their optimizer state, the
    largest groups that must meet on some device, and the memory that one operator needs while it
    runs.
    """
    if problem.objective == "energy":
        power_w = powers_w(problem.topology)
        return energy_bound_j(power_w, problem.costs.op_time_s, latency_s), "work"
    operator_bytes = float(needed_bytes(problem).max())
    weights_bytes = _fullest_by_weights(problem)
    if operator_bytes > weights_bytes:
        return operator_bytes, "one operator"
    return weights_bytes, "weights"


def _fullest_by_weights(problem: Problem) -> float:
    """Return a lower bound of the weights on the fullest device.

    It is the maximum of an equal share, and pigeonhole bounds: of the k D + 1 groups with the
    largest weights, some device has k + 1. A weight counts for the first group that uses it.
    """
    graph, weight_bytes = problem.graph, problem.memory.weight_bytes
    devices = problem.topology.n_devices
    first = np.full(len(weight_bytes), graph.n_ops, dtype=np.int64)
    np.minimum.at(first, graph.uses, graph.group[graph.users])
    of_group = np.zeros(graph.n_ops + 1)
    np.add.at(of_group, first, weight_bytes)
    largest = np.sort(of_group[:-1])[::-1]
    so_far = np.concatenate([[0.0], np.cumsum(largest)])
    met = np.arange((graph.n_ops - 1) // devices + 1)
    together = so_far[met * devices + 1] - so_far[met * (devices - 1)]
    return float(max(np.ceil(so_far[-1] / devices), together.max()))


def annealed_whole(problem: Problem, device_of: IntArray, heat: float, seed: int) -> IntArray:
    """Return the best placement found by annealing `device_of`, first by modules, then operators.

    If placements are few, it is the optimum. A placement that fits still fits.
    """
    graph, costs = problem.graph, problem.costs
    log, memory_bytes = schedule_log(costs), problem.topology.memory_bytes
    atomic = atomic_units(graph)
    power_w = powers_w(problem.topology)
    energy = problem.objective == "energy"
    best = device_of.copy()
    tables = (costs, problem.memory, log, memory_bytes, power_w, energy)
    if are_few(problem, len(atomic[0]) - 1):
        _best_of_few(*tables, atomic, best)
        return best
    for number, units in enumerate([*_whole_groups(problem), atomic]):
        steps = min(_STEPS_A_UNIT * (len(units[0]) - 1), _MOST_STEPS, _MOST_WORK // graph.n_ops)
        hot = heat if number == 0 else heat / 3
        _anneal(*tables, units, best, seed + number, max(steps, _LEAST_STEPS), hot)
    return best


def _whole_groups(problem: Problem) -> list[Units]:
    """Return units of modules, coarse to fine, extended to whole groups."""
    group, levels, before = problem.graph.group, list[Units](), 0
    for start, ops in module_units(problem.graph):
        label = np.empty(len(ops), dtype=np.int64)
        label[ops] = np.repeat(np.arange(len(start) - 1), np.diff(start))
        counts = np.unique(label[group], return_inverse=True)[1]
        order = np.argsort(counts, kind="stable").astype(np.int64)
        ends = np.concatenate([[0], np.cumsum(np.bincount(counts))]).astype(np.int64)
        if len(ends) - 1 > max(before, 2 * problem.topology.n_devices):
            levels.append((ends, order))
            before = 2 * (len(ends) - 1)
    return levels


@inlined
def _energy(t: CostTables, log: ScheduleLog, power_w: FloatArray, device_of: IntArray) -> float:
    latency_s, _ = schedule(t, device_of, log)
    busy_s = np.zeros(power_w.shape[0])
    used = np.zeros(power_w.shape[0], dtype=np.bool_)
    for op in range(device_of.shape[0]):
        busy_s[device_of[op]] += t.op_time_s[op, device_of[op]]
        used[device_of[op]] = True
    total = 0.0
    for device in range(power_w.shape[0]):
        if used[device]:
            idle_s = max(latency_s - busy_s[device], 0.0)
            total += power_w[device] * (busy_s[device] + IDLE_SHARE * idle_s)
    return total


@compiled
def _best_of_few(  # noqa: PLR0917 - compiled: all by position
    t: CostTables,
    m: MemoryTables,
    log: ScheduleLog,
    memory_bytes: IntArray,
    power_w: FloatArray,
    energy: bool,
    units: Units,
    best_of: IntArray,
) -> None:
    """Set `best_of` (n,), which must fit, to the best of all placements of the units."""
    start, ops = units
    count, devices = start.shape[0] - 1, memory_bytes.shape[0]
    device_of, change = best_of.copy(), np.empty(best_of.shape[0] + 1, dtype=np.int64)
    best = np.inf
    for number in range(devices**count):
        digits = number
        for unit in range(count):
            device_of[ops[start[unit] : start[unit + 1]]] = digits % devices
            digits //= devices
        fullest, fits = 0, True
        for device in range(devices):
            peak = peak_on_device(m, device_of, device, change)
            fits = fits and peak <= memory_bytes[device]
            fullest = max(fullest, peak)
        if fits:
            value = _energy(t, log, power_w, device_of) if energy else float(fullest)
            if value < best:
                best = value
                best_of[:] = device_of


@compiled
def _anneal(  # noqa: PLR0917 - compiled: all by position
    t: CostTables,
    m: MemoryTables,
    log: ScheduleLog,
    memory_bytes: IntArray,
    power_w: FloatArray,
    energy: bool,
    units: Units,
    device_of: IntArray,
    seed: int,
    steps: int,
    hot: float,
) -> None:
    """Anneal `device_of` (n,) in place to the best found; a step moves a unit or swaps two.

    A unit may start on several devices, and is on one once it moves. Only devices that gain or lose
    operators change their peaks. The memory objective uses a norm of all peaks, so that other
    devices than the fullest count a little.
    """
    start, ops = units
    count, devices = start.shape[0] - 1, memory_bytes.shape[0]
    state, change = chance(seed), np.empty(device_of.shape[0] + 1, dtype=np.int64)
    peaks = np.empty(devices, dtype=np.int64)
    for device in range(devices):
        peaks[device] = peak_on_device(m, device_of, device, change)
    scale = max(1.0, float(peaks.max()))
    current_value = _energy(t, log, power_w, device_of) if energy else _norm(peaks, scale)
    best = current_value if energy else float(peaks.max())
    best_of, trial, trial_peaks = device_of.copy(), device_of.copy(), peaks.copy()
    touched = np.empty(devices, dtype=np.bool_)
    temperature, cooled = hot, (_COLD / hot) ** (1.0 / steps)
    for _ in range(steps):
        temperature *= cooled
        unit, other = below(state, count), below(state, count)
        moving, swapped = ops[start[unit] : start[unit + 1]], ops[start[other] : start[other + 1]]
        old = device_of[moving[0]]
        new = device_of[swapped[0]] if below(state, 2) else below(state, devices)
        if (device_of[moving] == new).all():
            continue
        touched[:] = False
        touched[new] = True
        for op in moving:
            touched[device_of[op]] = True
        trial[moving] = new
        if below(state, 3) == 0 and device_of[swapped[0]] == new:
            for op in swapped:
                touched[device_of[op]] = True
            trial[swapped] = old
        is_accepted = True
        for device in range(devices):
            if touched[device]:
                trial_peaks[device] = peak_on_device(m, trial, device, change)
                is_accepted = is_accepted and trial_peaks[device] <= memory_bytes[device]
        trial_value = current_value
        if is_accepted:
            trial_value = _energy(t, log, power_w, trial) if energy else _norm(trial_peaks, scale)
            is_accepted = np.log(trial_value / current_value) <= -temperature * np.log(
                share(state) + 1e-12
            )
        if not is_accepted:
            trial[:], trial_peaks[:] = device_of, peaks
            continue
        device_of[:], peaks[:], current_value = trial, trial_peaks, trial_value
        value = current_value if energy else float(peaks.max())
        if value < best:
            best = value
            best_of[:] = device_of
    device_of[:] = best_of


@inlined
def _norm(peaks: IntArray, scale: float) -> float:
    total = 0.0
    for device in range(peaks.shape[0]):
        total += (peaks[device] / scale) ** _POWER
    return float((total + 1e-300) ** (1.0 / _POWER))

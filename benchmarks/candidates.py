"""``python -m benchmarks.candidates``: time to evaluate the move of one operator, by model size.

``estimate`` evaluates only what the move affects (`fxpart.cost.incremental`); ``simulation`` is the
full simulation of the model that it replaces.
"""

import time

import numpy as np
import numpy.typing as npt

from benchmarks.synthetic import synthetic_graph
from fxpart import DeviceSpec, LatencyModel, Link, make_mode, make_problem, uniform_topology
from fxpart.cost.incremental import Progress, estimate, make_progress, refresh
from fxpart.cost.kernels import ScheduleLog, schedule, schedule_log
from fxpart.cost.tables import CostTables
from fxpart.support.compiled import compiled

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
MOVES = 20_000
SIMULATIONS = 200

_Ints = npt.NDArray[np.int64]


@compiled
def _estimates(t: CostTables, device_of: _Ints, p: Progress, ops: _Ints, targets: _Ints) -> float:
    """Estimate each move once; return the sum, so that none is optimized away."""
    total = 0.0
    for i in range(ops.shape[0]):
        old_device = device_of[ops[i]]
        device_of[ops[i]] = targets[i]
        latency_s, _, _ = estimate(t, device_of, p, ops[i], ops[i])
        total += latency_s
        device_of[ops[i]] = old_device
    return total


@compiled
def _simulations(t: CostTables, device_of: _Ints, log: ScheduleLog, count: int) -> float:
    total = 0.0
    for _ in range(count):
        latency_s, _ = schedule(t, device_of, log)
        total += latency_s
    return total


def _row(n: int) -> str:
    device = DeviceSpec("any", 16 * 10**9, {"float32": 1e13, "bfloat16": 1e14}, 1e12)
    topology = uniform_topology((device,) * 4, Link(25e9, 1e-5))
    problem = make_problem(synthetic_graph(n, 0), topology, LatencyModel())
    device_of = make_mode("size_based")(problem).device_of
    progress, log = make_progress(problem.costs), schedule_log(problem.costs)
    refresh(problem.costs, device_of, progress)
    rng = np.random.default_rng(0)
    ops, targets = rng.integers(0, n, MOVES), rng.integers(0, 4, MOVES)
    seconds = []
    for _ in range(4):  # the first call compiles
        begin = time.perf_counter()
        _estimates(problem.costs, device_of, progress, ops, targets)
        middle = time.perf_counter()
        _simulations(problem.costs, device_of, log, SIMULATIONS)
        end = time.perf_counter()
        seconds.append(((middle - begin) / MOVES, (end - middle) / SIMULATIONS))
    estimated, simulated = (min(column) for column in zip(*seconds[1:], strict=True))
    return f"{n:>9} {estimated * 1e6:>11.2f} {simulated * 1e6:>13.1f} {simulated / estimated:>7.0f}"


def main() -> None:
    """Print one row for each size."""
    print(f"{'operators':>9} {'estimate us':>11} {'simulation us':>13} {'ratio':>7}")
    for n in SIZES:
        print(_row(n), flush=True)


if __name__ == "__main__":
    main()

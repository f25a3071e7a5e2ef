"""A lower bound of the largest load by CP-SAT, the constraint solver of OR-Tools: an extra.

The whole problem is one model: each unit on one device, and for each output and device whether it
crosses the device's border. Times are rounded down to integers, so that the model's bound holds for
the problem. It closes problems of hundreds of units where the configuration LP leaves a gap
(`fxpart.placement.published.load_bound`).
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from fxpart.placement.published.loads import LoadSearch

__all__ = ["CpSatBound", "has_cp_sat"]

_PARTS = 10**8
"""Integer units of time per best load."""
_MOST_LITERALS = 200_000
"""Units and outputs, times devices, above which a model takes too long to be built."""
_FIRST_S, _LAST_S, _LAST_DETERMINISTIC_S = 1.0, 64.0, 4.0
"""Time limit of the first solution, doubled each time until the last; without a limit of time,
these are in OR-Tools' deterministic time, on one core."""
_ROUNDING = 1e-9


def has_cp_sat() -> bool:
    """Return whether OR-Tools is installed."""
    return find_spec("ortools") is not None


@dataclass(eq=False, slots=True)
class CpSatBound:
    """A bound that is improved step by step; a better placement found on the way is taken."""

    search: LoadSearch
    """The search for the same problem; its best placement is the solver's hint."""
    bound_s: float
    """The bound proven so far."""
    name: str = "CP-SAT"
    tolerance: float = 1e-5
    """Relative gap within which the best placement counts as proven."""
    next_limit_s: float = _FIRST_S
    """Time that the next solution needs; infinite after the last."""

    @property
    def is_done(self) -> bool:
        """Whether the bound cannot be improved further."""
        tables = self.search.tables
        literals = (len(tables.size_bytes) + len(tables.output_s)) * len(tables.pays)
        return (
            literals > _MOST_LITERALS
            or math.isinf(self.next_limit_s)
            or not self.search.elite
            or self.bound_s >= self.search.best_s * (1 - self.tolerance)
        )

    def step(self, limit_s: float) -> None:
        """Solve the model, if `limit_s` is as much as the solver gets next."""
        if limit_s < self.next_limit_s:
            return
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.random_seed = 0
        last_s = _LAST_S
        if math.isinf(limit_s):
            solver.parameters.num_workers = 1  # several are not deterministic
            solver.parameters.max_deterministic_time = self.next_limit_s
            last_s = _LAST_DETERMINISTIC_S
        else:
            solver.parameters.max_time_in_seconds = self.next_limit_s
        self.next_limit_s = 2 * self.next_limit_s if self.next_limit_s < last_s else math.inf
        part_s = self.search.best_s / _PARTS
        model, on_device = _model(self.search, part_s, self.bound_s)
        status = solver.status_name(_solved(solver, model))
        if status in ("OPTIMAL", "FEASIBLE"):
            device_of = [
                next(d for d, literal in enumerate(row) if solver.boolean_value(literal))
                for row in on_device
            ]
            self.search.take(np.array(device_of, dtype=np.int64))
        if status != "INFEASIBLE":  # which only rounding could cause
            proven_s = solver.best_objective_bound * part_s * (1 - _ROUNDING)
            self.bound_s = max(self.bound_s, min(proven_s, self.search.best_s))


def _solved(solver: Any, model: Any) -> Any:  # noqa: ANN401 - of a package that may not be installed
    """Return the status of a solution, which Ctrl-C ends."""
    solver.parameters.catch_sigint_signal = False  # else the solver keeps it to itself
    with ThreadPoolExecutor(1) as pool:
        solving = pool.submit(solver.solve, model)
        try:
            return solving.result()
        except KeyboardInterrupt:
            solver.stop_search()
            raise


def _model(search: LoadSearch, part_s: float, bound_s: float) -> tuple[Any, list[list[Any]]]:
    """Return the model, and for each unit a literal for each device; a load is above `bound_s`."""
    from ortools.sat.python import cp_model

    tables = search.tables
    units, devices = tables.time_s.shape
    model = cp_model.CpModel()
    on_device = [[model.new_bool_var("") for _ in range(devices)] for _ in range(units)]
    # Sums of rounded times are below the bound by as much as one part each.
    rounding = units + len(tables.output_s) + 1
    least = max(0, math.floor(bound_s / part_s) - rounding)
    largest = model.new_int_var(least, _PARTS + 1, "largest load")
    is_possible = tables.time_s <= 2 * search.best_s
    times = np.floor(np.where(is_possible, tables.time_s, 0.0) / part_s).astype(np.int64)
    moves = np.floor(np.minimum(tables.output_s, 2 * search.best_s) / part_s).astype(np.int64)
    for row, home in zip(on_device, search.elite[0].tolist(), strict=True):
        model.add_exactly_one(row)
        for device, literal in enumerate(row):
            model.add_hint(literal, int(device == home))
    for unit, device in np.argwhere(~is_possible).tolist():
        model.add(on_device[unit][device] == 0)
    for device in range(devices):
        column = [row[device] for row in on_device]
        terms = [*zip(column, times[:, device].tolist(), strict=True)]
        if tables.pays[device]:
            room = int(tables.room_bytes[device])
            sizes = tables.size_bytes.tolist()
            model.add(cp_model.LinearExpr.weighted_sum(column, sizes) <= room)
            terms += _crossings(model, search, column, moves.tolist())
        literals, weights = zip(*terms, strict=True)
        model.add(cp_model.LinearExpr.weighted_sum(literals, weights) <= largest)
    model.minimize(largest)
    return model, on_device


def _crossings(
    model: Any,  # noqa: ANN401 - of a package that may not be installed
    search: LoadSearch,
    column: list[Any],
    moves: list[int],
) -> list[tuple[Any, int]]:
    """Return a literal for each output that is moved to or from a device, with its time."""
    tables, terms = search.tables, []
    for output, move in enumerate(moves):
        if not move:
            continue
        begin, end = tables.output_start[output : output + 2].tolist()
        pins = [column[unit] for unit in tables.output_units[begin:end].tolist()]
        crosses, all_here = model.new_bool_var(""), model.new_bool_var("")
        for pin in pins:
            # A pin is elsewhere, or all are here, or the output crosses.
            model.add_bool_or([pin.negated(), all_here, crosses])
            model.add_implication(all_here, pin)
        terms.append((crosses, move))
    return terms

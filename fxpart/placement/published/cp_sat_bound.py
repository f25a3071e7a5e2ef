"""A lower bound of the largest load by CP-SAT, the constraint solver of OR-Tools: an extra.

The whole problem is one model: each unit on one device, and for each output and device whether it
crosses the device's border. Times are rounded down to whole parts of the best load, so that the
model's bound holds for the problem. It closes problems of hundreds of units whose largest loads the
relaxation of configurations misses (`fxpart.placement.published.load_bound`).
"""

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from fxpart.placement.published.loads import LoadSearch

__all__ = ["CpSatBound", "has_cp_sat"]

_PARTS = 10**6
"""Whole parts of the best load that times are measured in."""
_MOST_LITERALS = 200_000
"""Units and outputs, times devices, above which a model takes too long to be built."""
_FIRST_S, _LAST_S = 1.0, 64.0
"""Time limit of the first solution, doubled each time until the last; without a limit of time, in
OR-Tools' deterministic time."""
_ROUNDING = 1e-6


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
    _limit_s: float = _FIRST_S

    @property
    def is_done(self) -> bool:
        """Whether the bound cannot be improved further."""
        tables = self.search.tables
        literals = (len(tables.size_bytes) + len(tables.output_s)) * len(tables.pays)
        return (
            literals > _MOST_LITERALS
            or self._limit_s > _LAST_S
            or not self.search.elite
            or self.bound_s >= self.search.best_s * (1 - self.tolerance)
        )

    def step(self, limit_s: float) -> None:
        """Solve the model, if `limit_s` is as much as the solver gets next."""
        if limit_s < self._limit_s:
            return
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.random_seed = 0
        if math.isinf(limit_s):
            solver.parameters.num_workers = 1  # several are not deterministic
            solver.parameters.max_deterministic_time = self._limit_s
        else:
            solver.parameters.max_time_in_seconds = self._limit_s
        self._limit_s *= 2
        part_s = self.search.best_s / _PARTS
        model, on_device = _model(self.search, part_s)
        status = solver.status_name(solver.solve(model))
        if status in ("OPTIMAL", "FEASIBLE"):
            device_of = [
                next(d for d, literal in enumerate(row) if solver.boolean_value(literal))
                for row in on_device
            ]
            self.search.take(np.array(device_of, dtype=np.int64))
        if status != "INFEASIBLE":  # which only rounding could cause
            proven_s = solver.best_objective_bound * part_s * (1 - _ROUNDING)
            self.bound_s = max(self.bound_s, min(proven_s, self.search.best_s))


def _model(search: LoadSearch, part_s: float) -> tuple[Any, list[list[Any]]]:
    """Return the model, and for each unit a literal for each device."""
    from ortools.sat.python import cp_model

    tables = search.tables
    units, devices = tables.time_s.shape
    model = cp_model.CpModel()
    on_device = [[model.new_bool_var("") for _ in range(devices)] for _ in range(units)]
    largest = model.new_int_var(0, _PARTS + 1, "largest load")
    is_possible = np.isfinite(tables.time_s)
    times = np.floor(np.where(is_possible, tables.time_s, 0.0) / part_s).astype(np.int64)
    moves = np.floor(tables.output_s / part_s).astype(np.int64)
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

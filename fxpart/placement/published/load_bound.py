"""A lower bound of the largest load: a configuration LP by column generation and bisection.

A *configuration* is a set of units that one device can hold with a load of at most T. T is
unreachable if no fractional combination of configurations, with as many as there are devices of
each kind, covers all units. By linear programming duality, this is the case if there are prices of
units whose sum exceeds the total price of the most expensive configurations of all devices. Those
are found by integer programming with HiGHS. This resembles the cutting stock problem of Gilmore and
Gomory, doi:10.1287/opre.9.6.849; that intermediate prices give bounds too is due to Farley,
doi:10.1287/opre.38.5.922.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.placement.published.loads import LoadSearch
from fxpart.placement.search.load_tables import LoadTables, loads_of

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

__all__ = ["ConfigurationBound"]

_MOST_UNITS = 400
"""Number of units above which an integer program takes too long."""
_MOST_NODES = 500
"""Node limit for one configuration; if it is reached, the bound so far is used."""
_NEAR = 1e-3
"""Relative gap below which a load just below the best is tried instead of the midpoint."""
_MET = 1e-5
"""Relative gap that counts as closed, since solver tolerances relax configurations."""
_ROUNDING = 1e-7


@dataclass(eq=False, slots=True)
class ConfigurationBound:
    """A deterministic bound that is improved step by step; devices are those of a workload."""

    search: LoadSearch
    """The search for the same problem; its best placements provide initial configurations."""
    bound_s: float
    """The bound proven so far, initially from work."""
    name: str = "work"
    """Name of the proof."""
    tolerance: float = _MET
    """Relative gap within which the best placement counts as proven."""
    _least_open_s: float = np.inf
    """A load reached by fractional configurations, so no higher bound can be proven."""
    _trial_s: float = 0.0
    """The load under trial; 0 between trials."""
    _learned_s: float = np.inf
    """The best load whose placement has provided configurations."""
    _patience_s: float = 0.0
    """Time limit from which a step that timed out is retried."""
    _columns: list[tuple[bool, float, FloatArray]] = field(default_factory=list)
    """Known configurations: (whether on an accelerator, load in s, 0/1 mask of units (U,))."""

    @property
    def tables(self) -> LoadTables:
        """The units and devices."""
        return self.search.tables

    @property
    def is_done(self) -> bool:
        """Whether the bound cannot be improved further."""
        if len(self.tables.size_bytes) > _MOST_UNITS or not self.search.elite:
            return True
        return self.bound_s >= min(self.search.best_s, self._least_open_s) * (1 - _MET)

    def step(self, limit_s: float) -> None:
        """Price configurations once, for up to `limit_s` each, at the load under trial."""
        if limit_s < self._patience_s:
            return
        best_s = self.search.best_s
        if best_s < self._learned_s:
            self._learned_s = best_s
            self._learn(self.search.elite[0])
        if self._trial_s <= self.bound_s or self._trial_s >= self._least_open_s:
            most_s = min(best_s, self._least_open_s)
            near = most_s - self.bound_s <= _NEAR * most_s
            self._trial_s = most_s * (1 - _MET / 2) if near else (self.bound_s + most_s) / 2
        trial_s = self._trial_s
        prices, worth, highest_prices = self._prices(trial_s)
        if worth <= 1 + _ROUNDING:
            self._least_open_s = trial_s
            return
        reached, improved, cut_short = 0.0, False, False
        for on_accelerator in (True, False):
            count = int((self.tables.pays == on_accelerator).sum())
            if count:
                begin = time.monotonic()
                value, column = self._dearest(prices, trial_s, on_accelerator, limit_s)
                cut_short |= time.monotonic() - begin >= limit_s
                reached += count * value
                if (
                    column
                    and float(column[2] @ prices) > highest_prices[on_accelerator] + _ROUNDING
                ):
                    self._columns.append(column)
                    improved = True
        if reached < worth * (1 - _ROUNDING):
            self.bound_s, self.name = trial_s, "configuration LP"
        elif not improved and cut_short:
            self._patience_s = 2 * limit_s
        elif not improved:
            self._least_open_s = trial_s  # rounding or the node limit prevents a proof here

    def _learn(self, device_of: IntArray) -> None:
        """Add the units of each device in a placement as configurations."""
        for device, load_s in enumerate(loads_of(self.tables, device_of).tolist()):
            units = (device_of == device).astype(np.float64)
            self._columns.append((bool(self.tables.pays[device]), load_s, units))

    def _prices(self, trial_s: float) -> tuple[FloatArray, float, dict[bool, float]]:
        """Return unit prices (U,), their sum, and the highest known price per kind of device."""
        from scipy.optimize import linprog

        units = len(self.tables.size_bytes)
        usable = [column for column in self._columns if column[1] <= trial_s * (1 + _ROUNDING)]
        rows = np.zeros((len(usable) + 1, units + 2))
        for row, (on_accelerator, _, chosen_units) in zip(rows, usable, strict=False):
            row[:units] = chosen_units
            row[units + (not on_accelerator)] = -1.0
        accelerators = int(self.tables.pays.sum())
        rows[-1, units:] = accelerators, len(self.tables.pays) - accelerators
        right = np.zeros(len(rows))
        right[-1] = 1.0
        goal = np.concatenate([-np.ones(units), np.zeros(2)])
        solution = linprog(goal, A_ub=rows, b_ub=right, bounds=(0.0, 1.0), method="highs")
        highest_prices = {True: float(solution.x[units]), False: float(solution.x[units + 1])}
        return solution.x[:units], float(solution.x[:units].sum()), highest_prices

    def _dearest(
        self, prices: FloatArray, trial_s: float, on_accelerator: bool, limit_s: float
    ) -> tuple[float, tuple[bool, float, FloatArray] | None]:
        """Return an upper bound of a configuration's price, and the most expensive one found."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        t, device = self.tables, int(np.argmax(self.tables.pays == on_accelerator))
        times, units = t.time_s[:, device], len(t.size_bytes)
        possible = np.isfinite(times) & (times <= trial_s)
        outputs = len(t.output_s) if on_accelerator else 0
        moved = np.concatenate([t.output_s, -t.output_s])[: 2 * outputs]
        load = np.concatenate([np.where(possible, times, 0.0), moved])
        # Scaled by the trial load, since the solver's tolerances are absolute.
        constraints = [LinearConstraint(load[None, :] / trial_s, -np.inf, 1.0)]
        if on_accelerator:
            share = t.size_bytes / max(1, int(t.room_bytes[device]))
            share = np.concatenate([share, np.zeros(2 * outputs)])
            constraints += [
                LinearConstraint(share[None, :], -np.inf, 1.0),
                LinearConstraint(_crossing(t), 0.0, np.inf),
            ]
        upper = np.ones(units + 2 * outputs)
        upper[:units] = possible
        solution = milp(
            -np.concatenate([prices, np.zeros(2 * outputs)]),
            constraints=constraints,
            integrality=np.arange(len(upper)) < units,
            bounds=Bounds(0.0, upper),
            options={"node_limit": _MOST_NODES, "time_limit": limit_s, "mip_rel_gap": 1e-6},
        )
        bound = float(prices.sum()) if solution.mip_dual_bound is None else -solution.mip_dual_bound
        if solution.x is None:
            return bound, None
        chosen_units = np.round(solution.x[:units])
        return bound, (on_accelerator, float(load @ solution.x), chosen_units)


def _crossing(t: LoadTables) -> "csr_matrix":
    """Return constraint rows (>= 0) that bound two indicators of each output by its units.

    The columns are the units (U), then indicators (E) that any unit of an output is in the
    configuration, then indicators (E) that all are. Their difference is whether the output crosses
    the boundary.
    """
    from scipy.sparse import coo_matrix

    units, outputs, pins = len(t.size_bytes), len(t.output_s), len(t.output_units)
    output = np.repeat(np.arange(outputs), np.diff(t.output_start))
    row, ones = np.arange(pins), np.ones(pins)
    rows = np.concatenate([row, row, pins + row, pins + row])
    columns = np.concatenate(
        [units + output, t.output_units, t.output_units, units + outputs + output]
    )
    signs = np.concatenate([ones, -ones, ones, -ones])
    return coo_matrix((signs, (rows, columns)), shape=(2 * pins, units + 2 * outputs)).tocsr()

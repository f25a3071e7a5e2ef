"""A largest load that no placement beats: a configuration LP, by column generation and bisection.

A *configuration* is what one device may hold with a load of T at most. T cannot be reached where no
fractions of configurations, as many as there are devices of each kind, cover all units: by linear
programming duality, where units have prices whose sum exceeds what the dearest configurations of
all devices add to. Those are found by integer programming with HiGHS. As the cutting stock problem
of Gilmore and Gomory, doi:10.1287/opre.9.6.849; that intermediate prices prove something too is
Farley's bound, doi:10.1287/opre.38.5.922.
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
"""Units above which one integer program takes too long."""
_MOST_NODES = 500
"""Of branch and bound for one configuration; where it ends so, its bound counts."""
_NEAR = 1e-3
"""Gap below which the load right below the best is tried in place of the middle."""
_MET = 1e-5
"""Gap that counts as none: the solver's tolerances add to what a configuration may take."""
_ROUNDING = 1e-7


@dataclass(eq=False, slots=True)
class ConfigurationBound:
    """A bound that rises step by step, the same in each process; devices as of a workload."""

    search: LoadSearch
    """The search of the same problem; what its best placements hold is known to begin with."""
    bound_s: float
    """Proven so far: to begin with, from work."""
    name: str = "work"
    """What proves it."""
    tolerance: float = _MET
    """Share that the best may be above it and count as proven."""
    _least_open_s: float = np.inf
    """A load that fractions of known configurations reach: no higher bound can be proven."""
    _trial_s: float = 0.0
    """The load that is being looked at; 0 between two."""
    _learned_s: float = np.inf
    """The best load whose placement has been looked at."""
    _patience_s: float = 0.0
    """The least limit with which a step that was cut short is tried again."""
    _columns: list[tuple[bool, float, FloatArray]] = field(default_factory=list)
    """Configurations known: whether of an accelerator, load in s, units (U,) of 0 and 1."""

    @property
    def tables(self) -> LoadTables:
        """The units and devices."""
        return self.search.tables

    @property
    def is_done(self) -> bool:
        """Whether the bound is as good as it will be."""
        if len(self.tables.size_bytes) > _MOST_UNITS or not self.search.elite:
            return True
        return self.bound_s >= min(self.search.best_s, self._least_open_s) * (1 - _MET)

    def step(self, limit_s: float) -> None:
        """Look once for the dearest configurations, for `limit_s` each, at the load under trial."""
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
        prices, worth, most = self._prices(trial_s)
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
                if column and float(column[2] @ prices) > most[on_accelerator] + _ROUNDING:
                    self._columns.append(column)
                    improved = True
        if reached < worth * (1 - _ROUNDING):
            self.bound_s, self.name = trial_s, "configuration LP"
        elif not improved and cut_short:
            self._patience_s = 2 * limit_s
        elif not improved:
            self._least_open_s = trial_s  # rounding, or too many nodes: nothing is proven here

    def _learn(self, device_of: IntArray) -> None:
        """Take what each device holds in a placement as configurations."""
        for device, load_s in enumerate(loads_of(self.tables, device_of).tolist()):
            held = (device_of == device).astype(np.float64)
            self._columns.append((bool(self.tables.pays[device]), load_s, held))

    def _prices(self, trial_s: float) -> tuple[FloatArray, float, dict[bool, float]]:
        """Return prices of the units (U,), their sum, and the most known for a device of a kind."""
        from scipy.optimize import linprog

        units = len(self.tables.size_bytes)
        known = [column for column in self._columns if column[1] <= trial_s * (1 + _ROUNDING)]
        rows = np.zeros((len(known) + 1, units + 2))
        for row, (on_accelerator, _, held) in zip(rows, known, strict=False):
            row[:units] = held
            row[units + (not on_accelerator)] = -1.0
        accelerators = int(self.tables.pays.sum())
        rows[-1, units:] = accelerators, len(self.tables.pays) - accelerators
        right = np.zeros(len(rows))
        right[-1] = 1.0
        goal = np.concatenate([-np.ones(units), np.zeros(2)])
        found = linprog(goal, A_ub=rows, b_ub=right, bounds=(0.0, 1.0), method="highs")
        most = {True: float(found.x[units]), False: float(found.x[units + 1])}
        return found.x[:units], float(found.x[:units].sum()), most

    def _dearest(
        self, prices: FloatArray, trial_s: float, on_accelerator: bool, limit_s: float
    ) -> tuple[float, tuple[bool, float, FloatArray] | None]:
        """Return an upper bound of what a device's units cost together, and the dearest found."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        t, device = self.tables, int(np.argmax(self.tables.pays == on_accelerator))
        times, units = t.time_s[:, device], len(t.size_bytes)
        possible = np.isfinite(times) & (times <= trial_s)
        outputs = len(t.output_s) if on_accelerator else 0
        moved = np.concatenate([t.output_s, -t.output_s])[: 2 * outputs]
        load = np.concatenate([np.where(possible, times, 0.0), moved])
        # In units of the trial, since the solver's tolerances are absolute.
        constraints = [LinearConstraint(load[None, :] / trial_s, -np.inf, 1.0)]
        if on_accelerator:
            share = t.size_bytes / max(1, int(t.room_bytes[device]))
            share = np.concatenate([share, np.zeros(2 * outputs)])
            constraints += [
                LinearConstraint(share[None, :], -np.inf, 1.0),
                LinearConstraint(_crossing(t), 0.0, np.inf),
            ]
        most = np.ones(units + 2 * outputs)
        most[:units] = possible
        found = milp(
            -np.concatenate([prices, np.zeros(2 * outputs)]),
            constraints=constraints,
            integrality=np.arange(len(most)) < units,
            bounds=Bounds(0.0, most),
            options={"node_limit": _MOST_NODES, "time_limit": limit_s, "mip_rel_gap": 1e-6},
        )
        bound = float(prices.sum()) if found.mip_dual_bound is None else -found.mip_dual_bound
        if found.x is None:
            return bound, None
        held = np.round(found.x[:units])
        return bound, (on_accelerator, float(load @ found.x), held)


def _crossing(t: LoadTables) -> "csr_matrix":
    """Return rows that are at least 0: an output's first end is above its units, its last below.

    After the units (U) come the outputs' first ends (E), 1 where any unit is held, then their last
    ends (E), 0 where any is not. The difference is whether the output crosses the border.
    """
    from scipy.sparse import coo_matrix

    units, outputs, pins = len(t.size_bytes), len(t.output_s), len(t.output_units)
    output = np.repeat(np.arange(outputs), np.diff(t.output_start))
    row, one = np.arange(pins), np.ones(pins)
    rows = np.concatenate([row, row, pins + row, pins + row])
    columns = np.concatenate(
        [units + output, t.output_units, t.output_units, units + outputs + output]
    )
    signs = np.concatenate([one, -one, one, -one])
    return coo_matrix((signs, (rows, columns)), shape=(2 * pins, units + 2 * outputs)).tocsr()

"""`pipeline`: stages in model order, cut at named modules or to minimize the largest load.

With ``stages`` the cut is exact: among all contiguous cuts in graph order whose stages fit, one
with the smallest largest load, and among these the most even (`fxpart.placement.stages.even_cuts`).
In a training step the forward is cut; the backward of a stage is on the same device and counts.
There, a longer stage can need less memory in rare cases: the result fits, but cuts that fit only
for this reason may be missed.

Memory is that of one input, its backward and the weight updates. With ``schedule`` it is that of a
whole step: all inputs and results, and the microbatches in flight, most of which are on the first
devices.

With ``interleave`` above 1 it is a search. It starts from the cut with the smallest largest stage,
where each stage may use a share of its device's memory; decreasing shares are tried until the
stages of each device fit together. If none do, cuts are shifted until they fit, or cuts at modules
are tried; it ends at once if all devices cannot hold the end of a step, or if the first cuts need
far more than they have. Then cuts are shifted to balance the devices, round by round
(`fxpart.placement.stages.shift_cuts`).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray
from fxpart.core.partitions import partition_by_homes
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.problem import Problem
from fxpart.errors import NotApplicableError, SpecError
from fxpart.placement.device_order import (
    fastest_first,
    moved,
    on_devices,
    orders_of_kinds,
    useful_devices,
)
from fxpart.placement.single import single_device
from fxpart.placement.stages.contiguous import EQUAL_LOADS, Slots, StageSolver, Stretch
from fxpart.placement.stages.infeasible import no_cut_fits, stage_does_not_fit, too_few_cuts
from fxpart.placement.stages.line import StageLine, stage_line
from fxpart.placement.stages.module_cuts import cuts_by_depth, named_cuts
from fxpart.placement.stages.shift_cuts import CutShifter
from fxpart.placement.stages.step_plan import StepMemory, StepPlan
from fxpart.placement.stages.stretch_bytes import Flight
from fxpart.schedule.from_assignment import stage_costs
from fxpart.schedule.least_step import least_step_s
from fxpart.schedule.simulate import simulate_schedule

__all__ = ["PipelineOptions", "pipeline"]


_SHARES = 8
"""Number of shares of a device's memory tried as the limit of one of several stages."""
_MOST_SHARE_SEARCHED = 1.35
"""`CutShifter.memory_share` above which no other cuts are tried. A rule of thumb: of 160 random
graphs on devices with just enough memory, one is refused only because of this."""
_PRECISION_BEFORE_SHIFTS = 1e-4
"""Precision of the largest load of stages whose cuts are shifted afterwards."""
_MOST_COUNTS, _MOST_ACTIONS = 32, 20_000
"""Most devices, and devices times microbatches, for which every number of stages is tried."""
_ORDER_GAIN = 0.01
"""Share of the largest load that another order of devices must save if it has more stages or a
longer latency; less if `PipelineOptions.boundary_gain` is."""
_MOST_REPAIRS = 200
"""Most cuts of a training step that may turn out not to fit before giving up."""


@dataclass(frozen=True)
class PipelineOptions:
    """Where to cut: `stages` or `cut_after`, or neither for at most as many stages as devices."""

    stages: int | None = None
    """Number of stages; stage s goes to device s, modulo the number of devices in use."""
    cut_after: Sequence[str] = ()
    """Paths of modules, in the model's order; a stage ends after the last operator of each."""
    interleave: int = 1
    """Stages per device: with c, stages 0, D, 2 D, ... of c D are on device 0."""
    schedule: str = "none"
    """The schedule of the stages, one of `fxpart.schedule.SCHEDULES`; ``none`` for one input at a
    time."""
    microbatches: int = 1
    """Number of microbatches per step, with a schedule."""
    boundary_gain: float | None = 0.01
    """Share of the largest load that cuts inside modules must save to be used; None for any."""

    def __post_init__(self) -> None:
        """Check numbers and paths, and that only one way to cut is given."""
        cut_after = [self.cut_after] if isinstance(self.cut_after, str | int) else self.cut_after
        if not isinstance(cut_after, Sequence) or any(type(p) not in (str, int) for p in cut_after):
            raise SpecError(
                f"mode.cut_after must be a list of module paths, got {self.cut_after!r}; such as"
                " mode.cut_after=[model.layers.9,model.layers.19]"
            )
        # On a command line, the path of a Sequential's child is parsed as a number.
        object.__setattr__(self, "cut_after", tuple(str(path) for path in cut_after))
        if self.stages is not None and (type(self.stages) is not int or self.stages < 1):
            raise SpecError(f"mode.stages must be a whole number, 1 or more, got {self.stages!r}")
        if self.interleave < 1:
            raise SpecError(f"mode.interleave must be at least 1, got {self.interleave}")
        if self.stages is not None and self.cut_after:
            raise SpecError(
                f"mode=pipeline was given both mode.stages={self.stages} and mode.cut_after, which"
                f" makes {len(self.cut_after) + 1} stages; give one"
            )
        gain = self.boundary_gain
        if gain is not None and not (type(gain) in (int, float) and 0 <= gain < 1):
            raise SpecError(
                f"mode.boundary_gain must be at least 0 and below 1, or null, got {gain!r}"
            )
        _ = self.plan
        count = self.stages or (len(self.cut_after) + 1 if self.cut_after else self.interleave)
        if count % self.interleave:
            raise NotApplicableError(
                f"mode.interleave={self.interleave} puts that many stages on each device, which "
                f"does not divide {count} stages; use a multiple of {self.interleave}"
            )

    @property
    def plan(self) -> StepPlan:
        """The schedule and microbatches of a step."""
        return StepPlan(self.schedule, self.microbatches)


def pipeline(problem: Problem, options: PipelineOptions | None = None) -> Assignment:
    """Cut the model into stages in its order, without replicas. Deterministic.

    Partition s is stage s, unless the model is a training step: then a device's stages have
    partitions for the forward and the backward (`fxpart.core.partitions.partition_by_homes`).

    With neither `stages` nor `cut_after`, some orders of unlike devices are tried, the fastest
    first to begin with, and devices may stay idle; ties go to fewer stages. With a schedule, the
    number of stages is that of the shortest step. Interleaved stages go to the fastest first.

    Raises:
        SpecError: if a path does not exist or a stage would be empty.
        NotApplicableError: if there are more stages than devices (times `interleave`).
        InfeasibleError: if a stage given by `cut_after` does not fit its device, or no cut into
            this many stages was found to fit.

    """
    chosen = options or PipelineOptions()
    if chosen.stages is None and not chosen.cut_after:
        useful = useful_devices(problem)
        if chosen.interleave > 1 or len(useful) == problem.topology.n_devices:
            return fastest_first(_cut)(problem, chosen)
        restricted_plan = fastest_first(_cut)(on_devices(problem, useful.tolist()), chosen)
        return moved(restricted_plan, useful.tolist())
    return _cut(problem, chosen)


def _cut(problem: Problem, options: PipelineOptions) -> Assignment:
    line = stage_line(problem, options.microbatches)
    if options.cut_after:
        stages = _by_name(problem, line, options)
        _refuse_overfull(problem, line, stages, options)
        return _assignment(problem, line, stages)
    levels = [] if options.boundary_gain is None else cuts_by_depth(problem.graph, line.stretches)
    rows = [line.merged(cuts) for cuts in levels]
    if options.interleave > 1:
        return _interleaved(problem, line, rows, options)
    if options.schedule != "none" and options.stages is None:
        return _shortest_step(problem, line, rows, options)
    placed = None
    for cut in _improving_cuts(problem, line, rows, options):
        placed = _assignment(problem, cut.line, cut.stages)
    if placed is None:
        # A whole model can need less than its stages; with a schedule this is unknown.
        alone = options.stages is None and options.schedule == "none"
        placed = single_device(problem) if alone else None
    if placed is None:
        flight = _slots(problem, line, options).flights[0]
        raise no_cut_fits(problem, line, options.stages, flight=flight)
    return placed


def _by_name(problem: Problem, line: StageLine, options: PipelineOptions) -> list[Stretch]:
    cuts = named_cuts(problem.graph, line.unit_of, options.cut_after)
    devices = _devices_in_use(problem, line, len(cuts) + 1, options.interleave)
    ends = [*cuts, line.n_units]
    begins = [0, *cuts]
    return [
        Stretch(begin, end, stage % devices)
        for stage, (begin, end) in enumerate(zip(begins, ends, strict=True))
    ]


def _devices_in_use(problem: Problem, line: StageLine, stages: int, interleave: int) -> int:
    """Return the number of devices for this many stages, or refuse."""
    devices, available = stages // interleave, problem.topology.n_devices
    if devices > available:
        per_device = f" of {interleave} stages each" if interleave > 1 else ""
        raise NotApplicableError(
            f"mode=pipeline was set to {stages} stages, which take {devices} devices{per_device},"
            f" but there are {available}; use fewer stages, or more on each device with"
            " mode.interleave"
        )
    if stages > line.n_units:
        raise too_few_cuts(problem.graph, line, stages)
    return devices


def _refuse_overfull(
    problem: Problem, line: StageLine, stages: list[Stretch], options: PipelineOptions
) -> None:
    sizes = problem.topology.memory_bytes
    needed = peak_bytes(problem.memory, _device_of(line, stages), len(sizes))
    if options.schedule != "none":
        homes = [stage.device for stage in stages]
        step = StepMemory(problem, line, homes, options.plan)
        needed[: max(homes) + 1] = step.peak_bytes(_cuts(stages))
    if (needed > sizes).any():
        raise stage_does_not_fit(problem, needed, [s.device for s in stages], options.cut_after)


def _slots(
    problem: Problem,
    line: StageLine,
    options: PipelineOptions,
    devices: Sequence[int] | None = None,
) -> Slots:
    """Return a slot for each usable device, in the order of `devices`."""
    if options.stages is not None:
        _devices_in_use(problem, line, options.stages, 1)
    if devices is None:
        devices = range(options.stages or problem.topology.n_devices)
    sizes = [problem.topology.devices[device].memory_bytes for device in devices]
    flights = _flights(problem, line, options, len(devices))
    # Under a schedule the longest forward and backward can be those of different stages.
    prefer_more = options.schedule != "none"
    return Slots(devices, sizes, options.stages is None, flights, prefer_more)


class _Cut(NamedTuple):
    """Stages of one row of units."""

    line: StageLine
    stages: list[Stretch]
    largest_s: float
    """Their largest load."""

    def improves(self, other: "_Cut", boundary_gain: float) -> bool:
        """Return whether this is better: a smaller load, fewer stages, or a shorter latency.

        Assumes that its load is not larger, up to rounding.
        """
        if self.line.n_units > other.line.n_units:
            return self.largest_s * (1 + max(boundary_gain, EQUAL_LOADS)) < other.largest_s
        least_gain = max(min(boundary_gain, _ORDER_GAIN), EQUAL_LOADS)
        if self.largest_s * (1 + least_gain) < other.largest_s:
            return True
        if len(self.stages) != len(other.stages):
            return len(self.stages) < len(other.stages)
        return self._latency_s() < other._latency_s() * (1 - EQUAL_LOADS)

    def _latency_s(self) -> float:
        """Return the time of one input through all stages."""
        before_s = self.line.load_before_s
        loads_s = [before_s[s.device, s.end] - before_s[s.device, s.begin] for s in self.stages]
        latency_s = float(sum(loads_s))
        for source, target in itertools.pairwise(self.stages):
            latency_s += float(self.line.receive_s(source.device, target.device)[target.begin])
        return latency_s


def _improving_cuts(
    problem: Problem,
    line: StageLine,
    rows: Sequence[StageLine],
    options: PipelineOptions,
    max_devices: int | None = None,
) -> list[_Cut]:
    """Return better and better cuts, the last of which is the one to use; empty if none fit.

    The first is on devices in their order, later ones on other orders (`orders_of_kinds`). Without
    a number of stages, the first `max_devices` may be used, or all.
    """
    orders: Sequence[Sequence[int]] = [range(options.stages or 0)]
    if options.stages is None:
        devices = range(max_devices or problem.topology.n_devices)
        orders = orders_of_kinds(on_devices(problem, devices))
    solvers, cuts = dict[StageLine, StageSolver](), list[_Cut]()
    for order in orders:
        slots = _slots(problem, line, options, order)
        at_most_s = cuts[-1].largest_s * (1 + EQUAL_LOADS) if cuts else np.inf
        cut = _least_cut([*rows, line], slots, solvers, options, at_most_s)
        if cut is not None and (not cuts or cut.improves(cuts[-1], options.boundary_gain or 0.0)):
            cuts.append(cut)
    return cuts


def _least_cut(
    rows: Sequence[StageLine],
    slots: Slots,
    solvers: dict[StageLine, StageSolver],
    options: PipelineOptions,
    at_most_s: float,
) -> _Cut | None:
    """Return the stages with the smallest largest load up to `at_most_s`, or None if none fit.

    The units of `rows` are bounded by modules, coarse rows first, the last by anything. The first
    row with a load hardly larger than that of the last is used.
    """
    anywhere = _in_a_row(rows[-1], slots, solvers, at_most_s)
    if anywhere is None:
        return None
    allowed_s = anywhere.largest_s * (1 + (options.boundary_gain or 0.0)) * (1 + EQUAL_LOADS)
    for row in rows[:-1]:
        if row.n_units >= (options.stages or 1):
            at_modules = _in_a_row(row, slots, solvers, min(at_most_s, allowed_s))
            if at_modules is not None:
                return at_modules
    return anywhere


def _shortest_step(
    problem: Problem, line: StageLine, rows: Sequence[StageLine], options: PipelineOptions
) -> Assignment:
    """Return the stages, on one or more devices, with the shortest step under the schedule.

    With few microbatches, more stages mostly wait for each other, and more devices have more
    microbatches in flight.
    """
    devices = problem.topology.n_devices
    counts = range(devices, 0, -1)
    if devices * options.microbatches > _MOST_ACTIONS or devices > _MOST_COUNTS:
        counts = range(devices, 0, -max(1, devices - 1))
    best, least_s = None, float("inf")
    repeated = ~problem.graph.is_update
    work_s = float(problem.costs.op_time_s[repeated].min(axis=1).sum())
    for count in counts:
        if least_step_s(work_s, count, options.microbatches) >= least_s:
            break  # fewer stages take even longer
        for cut in _improving_cuts(problem, line, rows, options, count):
            placed = _assignment(problem, cut.line, cut.stages)
            costs = stage_costs(problem, placed)
            result = simulate_schedule(options.schedule, costs, options.microbatches)
            sizes = problem.topology.memory_bytes[list(result.devices)]
            if result.step_s < least_s * (1 - EQUAL_LOADS) and (sizes >= result.peak_bytes).all():
                best, least_s = placed, result.step_s
    if best is None:
        flight = _slots(problem, line, options).flights[0]
        raise no_cut_fits(problem, line, None, flight=flight)
    return best


def _in_a_row(
    line: StageLine, slots: Slots, solvers: dict[StageLine, StageSolver], at_most_s: float
) -> _Cut | None:
    """Return the best stages, at most one per slot, or None if none fit within `at_most_s`.

    `solvers` are those of earlier orders of devices, by row; they share most of their tables.
    """
    known = solvers.get(line)
    solver = StageSolver(line, slots) if known is None else known.with_slots(slots)
    solvers[line] = solver
    for _ in range(_MOST_REPAIRS):
        stages = solver.least_load(at_most_s)
        if stages is None:
            return None
        over = [stage for stage in stages if not solver.fits(stage)]
        if not over:
            return _Cut(line, stages, solver.largest_s(stages))
        # Only possible with a backward, where a stage can need more than a longer one.
        for stage in over:
            solver.forbid(stage)
    return None


def _interleaved(
    problem: Problem, line: StageLine, rows: Sequence[StageLine], options: PipelineOptions
) -> Assignment:
    """Return several stages per device, cut at modules if that is hardly slower, or alone fits."""
    interleave = options.interleave
    count = options.stages or interleave * min(
        problem.topology.n_devices, line.n_units // interleave
    )
    devices = _devices_in_use(problem, line, max(count, interleave), interleave)
    homes = [stage % devices for stage in range(max(count, interleave))]
    rows = [row for row in rows if row.n_units >= len(homes)]
    chosen = _shifted(problem, line, homes, options)
    if chosen is None:
        # The search may find among few cuts what it misses among many.
        at_modules = [cut for row in rows if (cut := _shifted(problem, row, homes, options))]
        chosen = min(at_modules, key=lambda cut: cut.busy_s, default=None)
    else:
        allowed_s = chosen.busy_s * (1 + (options.boundary_gain or 0.0))
        at_module = (_shifted(problem, row, homes, options) for row in rows)
        chosen = next((cut for cut in at_module if cut and cut.busy_s <= allowed_s), chosen)
    if chosen is None:
        flight = _flights(problem, line, options, devices)[0]
        raise no_cut_fits(problem, line, len(homes), interleave, flight)
    return _assignment(problem, chosen.line, _stretches(chosen.cuts, homes))


class _RoundCut(NamedTuple):
    """Cuts of one row of units into stages that go round the devices and fit."""

    line: StageLine
    cuts: IntArray
    busy_s: float
    """The busy time of `CutShifter.busy_s`."""


def _shifted(
    problem: Problem, line: StageLine, homes: list[int], options: PipelineOptions
) -> _RoundCut | None:
    """Return cuts into stages that fit, balanced by shifting, or None if none were found."""
    if line.end_bytes > problem.topology.memory_bytes[: max(homes) + 1].sum():
        return None
    flights = _flights(problem, line, options, max(homes) + 1)
    divided = options.schedule != "none"
    step = StepMemory(problem, line, homes, options.plan) if divided else None
    shifter = CutShifter(problem, line, homes, step)

    def evened(fitting: IntArray) -> _RoundCut:
        cuts = shifter.evened(fitting)
        return _RoundCut(line, cuts, shifter.busy_s(cuts))

    by_share: list[IntArray] = []
    for cuts in _by_shares(problem, line, homes, flights):
        if shifter.fits(cuts):
            return evened(cuts)
        if shifter.memory_share(cuts) > _MOST_SHARE_SEARCHED:
            return None
        by_share.append(cuts)
    # If equal shares are too small for any stages, unequal ones may work. Each start takes long.
    even = np.linspace(0, line.n_units, len(homes) + 1).astype(np.int64)
    smallest, whole = by_share[1:][-1:], by_share[:1]
    made_to_fit = (shifter.made_to_fit(cuts) for cuts in (*smallest, even, *whole))
    fitting = next((cuts for cuts in made_to_fit if cuts is not None), None)
    return None if fitting is None else evened(fitting)


def _flights(
    problem: Problem, line: StageLine, options: PipelineOptions, devices: int
) -> list[Flight]:
    training = line.first_backward < problem.graph.n_ops
    return options.plan.flights(devices, options.interleave, training=training)


def _by_shares(
    problem: Problem, line: StageLine, homes: list[int], flights: list[Flight]
) -> Iterator[IntArray]:
    """Yield cuts with the smallest largest stage, limited to a share of each device's memory."""
    stages_per_device = len(homes) // (max(homes) + 1)
    sizes = problem.topology.memory_bytes
    whole = StageSolver(line, Slots(homes, [int(sizes[home]) for home in homes], False, flights))
    for step in range(_SHARES + 1):
        # From the whole memory, where the load is smallest but stages rarely fit together, down to
        # equal shares, where stages that fit individually also fit together; none may exist.
        share = 1 - (1 - 1 / stages_per_device) * step / _SHARES
        solver = whole.with_memory([int(sizes[home] * share) for home in homes])
        stages = None
        if solver.reaches_end():
            stages = solver.least_load(precision=_PRECISION_BEFORE_SHIFTS)
        if stages is not None:
            yield _cuts(stages)
        elif line.first_backward == problem.graph.n_ops:
            return  # less memory allows none either; with a backward the search may still find one


def _stretches(cuts: IntArray, homes: list[int]) -> list[Stretch]:
    ends = itertools.pairwise(cuts.tolist())
    return [Stretch(*ends, home) for ends, home in zip(ends, homes, strict=True)]


def _cuts(stages: list[Stretch]) -> IntArray:
    return np.array([0, *(stage.end for stage in stages)], dtype=np.int64)


def _device_of(line: StageLine, stages: list[Stretch]) -> IntArray:
    return line.of_operators(_cuts(stages), [stage.device for stage in stages])


def _assignment(problem: Problem, line: StageLine, stages: list[Stretch]) -> Assignment:
    numbers = line.of_operators(_cuts(stages), range(len(stages)))
    homes = tuple((stage.device,) for stage in stages)
    if problem.graph.first_backward < problem.graph.n_ops:
        # By device, an operator that reads only a weight would join an earlier stage there.
        return partition_by_homes(problem.graph, numbers, homes, in_turn=False)
    return Assignment(numbers, homes)

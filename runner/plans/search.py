"""Search a space of plans: cost those with the best bounds, until no other plan can be better.

The model is first captured once for each way to share its layers and each microbatch size. The
bounds of these captures (`runner.plans.bounds`) order the space. The plan that comes first is
captured with its recomputation, for a sharper bound, and waits for its new turn; only plans that
may still be among the best by then are placed and simulated. Meanwhile other processes do the same
for the plans that seem to be next (`runner.plans.ahead`).
"""

from bisect import insort
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush, nsmallest
from typing import Any, TypeVar

from fxpart.errors import CaptureError, InfeasibleError, NotApplicableError, SpecError
from fxpart.support.digest import stable_digest
from runner.config.schema import BUDGET, Config
from runner.experiment.check import check
from runner.experiment.model_spec import model_spec
from runner.experiment.rates import price_per_hour
from runner.experiment.serving import generates
from runner.experiment.training import is_training
from runner.output.countdown import Countdown
from runner.output.terminal import counted, progress, quiet, rate_text, without_progress
from runner.plans.ahead import Ahead, Task
from runner.plans.bounds import Bounds, least_time_s, needs_latency, refuse_too_large
from runner.plans.evaluate import Candidate, Costed, Outcome
from runner.plans.request import Request
from runner.plans.space import ALIKE, Plan, Refusals
from runner.plans.tasks import (
    NotCapturedError,
    bare_bounds,
    bare_config,
    cost,
    graph_label,
    sharp_bounds,
)

__all__ = ["evaluated"]

_T = TypeVar("_T")

_ORDER: Mapping[str, Callable[[Costed], tuple[float, float]]] = {
    "throughput": lambda plan: (-plan.examples_per_s, plan.latency_s),
    "latency": lambda plan: (plan.latency_s, -plan.examples_per_s),
    "cost": lambda plan: (plan.price, plan.latency_s),
}
"""Sort keys by objective; the best plan has the smallest."""
_ROUNDING = 1e-9
"""Tolerance between bounds and costs, which sum in different orders."""
_LOOKED_AT = 16
"""Plans at the front of the queue whose tasks other processes may begin."""


def evaluated(
    candidates: Sequence[Candidate],
    request: Request,
    refusals: Refusals,
    *,
    prunes: bool = True,
    processes: int = 1,
) -> Outcome:
    """Cost the `candidates`, without those that do not apply to the model.

    With `prunes`, a plan whose bound is not among the `request.rows` best is not costed. The result
    is the same with any number of `processes`.

    Raises:
        FxpartError: if the model cannot be captured.

    """
    # The bounds ignore a host that computes, and the prefill of a generation.
    prunes = prunes and not any(
        candidate.config.devices.tiers or generates(candidate.config) for candidate in candidates
    )
    with Ahead(processes) as ahead:
        return _searched(
            candidates, _Search(request, refusals, ahead, prunes=prunes), prunes=prunes
        )


def _searched(candidates: Sequence[Candidate], search: "_Search", *, prunes: bool) -> Outcome:
    applicable = search.applicable(candidates)
    if prunes:
        search.relate(applicable)
    bounded = (
        search.bounded(applicable) if prunes else [(-float("inf"), plan) for plan in applicable]
    )
    # The number keeps plans of equal bounds in order.
    queue = [(bound, number, plan, not prunes) for number, (bound, plan) in enumerate(bounded)]
    heapify(queue)
    countdown = Countdown("plans", len(queue), shown=not quiet(), skips=prunes)
    countdown.start()
    try:
        while queue:
            bound, number, candidate, is_sharp = heappop(queue)
            if search.knows(candidate):
                countdown.add(search.tally, took_time=False)
                continue
            search.look_ahead(queue)
            sharp = bound if is_sharp else search.sharper(candidate, bound, countdown)
            if sharp is not None and queue and sharp > queue[0][0]:
                heappush(queue, (sharp, number, candidate, True))
                continue
            took_time = sharp is None or search.add(candidate, sharp, countdown)
            countdown.add(search.tally, took_time=took_time)
    except KeyboardInterrupt as error:
        error.add_note(search.so_far())
        raise
    finally:
        countdown.stop()
    return search.outcome()


class _Search:
    """The state of a search: the plans costed so far, and known bounds."""

    def __init__(self, request: Request, refusals: Refusals, ahead: Ahead, *, prunes: bool) -> None:
        self._request, self._refusals, self._ahead = request, refusals, ahead
        self._prunes = prunes
        self._key = _ORDER[request.objective]
        self._best: list[float] = []
        """The first part of the keys of all costed plans that may precede others, ascending."""
        self._costed: list[Costed] = []
        self._unfit: list[tuple[Candidate, InfeasibleError]] = []
        self._beyond: list[Costed] = []
        self._bounded: list[tuple[Candidate, float]] = []
        self._failed: dict[Hashable, NotApplicableError] = {}
        """Errors of captures, by the settings that decide them: of the plan, or if torch cannot
        capture it, by the description of its graph."""
        self._captured = False
        """Whether any capture has succeeded."""
        self._bounds: dict[Hashable, Bounds] = {}
        """Bounds by `_bounds_key`."""
        self._bares: dict[Hashable, Config] = {}
        """The bare steps of those bounds that do not recompute more than their group."""
        self._graphs: dict[Plan, str] = {}
        """Hashes of the graphs that one device runs at the batch size of a replica."""
        self._alike: dict[Plan, list[Candidate]] = {}
        """Plans that differ only in microbatches, fewest first, keyed by the plan with one."""
        self._tried: dict[Plan, InfeasibleError | None] = {}
        """The plans that were placed, with the error of those that do not fit."""
        self._fitted = True
        """Whether the plan that was placed last fits."""

    def applicable(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates with compatible settings, and record why others are not."""
        compatible = []
        for candidate in candidates:
            try:
                check(candidate.config)
                compatible.append(candidate)
            except SpecError as error:  # caused by this plan: shared settings were checked before
                self._refusals.add(candidate.plan, error)
        return compatible

    def bounded(self, candidates: Sequence[Candidate]) -> list[tuple[float, Candidate]]:
        """Return the candidates that may fit, each with its bound that takes least time."""
        fitting: list[tuple[float, Candidate]] = []
        graphs: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            model = model_spec(replace(candidate.config, zero=0)).key()
            formats = candidate.plan.variant._replace(devices="")
            graph = stable_digest({"model": model, "formats": formats})
            self._graphs[candidate.plan] = graph
            graphs.setdefault(graph, []).append(candidate)
        tasks = [self._bare_task(graph, group) for graph, group in graphs.items()]
        self._ahead.ask(tasks[1:])
        for number, (group, task) in enumerate(zip(graphs.values(), tasks, strict=True)):
            bare = bare_config(group)
            which = f" ({number + 1} of {counted(len(graphs), 'graph')})" if len(graphs) > 1 else ""
            try:
                with progress(f"capturing {graph_label(bare)}{which}"):
                    bounds = self._ahead.result(task)
            except (SpecError, CaptureError) as error:
                if isinstance(error, CaptureError) and not self._captured:
                    raise  # the model itself may be at fault
                has_others = bool(group[0].plan.variant.weights)  # formats, if this one is at fault
                if isinstance(error, SpecError) and not (
                    isinstance(error, NotApplicableError) or has_others
                ):
                    raise
                for candidate in group:
                    self._refusals.add(candidate.plan, NotApplicableError(str(error)))
                continue
            self._captured = True
            self._bounds.update(bounds)
            self._bares.update(dict.fromkeys(bounds, bare))
            fitting += self._that_may_fit(group, bare.checkpointing)
        return fitting

    def _bare_task(self, graph: str, group: Sequence[Candidate]) -> Task[dict[Hashable, Bounds]]:
        bare = bare_config(group)
        configs = {
            self._bounds_key(candidate, bare.checkpointing): replace(candidate.config, zero=0)
            for candidate in group
        }
        return Task(("bare", graph), graph, partial(bare_bounds, bare, configs))

    def _that_may_fit(
        self, group: Sequence[Candidate], checkpointing: str
    ) -> Iterator[tuple[float, Candidate]]:
        for candidate in group:
            bounds = self._bounds[self._bounds_key(candidate, checkpointing)]
            try:
                refuse_too_large(candidate.plan, bounds)
            except InfeasibleError as error:
                self._unfit.append((candidate, error))
                continue
            yield self._least(candidate, bounds), candidate

    def _bounds_key(self, candidate: Candidate, checkpointing: str) -> Hashable:
        """Return what decides the bounds of a plan, from a graph with `checkpointing`.

        The recomputation of a budget is unknown before placement; the bounds assume none.
        """
        plan, of_graph = candidate.plan, "none" if checkpointing == BUDGET else checkpointing
        return self._graphs[plan], of_graph, plan.variant.devices, plan.replicas

    def look_ahead(self, queue: Sequence[tuple[float, int, Candidate, bool]]) -> None:
        """Have other processes begin what the next plans of the `queue` seem to need."""
        if not self._ahead.has_others:
            return
        tasks = list[Task[Any]]()
        for bound, _, candidate, is_sharp in nsmallest(_LOOKED_AT, queue):
            if self.knows(candidate) or self._is_beaten(bound) or self._failure(candidate):
                continue
            if not is_sharp and not self._has_sharp(candidate):
                tasks.append(self._sharp_task(candidate))
                continue
            fewest = candidate if self._fitted else self._fewest(candidate)
            tasks.append(self._cost_task(candidate if self.knows(fewest) else fewest))
        self._ahead.ask(tasks)

    def _sharp_task(self, candidate: Candidate) -> Task[Bounds]:
        latency = self._needs_latency(candidate)
        key = self._bounds_key(candidate, candidate.plan.checkpointing)
        bare = self._bares.get(key) or bare_config([candidate])
        config = replace(candidate.config, zero=0)
        work = partial(sharp_bounds, config, bare, with_latency=latency)
        return Task(("bounds", key, latency), _graph(candidate), work)

    def _cost_task(self, candidate: Candidate) -> Task[Costed]:
        work = partial(cost, candidate, streams=self._streams(candidate.config))
        return Task(("cost", candidate.plan), _graph(candidate), work)

    def sharper(
        self, candidate: Candidate, lower_bound: float, countdown: Countdown
    ) -> float | None:
        """Return a bound at least as sharp as `lower_bound`, or None if the plan is ruled out.

        Raises:
            FxpartError: if the plan fails for other reasons than not fitting.

        """
        if self._is_beaten(lower_bound):
            return lower_bound
        try:
            return max(lower_bound, self._sharper(candidate, countdown))
        except InfeasibleError as error:
            self._unfit.append((candidate, error))
        except NotApplicableError as error:
            self._refusals.add(candidate.plan, error)
        return None

    def add(self, candidate: Candidate, lower_bound: float, countdown: Countdown) -> bool:
        """Cost a plan, unless its bound `lower_bound` rules it out.

        Returns whether that took time.

        Raises:
            FxpartError: if the plan fails for other reasons than not fitting.

        """
        if self._is_beaten(lower_bound):
            self._bounded.append((candidate, abs(lower_bound)))
            return False
        # Where little fits, one error rules out all that need no less.
        if not self._fitted and (fewest := self._fewest(candidate)) is not candidate:
            if not self.knows(fewest):
                self._place(fewest, countdown)
            error = self._tried.get(fewest.plan)
            if error is not None:
                microbatches = fewest.plan.microbatches
                self._unfit.append((candidate, _no_less(error, microbatches)))
                return True
        self._place(candidate, countdown)
        return True

    def relate(self, candidates: Sequence[Candidate]) -> None:
        """Find the plans among all `candidates` that differ only in their microbatches."""
        for candidate in sorted(candidates, key=lambda item: item.plan.microbatches):
            self._alike.setdefault(_with_one(candidate.plan), []).append(candidate)

    def knows(self, candidate: Candidate) -> bool:
        """Return whether a plan was placed, out of its turn."""
        return candidate.plan in self._tried

    def _fewest(self, candidate: Candidate) -> Candidate:
        """Return the plan with the fewest microbatches that differs in nothing else."""
        return self._alike.get(_with_one(candidate.plan), [candidate])[0]

    def _place(self, candidate: Candidate, countdown: Countdown) -> None:
        """Place and cost a plan."""
        point, self._fitted = candidate.plan, False
        self._tried[point] = None
        try:
            plan = self._run(self._cost_task(candidate), candidate, countdown)
        except InfeasibleError as error:
            self._unfit.append((candidate, error))
            self._tried[point] = error
        except NotApplicableError as error:
            self._refusals.add(candidate.plan, error)
        else:
            self._fitted = True
            if plan.beyond(self._request.limits):
                self._beyond.append(plan)
                return
            self._costed.append(plan)
            if not self._comes_last(plan):
                insort(self._best, self._key(plan)[0])

    def _is_beaten(self, lower_bound: float) -> bool:
        """Return whether the bound `lower_bound` rules a plan out."""
        rows = self._request.rows
        return len(self._best) >= rows and lower_bound > self._best[rows - 1]

    def _sharper(self, candidate: Candidate, countdown: Countdown) -> float:
        """Return the bound of `_least` with the plan's recomputation.

        Raises:
            InfeasibleError: if these bounds show that the plan is too large.

        """
        key = self._bounds_key(candidate, candidate.plan.checkpointing)
        if not self._has_sharp(candidate):
            self._bounds[key] = self._run(self._sharp_task(candidate), candidate, countdown)
        bounds = self._bounds[key]
        refuse_too_large(candidate.plan, bounds)
        return self._least(candidate, bounds)

    def _has_sharp(self, candidate: Candidate) -> bool:
        """Return whether the bounds with the plan's recomputation are known."""
        bounds = self._bounds.get(self._bounds_key(candidate, candidate.plan.checkpointing))
        return bounds is not None and (
            bounds.latency_s is not None or not self._needs_latency(candidate)
        )

    def _needs_latency(self, candidate: Candidate) -> bool:
        return needs_latency(candidate.plan, streams=self._streams(candidate.config))

    def _run(self, task: Task[_T], candidate: Candidate, countdown: Countdown) -> _T:
        """Return the result of a task of a plan. A capture that failed is not repeated.

        Raises:
            NotApplicableError: if the plan cannot be captured.
            FxpartError: if the task fails for another reason.

        """
        if failure := self._failure(candidate):
            raise failure
        graph, label = _graph(candidate), graph_label(candidate.config)
        countdown.note(f"capturing {label}")
        try:
            with without_progress() if countdown.has_bar else nullcontext():
                result = self._ahead.result(task)
        except NotCapturedError as error:
            if isinstance(error.reason, NotApplicableError):
                self._failed[graph] = error.reason
                raise error.reason from error
            # Before any capture has succeeded, the model itself may be at fault.
            if not self._captured or not isinstance(error.reason, CaptureError | SpecError):
                raise error.reason from error
            of_graph = isinstance(error.reason, CaptureError)
            refused = NotApplicableError(str(error.reason))
            self._failed[label if of_graph else graph] = refused
            raise refused from error
        except (InfeasibleError, NotApplicableError):
            self._captured = True
            raise
        self._captured = True
        return result

    def _failure(self, candidate: Candidate) -> NotApplicableError | None:
        """Return why the graph of a plan could not be captured before, if so."""
        by_plan = self._failed.get(_graph(candidate))
        return by_plan or self._failed.get(graph_label(candidate.config))

    def _least(self, candidate: Candidate, bounds: Bounds) -> float:
        """Return a lower bound on the first part of the plan's key."""
        plan, config = candidate.plan, candidate.config
        least_s = least_time_s(plan, bounds, streams=self._streams(config))
        least_s *= 1.0 - _ROUNDING
        if self._request.objective == "latency":
            return least_s
        if self._request.objective == "cost":
            return (price_per_hour(config) or 0.0) / 3600 * least_s / plan.examples
        return -plan.examples / least_s if least_s else -float("inf")

    def _streams(self, config: Config) -> bool:
        """Return whether inputs overlap in a stream."""
        waits = is_training(config) or config.phase.name == "decode" or generates(config)
        return self._request.objective != "latency" and not waits

    def tally(self) -> str:
        """Return the progress of the search as text."""
        fit, bounded = len(self._costed) + len(self._beyond), len(self._bounded)
        return (
            f"{counted(fit, 'plan')} costed, {len(self._unfit)} do not fit, {bounded} left out by"
            " their bounds"
        )

    def so_far(self) -> str:
        """Return `tally` and the best plan, for a search that does not end."""
        if not self._costed:
            return self.tally()
        best = self.outcome().ranking[0]
        rate = rate_text(best.examples_per_s)
        return f"{self.tally()}; best so far: {' '.join(best.candidate.overrides)} ({rate})"

    def outcome(self) -> Outcome:
        """Return the result of the search."""
        ranking = sorted(
            self._costed, key=lambda plan: (*self._key(plan), plan.devices_idle, plan.memory_bytes)
        )
        # The sort is stable. The best plan stays the best, even with idle devices.
        ranking[1:] = sorted(ranking[1:], key=self._comes_last)
        unfit, bounded = tuple(self._unfit), tuple(self._bounded)
        return Outcome(tuple(ranking), unfit, tuple(self._beyond), bounded, self._refusals)

    def _comes_last(self, plan: Costed) -> bool:
        """Return whether a plan leaves devices idle that the objective could use."""
        return self._request.objective != "latency" and plan.devices_idle > 0


def _with_one(plan: Plan) -> Plan:
    """Return the plan that stands for all that differ from it in their microbatches."""
    return replace(plan, microbatches=1)


def _no_less(error: InfeasibleError, microbatches: int) -> InfeasibleError:
    """Return the error of a plan that needs no less than with these fewer `microbatches`."""
    return InfeasibleError(
        lambda: (f"already with {microbatches} microbatches {error}", error.devices_that_fit),
        needed_bytes=error.needed_bytes,
        available_bytes=error.available_bytes,
    )


def _graph(candidate: Candidate) -> Hashable:
    """Return the settings that decide the graph of a plan."""
    plan = candidate.plan
    return *(getattr(plan, name) for name in ALIKE if name != "microbatches"), plan.batch

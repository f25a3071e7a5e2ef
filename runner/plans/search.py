"""Search a space of plans: cost those with the best bounds, until no other plan can be better.

The model is first captured once for each way to share its layers and each microbatch size. The
bounds of these captures (`runner.plans.bounds`) order the space. The plan that comes first is
captured with its recomputation, for a sharper bound, and waits for its new turn; only plans that
may still be among the best by then are placed and simulated.
"""

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from fxpart.core.phases import CHECKPOINTING
from fxpart.errors import CaptureError, InfeasibleError, NotApplicableError, SpecError
from fxpart.support.digest import stable_digest
from runner.config.sections import BUDGET, Config
from runner.experiment.budget import within_budget
from runner.experiment.check import check
from runner.experiment.model_spec import model_spec
from runner.experiment.rates import price_per_hour
from runner.experiment.serving import generates
from runner.experiment.subject import Subject, symbols_of
from runner.experiment.training import is_training
from runner.output.countdown import Countdown
from runner.output.terminal import counted, progress, quiet, without_progress
from runner.plans.bounds import Bounds, bounds_of, least_time_s, refuse_too_large
from runner.plans.evaluate import Candidate, Costed, Outcome, costed
from runner.plans.refused import captured_subject
from runner.plans.request import Request
from runner.plans.space import ALIKE, Plan, Refusals

__all__ = ["evaluated"]

_ORDER: Mapping[str, Callable[[Costed], tuple[float, float]]] = {
    "throughput": lambda plan: (-plan.examples_per_s, plan.latency_s),
    "latency": lambda plan: (plan.latency_s, -plan.examples_per_s),
    "cost": lambda plan: (plan.price, plan.latency_s),
}
"""Sort keys by objective; the best plan has the smallest."""
_ROUNDING = 1e-9
"""Tolerance between bounds and costs, which sum in different orders."""
_RECOMPUTED = ("none", BUDGET, *(name for name in reversed(CHECKPOINTING) if name != "none"))
"""Ways of checkpointing, in rising order of recomputation."""


def evaluated(
    candidates: Sequence[Candidate], request: Request, refusals: Refusals, *, prunes: bool = True
) -> Outcome:
    """Cost the `candidates`, without those that do not apply to the model.

    With `prunes`, a plan whose bound is not among the `request.rows` best is not costed.

    Raises:
        FxpartError: if the model cannot be captured.

    """
    # The bounds ignore a host that computes, and the prefill of a generation.
    prunes = prunes and not any(
        candidate.config.devices.tiers or generates(candidate.config) for candidate in candidates
    )
    search = _Search(request, refusals, prunes=prunes)
    applicable = search.applicable(candidates)
    if prunes:
        search.relate(applicable)
    bounded = (
        search.bounded(applicable) if prunes else [(-float("inf"), plan) for plan in applicable]
    )
    # The number keeps plans of equal bounds in order.
    queue = [(bound, number, plan, not prunes) for number, (bound, plan) in enumerate(bounded)]
    heapify(queue)
    countdown = Countdown("plans", len(queue), shown=not quiet())
    countdown.start()
    try:
        while queue:
            bound, number, candidate, is_sharp = heappop(queue)
            if search.knows(candidate):
                countdown.add(search.tally, took_time=False)
                continue
            sharp = bound if is_sharp else search.sharper(candidate, bound, countdown)
            if sharp is not None and queue and sharp > queue[0][0]:
                heappush(queue, (sharp, number, candidate, True))
                continue
            took_time = sharp is None or search.add(candidate, sharp, countdown)
            countdown.add(search.tally, took_time=took_time)
    finally:
        countdown.stop()
    return search.outcome()


class _Search:
    """The state of a search: the plans costed so far, and known bounds."""

    def __init__(self, request: Request, refusals: Refusals, *, prunes: bool) -> None:
        self._request, self._refusals, self._prunes = request, refusals, prunes
        self._key = _ORDER[request.objective]
        self._best: list[float] = []
        """The first part of the keys of all costed plans that may precede others, ascending."""
        self._costed: list[Costed] = []
        self._unfit: list[tuple[Candidate, InfeasibleError]] = []
        self._bounded: list[tuple[Candidate, float]] = []
        self._failed: dict[object, NotApplicableError] = {}
        """Errors of captures, by the settings that decide them: of the plan, or if torch cannot
        capture it, by the description of its graph."""
        self._captured = False
        """Whether any capture has succeeded."""
        self._bounds: dict[tuple[object, ...], Bounds] = {}
        """Bounds by graph, checkpointing and devices."""
        self._alike: dict[Plan, list[Candidate]] = {}
        """Plans that differ only in their microbatches, fewest first, by the plan with one."""
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
            # The graph that one device runs at the batch size of a replica.
            graph = stable_digest(model_spec(candidate.config).key())
            graphs.setdefault(graph, []).append(candidate)
        for number, group in enumerate(graphs.values()):
            bare = _bare(group)
            which = f" ({number + 1} of {counted(len(graphs), 'graph')})" if len(graphs) > 1 else ""
            try:
                with progress(f"capturing {_what(bare)}{which}"):
                    subject = captured_subject(bare)
            except (NotApplicableError, CaptureError) as error:
                if isinstance(error, CaptureError) and not self._captured:
                    raise  # the model itself may be at fault
                for candidate in group:
                    self._refusals.add(candidate.plan, NotApplicableError(str(error)))
                continue
            self._captured = True
            fitting += self._that_may_fit(group, bare, subject)
        return fitting

    def _that_may_fit(
        self, group: Sequence[Candidate], bare: Config, subject: Subject
    ) -> Iterator[tuple[float, Candidate]]:
        for candidate in group:
            bounds = self._bounds_by(candidate, bare.checkpointing, lambda: subject)
            try:
                refuse_too_large(candidate.plan, bounds)
            except InfeasibleError as error:
                self._unfit.append((candidate, error))
                continue
            yield self._least(candidate, bounds, sharp=False), candidate

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
            self._capture(candidate, countdown)
            with without_progress():
                if candidate.plan.checkpointing == BUDGET:
                    decided, _ = within_budget(candidate.config)
                    candidate = replace(candidate, config=decided)
                plan = costed(candidate, streams=self._streams(candidate.config))
        except InfeasibleError as error:
            self._unfit.append((candidate, error))
            self._tried[point] = error
        except NotApplicableError as error:
            self._refusals.add(candidate.plan, error)
        else:
            self._fitted = True
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
        bare = replace(candidate, config=_bare([candidate]))

        def recomputing() -> Subject:
            self._capture(bare, countdown)
            return captured_subject(bare.config)

        bounds = self._bounds_by(candidate, candidate.plan.checkpointing, recomputing)
        refuse_too_large(candidate.plan, bounds)
        return self._least(candidate, bounds, sharp=True)

    def _bounds_by(
        self, candidate: Candidate, checkpointing: str, subject: Callable[[], Subject]
    ) -> Bounds:
        """Return the bounds of a plan on its devices, from a `subject` with `checkpointing`.

        The recomputation of a budget is unknown before placement; the bounds assume none.
        """
        checkpointing = "none" if checkpointing == BUDGET else checkpointing
        plan, config = candidate.plan, replace(candidate.config, zero=0)
        graph = stable_digest(model_spec(config).key())
        key = (graph, checkpointing, plan.devices, plan.replicas)
        if key not in self._bounds:
            self._bounds[key] = bounds_of(config, subject(), checkpointing=checkpointing)
        return self._bounds[key]

    def _capture(self, candidate: Candidate, countdown: Countdown) -> None:
        """Load the plan's graph into memory, showing progress."""
        plan, config = candidate.plan, candidate.config
        if not config.capture.use_cache:
            return
        graph = (*(getattr(plan, name) for name in ALIKE if name != "microbatches"), plan.batch)
        label = f"capturing {_what(config)}"
        for known in (graph, label):
            if known in self._failed:
                raise self._failed[known]
        countdown.note(label)
        try:
            with without_progress() if countdown.has_bar else progress(label):
                captured_subject(config)
        except NotApplicableError as error:
            self._failed[graph] = error
            raise
        except (CaptureError, SpecError) as error:
            if not self._captured:  # the model itself may be at fault
                raise
            of_graph = isinstance(error, CaptureError)
            self._failed[label if of_graph else graph] = NotApplicableError(str(error))
            raise NotApplicableError(str(error)) from error
        self._captured = True

    def _least(self, candidate: Candidate, bounds: Bounds, *, sharp: bool) -> float:
        """Return a lower bound on the first part of the plan's key; a `sharp` one takes longer."""
        plan, config = candidate.plan, candidate.config
        least_s = least_time_s(plan, bounds, streams=self._streams(config), sharp=sharp)
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
        fit, bounded = len(self._costed), len(self._bounded)
        return (
            f"{counted(fit, 'plan')} costed, {len(self._unfit)} do not fit, {bounded} left out by"
            " their bounds"
        )

    def outcome(self) -> Outcome:
        """Return the result of the search."""
        ranking = sorted(self._costed, key=lambda plan: (*self._key(plan), plan.memory_bytes))
        # The sort is stable. The best plan stays the best, even with idle devices.
        ranking[1:] = sorted(ranking[1:], key=self._comes_last)
        unfit, bounded = tuple(self._unfit), tuple(self._bounded)
        return Outcome(tuple(ranking), unfit, bounded, self._refusals)

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


def _bare(group: Sequence[Candidate]) -> Config:
    """Return the configuration of the bare step that the plans of a group extend.

    It is without replicas if one of the plans is: replicas need a symbolic capture.
    """
    first = min(
        group,
        key=lambda item: (_RECOMPUTED.index(item.plan.checkpointing), item.plan.data_parallel),
    )
    # Without DistributedDataParallel's copies of gradients, which ZeRO-2 lacks.
    views = replace(first.config.all_reduce, gradient_as_bucket_view=True)
    bare = replace(first.config, zero=0)
    return bare if first.plan.replicas == 1 else replace(bare, all_reduce=views)


def _what(config: Config) -> str:
    """Return a short description of the captured graph."""
    names = ("tensor_parallel", "context_parallel", "expert_parallel")
    degrees = {name: getattr(config, name) for name in names}
    parts = [config.model.name, *(f"{name}={n}" for name, n in degrees.items() if n > 1)]
    if config.sequence_parallel:
        parts.append("sequence_parallel")
    if symbols_of(config):
        parts.append("any batch")
    elif config.model.batch_size > 1:
        parts.append(f"batch {config.model.batch_size}")
    if config.checkpointing != "none":
        parts.append(f"checkpointing={config.checkpointing}")
    return ", ".join(parts)

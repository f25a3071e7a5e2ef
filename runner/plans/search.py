"""The best plans of a space: those with the best bounds are costed, until no other can be better.

First the model is captured once for each way to share its layers, and size of a microbatch. What
that proves of a plan (`runner.plans.bounds`) orders the space. Only what may be among the best then
is captured with its recomputation, which proves more, and only what still may be is placed and
simulated.
"""

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from fxpart.core.phases import CHECKPOINTING
from fxpart.errors import CaptureError, InfeasibleError, NotApplicableError, SpecError
from fxpart.support.digest import stable_digest
from runner.config.sections import BUDGET, Config
from runner.experiment.budget import within_budget
from runner.experiment.check import check
from runner.experiment.model_spec import model_spec
from runner.experiment.rates import price_per_hour
from runner.experiment.serving import generates
from runner.experiment.subject import Subject, shared_subject, symbols_of
from runner.experiment.training import is_training
from runner.output.countdown import Countdown
from runner.output.terminal import counted, progress, quiet, without_progress
from runner.plans.bounds import Bounds, bounds_of, least_time_s, refuse_too_large
from runner.plans.evaluate import Candidate, Costed, Outcome, costed
from runner.plans.request import Request
from runner.plans.space import ALIKE, Refusals

__all__ = ["evaluated"]

_ORDER: Mapping[str, Callable[[Costed], tuple[float, float]]] = {
    "throughput": lambda plan: (-plan.examples_per_s, plan.latency_s),
    "latency": lambda plan: (plan.latency_s, -plan.examples_per_s),
    "cost": lambda plan: (plan.price, plan.latency_s),
}
"""What is smallest of the best plan, by objective."""
_ROUNDING = 1e-9
"""A bound and a cost are sums in different order."""
_RECOMPUTED = ("none", BUDGET, *(name for name in reversed(CHECKPOINTING) if name != "none"))
"""Ways of checkpointing, those that compute least again first."""


def evaluated(
    candidates: Sequence[Candidate], request: Request, refusals: Refusals, *, prunes: bool = True
) -> Outcome:
    """Return what the `candidates` cost; what does not apply to the model is left out.

    With `prunes`, a plan that cannot be among the `request.rows` best by its bound is not costed.

    Raises:
        FxpartError: for a model that cannot be captured.

    """
    # A tier's host may compute, too, which is in no bound; nor are the prompts of a generation.
    prunes = prunes and not any(
        candidate.config.devices.tiers or generates(candidate.config) for candidate in candidates
    )
    search = _Search(request, refusals, prunes=prunes)
    known = search.applicable(candidates)
    ordered = search.ordered(known) if prunes else [(-float("inf"), plan) for plan in known]
    countdown = Countdown("plans", len(ordered), shown=not quiet())
    countdown.start()
    try:
        for least, candidate in ordered:
            took_time = search.add(candidate, least, countdown)
            countdown.add(search.tally, took_time=took_time)
    finally:
        countdown.stop()
    return search.outcome()


class _Search:
    """Plans costed so far."""

    def __init__(self, request: Request, refusals: Refusals, *, prunes: bool) -> None:
        self._request, self._refusals, self._prunes = request, refusals, prunes
        self._key = _ORDER[request.objective]
        self._best: list[float] = []
        """The first part of the keys of the best so far, rising."""
        self._costed: list[Costed] = []
        self._unfit: list[tuple[Candidate, InfeasibleError]] = []
        self._bounded: list[tuple[Candidate, float]] = []
        self._failed: dict[tuple[object, ...], NotApplicableError] = {}
        """Captures that are not possible, by what they are of."""
        self._captured = False
        """Whether the model was captured in some way."""
        self._bounds: dict[tuple[object, ...], Bounds] = {}
        """By what a device runs, its checkpointing, and the devices."""

    def applicable(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return those whose settings go together; note why the others do not."""
        known = []
        for candidate in candidates:
            try:
                check(candidate.config)
                known.append(candidate)
            except SpecError as error:  # what all share was checked: it is of what this plan adds
                self._refusals.add(candidate.plan, error)
        return known

    def ordered(self, candidates: Sequence[Candidate]) -> list[tuple[float, Candidate]]:
        """Return those that may fit, each with what its key is not below, the least first."""
        known: list[tuple[float, Candidate]] = []
        graphs: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            # What one device runs for the examples of a replica.
            graph = stable_digest(model_spec(candidate.config).key())
            graphs.setdefault(graph, []).append(candidate)
        for number, group in enumerate(graphs.values()):
            bare = _bare(group)
            which = f" ({number + 1} of {counted(len(graphs), 'graph')})" if len(graphs) > 1 else ""
            try:
                with progress(f"capturing {_what(bare)}{which}"):
                    subject = shared_subject(bare, model_spec(bare))
            except (NotApplicableError, CaptureError) as error:
                if isinstance(error, CaptureError) and not self._captured:
                    raise  # perhaps of no plan at all
                for candidate in group:
                    self._refusals.add(candidate.plan, NotApplicableError(str(error)))
                continue
            self._captured = True
            known += self._that_may_fit(group, bare, subject)
        return sorted(known, key=lambda item: item[0])

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
            yield self._least(candidate, bounds), candidate

    def add(self, candidate: Candidate, least: float, countdown: Countdown) -> bool:
        """Cost a plan, unless its key, not below `least`, is worse than what is known.

        Returns whether that took time.

        Raises:
            FxpartError: for what cannot be planned; not for what does not fit.

        """
        if self._is_beaten(candidate, least):
            return False
        try:
            if self._prunes and self._is_beaten(candidate, self._sharper(candidate, countdown)):
                return True
            self._capture(candidate, countdown)
            with without_progress():
                if candidate.plan.checkpointing == BUDGET:
                    decided, _ = within_budget(candidate.config)
                    candidate = replace(candidate, config=decided)
                plan = costed(candidate, streams=self._streams(candidate.config))
        except InfeasibleError as error:
            self._unfit.append((candidate, error))
        except NotApplicableError as error:
            self._refusals.add(candidate.plan, error)
        else:
            self._costed.append(plan)
            insort(self._best, self._key(plan)[0])
        return True

    def _is_beaten(self, candidate: Candidate, least: float) -> bool:
        """Note, and return, whether a key not below `least` is not among the best."""
        rows = self._request.rows
        if len(self._best) < rows or least <= self._best[rows - 1]:
            return False
        self._bounded.append((candidate, abs(least)))
        return True

    def _sharper(self, candidate: Candidate, countdown: Countdown) -> float:
        """Return what `_least` does by what the plan recomputes, too.

        Raises:
            InfeasibleError: for a plan that is too large for that reason.

        """
        bare = replace(candidate, config=_bare([candidate]))

        def recomputing() -> Subject:
            self._capture(bare, countdown)
            return shared_subject(bare.config, model_spec(bare.config))

        bounds = self._bounds_by(candidate, candidate.plan.checkpointing, recomputing)
        refuse_too_large(candidate.plan, bounds)
        return self._least(candidate, bounds)

    def _bounds_by(
        self, candidate: Candidate, checkpointing: str, subject: Callable[[], Subject]
    ) -> Bounds:
        """Return the bounds of a plan's devices by `subject`, a step with that `checkpointing`.

        What a budget computes again is not known before a plan is placed: nothing, at best.
        """
        checkpointing = "none" if checkpointing == BUDGET else checkpointing
        plan, config = candidate.plan, replace(candidate.config, zero=0)
        graph = stable_digest(model_spec(config).key())
        key = (graph, checkpointing, plan.devices, plan.replicas)
        if key not in self._bounds:
            self._bounds[key] = bounds_of(config, subject(), checkpointing=checkpointing)
        return self._bounds[key]

    def _capture(self, candidate: Candidate, countdown: Countdown) -> None:
        """Have the plan's graph in memory, and say so where that takes long."""
        plan, config = candidate.plan, candidate.config
        if not config.capture.use_cache:
            return
        graph = (*(getattr(plan, name) for name in ALIKE if name != "microbatches"), plan.batch)
        if graph in self._failed:
            raise self._failed[graph]
        what = f"capturing {_what(config)}"
        countdown.note(what)
        try:
            with without_progress() if countdown.has_bar else progress(what):
                shared_subject(config, model_spec(config))
        except NotApplicableError as error:
            self._failed[graph] = error
            raise
        except (CaptureError, SpecError) as error:
            if not self._captured:  # perhaps of no plan at all
                raise
            self._failed[graph] = NotApplicableError(str(error))
            raise self._failed[graph] from error
        self._captured = True

    def _least(self, candidate: Candidate, bounds: Bounds) -> float:
        """Return what the first part of the plan's key cannot be below."""
        plan, config = candidate.plan, candidate.config
        least_s = least_time_s(plan, bounds, streams=self._streams(config)) * (1.0 - _ROUNDING)
        if self._request.objective == "latency":
            return least_s
        if self._request.objective == "cost":
            return (price_per_hour(config) or 0.0) / 3600 * least_s / plan.examples
        return -plan.examples / least_s if least_s else -float("inf")

    def _streams(self, config: Config) -> bool:
        """Return whether inputs follow each other before the one before has ended."""
        waits = is_training(config) or config.phase.name == "decode" or generates(config)
        return self._request.objective != "latency" and not waits

    def tally(self) -> str:
        """Return how far the search is."""
        fit, bounded = len(self._costed), len(self._bounded)
        return (
            f"{counted(fit, 'plan')} costed, {len(self._unfit)} do not fit, {bounded} left out by"
            " their bounds"
        )

    def outcome(self) -> Outcome:
        """Return all that was found."""
        ranking = sorted(self._costed, key=lambda plan: (*self._key(plan), plan.memory_bytes))
        unfit, bounded = tuple(self._unfit), tuple(self._bounded)
        return Outcome(tuple(ranking), unfit, bounded, self._refusals)


def _bare(group: Sequence[Candidate]) -> Config:
    """Return the step that plans of one way to share layers, and of one batch, add to.

    Without replicas where one of them has none: those need a capture in symbols.
    """
    first = min(
        group,
        key=lambda item: (_RECOMPUTED.index(item.plan.checkpointing), item.plan.data_parallel),
    )
    # Nor with the copies of gradients that DistributedDataParallel has, and ZeRO-2 has not.
    views = replace(first.config.all_reduce, gradient_as_bucket_view=True)
    bare = replace(first.config, zero=0)
    return bare if first.plan.replicas == 1 else replace(bare, all_reduce=views)


def _what(config: Config) -> str:
    """Return what is captured in a few words."""
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

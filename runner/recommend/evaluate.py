"""What each plan of a space costs, by the functions that a run costs it with."""

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from fxpart.errors import InfeasibleError, NotApplicableError
from runner.config.sections import Config
from runner.experiment.experiment import check, model_spec, plan
from runner.experiment.headline import headline
from runner.experiment.serving import generates
from runner.experiment.training import is_training
from runner.job.identity import Choices
from runner.output.countdown import Countdown
from runner.output.terminal import counted, without_progress
from runner.output.units import GIB
from runner.recommend.bounds import Bounds, bounds_of, least_step_s
from runner.recommend.limits import limit_of, time_shares
from runner.recommend.request import Request
from runner.recommend.space import Plan, Refusals

__all__ = ["Candidate", "Costed", "Outcome", "evaluated"]


@dataclass(frozen=True, eq=False, slots=True)
class Candidate:
    """A plan as the configuration of a run."""

    plan: Plan
    overrides: tuple[str, ...]
    """Of its run, beside those that all plans share."""
    config: Config
    choices: Choices


@dataclass(frozen=True, eq=False, slots=True)
class Costed:
    """A plan that fits, and what it costs."""

    candidate: Candidate
    metrics: Mapping[str, float]
    """Those of its run, `runner.experiment.headline`."""
    subject_line: str
    shares: Mapping[str, float]
    """`runner.recommend.limits.time_shares`"""

    @property
    def examples_per_s(self) -> float:
        """The throughput, of all replicas together; of a decode a text's next token waits for it.

        Several batches in turn on the stages of a decode would need a cache each.
        """
        decodes = self.candidate.config.phase.name == "decode"
        return self.metrics["tokens_per_s" if decodes else "examples_per_s"]

    @property
    def tokens_per_s(self) -> float | None:
        """None of a model without texts."""
        return self.metrics.get("tokens_per_s")

    @property
    def latency_s(self) -> float:
        """Of a step with its microbatches, of one input, or of a whole generation."""
        config = self.candidate.config
        if generates(config):
            return config.model.batch_size / self.examples_per_s
        return self.metrics.get("step_ms", self.metrics["latency_ms"]) / 1e3

    @property
    def memory_bytes(self) -> float:
        """That the fullest device is expected to need, as the verdict of a run has it."""
        gib = self.metrics.get("device_memory_gib", self.metrics["peak_memory_gib"])
        return gib * GIB

    @property
    def devices_used(self) -> int:
        """Of all replicas together."""
        return round(self.metrics["devices_used"]) * self.candidate.plan.data_parallel

    @property
    def stages(self) -> int:
        """Devices of a replica that compute, or tensor-parallel groups of them."""
        return round(self.metrics["devices_used"]) // self.candidate.plan.tensor_parallel

    @property
    def limit(self) -> str:
        """The two things that most of the time goes into."""
        return limit_of(self.shares, 2)


@dataclass(frozen=True, eq=False, slots=True)
class Outcome:
    """A space of which every plan was costed."""

    ranking: tuple[Costed, ...]
    """Those that fit, the best first."""
    unfit: tuple[tuple[Candidate, InfeasibleError], ...] = ()
    """Those that do not, in the order of the space."""
    bounded: tuple[tuple[Candidate, float], ...] = ()
    """Those that were not costed, since not even their bounds are among the best: with the most
    examples per second, or the least latency in seconds, that each could have."""
    refusals: Refusals = field(default_factory=lambda: Refusals({}))
    """Why values are in no plan."""

    @property
    def total(self) -> int:
        """Plans of the space."""
        return len(self.ranking) + len(self.unfit) + len(self.bounded)

    @property
    def plans(self) -> list[Plan]:
        """All of the space."""
        return [
            *(costed.candidate.plan for costed in self.ranking),
            *(candidate.plan for candidate, _ in self.unfit),
            *(candidate.plan for candidate, _ in self.bounded),
        ]


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
    countdown = Countdown("plans", len(candidates))
    search = _Search(request, refusals)
    countdown.start()
    try:
        for index, candidate in enumerate(candidates):
            try:
                search.add(candidate, prunes=prunes)
            except NotApplicableError as error:
                refusals.add(candidate.plan, error)
            tally = f"{index + 1} of {counted(len(candidates), 'plan')} looked at"
            countdown.add(partial(str, tally))
    finally:
        countdown.stop()
    return search.outcome()


_ORDER: Mapping[str, Callable[[Costed], tuple[float, float]]] = {
    "throughput": lambda costed: (-costed.examples_per_s, costed.latency_s),
    "latency": lambda costed: (costed.latency_s, -costed.examples_per_s),
}
"""What is smallest of the best plan, by objective."""
_ROUNDING = 1e-9
"""A bound and a cost are sums in different order."""


class _Search:
    """Plans costed so far."""

    def __init__(self, request: Request, refusals: Refusals) -> None:
        self._request, self._refusals = request, refusals
        self._key = _ORDER[request.objective]
        self._best: list[float] = []
        """The first part of the keys of the best so far, rising."""
        self._costed: list[Costed] = []
        self._unfit: list[tuple[Candidate, InfeasibleError]] = []
        self._bounded: list[tuple[Candidate, float]] = []
        self._bounds: dict[tuple[object, ...], Bounds] = {}

    def add(self, candidate: Candidate, *, prunes: bool) -> None:
        """Cost a plan, unless its bound is worse than what is known.

        Raises:
            FxpartError: for what cannot be planned; not for what does not fit.

        """
        split = ("capture", candidate.plan.tensor_parallel)
        if split in self._refusals.reasons:  # no second capture of a model that cannot be split so
            raise self._refusals.reasons[split]
        check(candidate.config)
        try:
            with without_progress():
                if prunes and len(self._best) >= self._request.rows:
                    least = self._least(candidate)
                    if least > self._best[self._request.rows - 1]:
                        self._bounded.append((candidate, abs(least)))
                        return
                costed = _costed(candidate, streams=self._streams(candidate.config))
        except InfeasibleError as error:
            self._unfit.append((candidate, error))
            return
        except NotApplicableError as error:
            if str(error).startswith("tensor_parallel"):
                self._refusals.reasons[split] = error
            raise
        self._costed.append(costed)
        insort(self._best, self._key(costed)[0])

    def _least(self, candidate: Candidate) -> float:
        """Return what the first part of the plan's key cannot be below."""
        plan, config = candidate.plan, candidate.config
        shared = ("tensor_parallel", "data_parallel", "zero", "checkpointing", "batch")
        key = tuple(getattr(plan, name) for name in shared)
        if key not in self._bounds:
            self._bounds[key] = bounds_of(config)
        least_s = least_step_s(plan, self._bounds[key], streams=self._streams(config))
        least_s *= 1.0 - _ROUNDING
        if self._request.objective == "latency":
            return least_s
        return -plan.examples / least_s if least_s else -float("inf")

    def _streams(self, config: Config) -> bool:
        """Return whether inputs follow each other before the one before has ended."""
        waits = is_training(config) or config.phase.name == "decode" or generates(config)
        return self._request.objective == "throughput" and not waits

    def outcome(self) -> Outcome:
        """Return all that was found."""
        ranking = sorted(self._costed, key=lambda plan: (*self._key(plan), plan.memory_bytes))
        unfit, bounded = tuple(self._unfit), tuple(self._bounded)
        return Outcome(tuple(ranking), unfit, bounded, self._refusals)


def _costed(candidate: Candidate, *, streams: bool) -> Costed:
    config = candidate.config
    result = plan(config, model_spec(config), may_capture=False, advises=False)
    shares = time_shares(config, result, streams=streams)
    return Costed(candidate, headline(result), result.subject_line, shares)

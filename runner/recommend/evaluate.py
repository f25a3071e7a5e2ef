"""What each plan of a space costs, by the functions that a run costs it with."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from fxpart.errors import InfeasibleError, NotApplicableError
from runner.config.sections import Config
from runner.experiment.experiment import check, model_spec, plan
from runner.experiment.headline import headline
from runner.job.identity import Choices
from runner.output.countdown import Countdown
from runner.output.terminal import counted, without_progress
from runner.output.units import GIB
from runner.recommend.limits import limit_of, time_shares
from runner.recommend.request import Request
from runner.recommend.space import Plan, Refusals

__all__ = ["Candidate", "Costed", "Outcome", "evaluated", "ranked"]


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
        """The throughput, of all replicas together."""
        return self.metrics["examples_per_s"]

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the prompts or texts; of a decode one of each text. None without texts."""
        config = self.candidate.config
        if config.phase.name == "decode":
            return self.examples_per_s
        length = config.model.seq_len
        return None if length is None else self.examples_per_s * length

    @property
    def latency_s(self) -> float:
        """Of a step with its microbatches, or of one input."""
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
    def limit(self) -> str:
        """What most of the time goes into."""
        return limit_of(self.shares)


@dataclass(frozen=True, eq=False, slots=True)
class Outcome:
    """A space of which every plan was costed."""

    ranking: tuple[Costed, ...]
    """Those that fit, the best first."""
    unfit: tuple[tuple[Candidate, InfeasibleError], ...] = ()
    """Those that do not, in the order of the space."""
    refusals: Refusals = field(default_factory=lambda: Refusals({}))
    """Why values are in no plan."""

    @property
    def total(self) -> int:
        """Plans of the space."""
        return len(self.ranking) + len(self.unfit)

    @property
    def plans(self) -> list[Plan]:
        """All of the space."""
        return [
            *(costed.candidate.plan for costed in self.ranking),
            *(candidate.plan for candidate, _ in self.unfit),
        ]


def evaluated(candidates: Sequence[Candidate], request: Request, refusals: Refusals) -> Outcome:
    """Return what all `candidates` cost; what does not apply to the model is left out.

    Raises:
        FxpartError: for a model that cannot be captured.

    """
    countdown = Countdown("plans", len(candidates))
    costed: list[Costed] = []
    unfit: list[tuple[Candidate, InfeasibleError]] = []
    countdown.start()
    try:
        for index, candidate in enumerate(candidates):
            try:
                costed.append(_costed(candidate, refusals))
            except InfeasibleError as error:
                unfit.append((candidate, error))
            except NotApplicableError as error:
                refusals.add(candidate.plan, error)
            tally = f"{index + 1} of {counted(len(candidates), 'plan')} costed"
            countdown.add(partial(str, tally))
    finally:
        countdown.stop()
    return Outcome(tuple(ranked(costed, request.objective)), tuple(unfit), refusals)


def ranked(costed: Iterable[Costed], objective: str) -> list[Costed]:
    """Return the plans, the best first: of equal ones the faster, then the smaller."""
    by: Mapping[str, Callable[[Costed], tuple[float, ...]]] = {
        "throughput": lambda plan: (-plan.examples_per_s, plan.latency_s),
        "latency": lambda plan: (plan.latency_s, -plan.examples_per_s),
    }
    return sorted(costed, key=lambda plan: (*by[objective](plan), plan.memory_bytes))


def _costed(candidate: Candidate, refusals: Refusals) -> Costed:
    config = candidate.config
    split = ("capture", candidate.plan.tensor_parallel)
    if split in refusals.reasons:  # no second capture of a model that cannot be split so
        raise refusals.reasons[split]
    check(config)
    with without_progress():
        try:
            result = plan(config, model_spec(config), may_capture=False, advises=False)
        except NotApplicableError as error:
            if str(error).startswith("tensor_parallel"):
                refusals.reasons[split] = error
            raise
    shares = time_shares(config, result)
    return Costed(candidate, headline(result), result.subject_line, shares)

"""What each plan of a space costs, by the functions that a run costs it with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fxpart.errors import FxpartError, InfeasibleError
from runner.config.sections import Config
from runner.experiment.experiment import plan
from runner.experiment.headline import headline
from runner.experiment.model_spec import model_spec
from runner.experiment.serving import generates
from runner.output.terminal import counted
from runner.output.units import GIB
from runner.plans.limits import limit_of, time_shares
from runner.plans.space import Plan, Refusals

__all__ = ["Candidate", "Costed", "Outcome", "costed", "none_fits", "shortly"]


@dataclass(frozen=True, eq=False, slots=True)
class Candidate:
    """A plan as the configuration of a run."""

    plan: Plan
    overrides: tuple[str, ...]
    """Of its run, beside those that all plans share."""
    config: Config


@dataclass(frozen=True, eq=False, slots=True)
class Costed:
    """A plan that fits, and what it costs."""

    candidate: Candidate
    metrics: Mapping[str, float]
    """Those of its run, `runner.experiment.headline`."""
    subject_line: str
    shares: Mapping[str, float]
    """`runner.plans.limits.time_shares`"""

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
    def price(self) -> float:
        """What an example costs, of a decode a token, in USD; infinite where no price is known."""
        rate = self.examples_per_s
        return self.metrics.get("price_per_hour", float("inf")) / 3600 / rate if rate else 0.0

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
        return round(self.metrics["devices_used"]) * self.candidate.plan.replicas

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
    examples per second, the least latency in seconds, or the least cost of an example in USD, that
    each could have: in the objective's unit."""
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


def costed(candidate: Candidate, *, streams: bool) -> Costed:
    """Return what a plan costs; with `streams` inputs follow before the one before has ended.

    Raises:
        FxpartError: for a plan that does not fit, or makes no sense.

    """
    config = candidate.config
    result = plan(config, model_spec(config), may_capture=False, advises=False)
    shares = time_shares(config, result, streams=streams)
    return Costed(candidate, headline(result), result.subject_line, shares)


def shortly(error: FxpartError) -> str:
    """Return what an error says, without what to change."""
    return str(error).split(";", maxsplit=1)[0]


def none_fits(outcome: Outcome) -> InfeasibleError:
    """Return the error where no plan fits: with the one that lacks least, where that is known."""

    def lacking(item: tuple[Candidate, InfeasibleError]) -> float:
        error = item[1]
        if not error.needed_bytes or not error.available_bytes:
            return float("inf")
        return error.needed_bytes / error.available_bytes

    candidate, error = min(outcome.unfit, key=lacking)
    return InfeasibleError(
        f"none of {counted(outcome.total, 'plan')} fits; nearest is"
        f" {' '.join(candidate.overrides)}: {shortly(error)}; take larger or more devices, or a"
        " smaller batch",
        needed_bytes=error.needed_bytes,
        available_bytes=error.available_bytes,
    )

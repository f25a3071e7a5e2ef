"""Cost each plan of a space with the same functions as a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fxpart.errors import FxpartError, InfeasibleError, NotApplicableError
from runner.config.schema import Config
from runner.experiment.experiment import plan
from runner.experiment.headline import headline
from runner.experiment.model_spec import model_spec
from runner.experiment.serving import generates
from runner.output.metrics import BY_NAME, OF_PLANS
from runner.output.terminal import counted
from runner.output.units import GIB
from runner.plans.bottleneck import limit_of, time_shares
from runner.plans.space import Plan, Refusals

__all__ = ["Candidate", "Costed", "Outcome", "costed", "none_fits", "shortly"]


@dataclass(frozen=True, eq=False, slots=True)
class Candidate:
    """A plan with its run's configuration."""

    plan: Plan
    overrides: tuple[str, ...]
    """The overrides of its run, without those that all plans share."""
    config: Config


@dataclass(frozen=True, eq=False, slots=True)
class Costed:
    """A plan that fits, with its cost."""

    candidate: Candidate
    metrics: Mapping[str, float]
    """The metrics of its run, by `runner.experiment.headline`."""
    subject_line: str
    shares: Mapping[str, float]
    """The shares of time, by `runner.plans.bottleneck.time_shares`."""

    @property
    def examples_per_s(self) -> float:
        """The throughput of all replicas together, for a decode in tokens/s.

        Decodes do not overlap: a text's next token waits for this one, and pipelining several
        batches would need a cache for each.
        """
        return self.metrics["examples_per_s"]

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second; None if the model is not of texts."""
        return self.metrics.get("tokens_per_s")

    @property
    def price(self) -> float:
        """USD per example, or per token of a decode; infinite if no price is known."""
        rate = self.examples_per_s
        return self.metrics.get("price_per_hour", float("inf")) / 3600 / rate if rate else 0.0

    @property
    def latency_s(self) -> float:
        """The time of a step with all microbatches, of one input, or of a whole generation."""
        config = self.candidate.config
        if generates(config):
            return config.model.batch_size / self.examples_per_s
        return self.metrics.get("step_ms", self.metrics["latency_ms"]) / 1e3

    @property
    def memory_bytes(self) -> float:
        """Expected memory of the fullest device, as in the verdict of a run."""
        gib = self.metrics.get("device_memory_gib", self.metrics["peak_memory_gib"])
        return gib * GIB

    @property
    def devices_used(self) -> int:
        """Devices used by all replicas together."""
        return round(self.metrics["devices_used"])

    @property
    def devices_idle(self) -> int:
        """Devices of the plan's groups and replicas that compute nothing."""
        plan = self.candidate.plan
        return plan.tensor_parallel * plan.replicas * plan.groups - self.devices_used

    @property
    def stages(self) -> int:
        """Computing devices, or tensor-parallel groups, of a replica."""
        plan = self.candidate.plan
        return self.devices_used // (plan.tensor_parallel * plan.replicas)

    def beyond(self, limits: Mapping[str, float]) -> str:
        """Return the first of `limits` that the plan does not keep, with its value; or nothing."""
        for name, limit in limits.items():
            if self.excess(name, limit) > 1:
                sign = ">" if BY_NAME[name].better == "lower" else "<"
                return f"{name}={self.limited(name):.6g} {sign} {limit:.6g}"
        return ""

    def limited(self, name: str) -> float:
        """Return a metric, or 0 if the plan has nothing that it counts, such as collectives.

        Raises:
            NotApplicableError: if the metric belongs to other runs.

        """
        if name == "step_ms":
            return self.latency_s * 1e3
        value = self.metrics.get(name)
        if value is None and BY_NAME[name].jobs not in OF_PLANS:
            needs = BY_NAME[name].jobs or "other runs"
            raise NotApplicableError(f"limits.{name}: plans here have none; it is of {needs}")
        return value or 0.0

    def excess(self, name: str, limit: float) -> float:
        """Return a metric relative to its `limit`, as a number above 1 if it is beyond."""
        value = self.limited(name)
        larger, smaller = (value, limit) if BY_NAME[name].better == "lower" else (limit, value)
        if larger <= smaller:  # also where both are 0
            return 1.0
        return larger / smaller if smaller else float("inf")

    @property
    def limit(self) -> str:
        """The two largest shares of time, as text."""
        return limit_of(self.shares, 2)


@dataclass(frozen=True, eq=False, slots=True)
class Outcome:
    """The result of searching a space: every plan costed, refused or pruned."""

    ranking: tuple[Costed, ...]
    """The plans that fit, best first. For throughput and cost, plans that leave devices idle come
    after those that use all, unless one of them is the best."""
    unfit: tuple[tuple[Candidate, InfeasibleError], ...] = ()
    """The plans that do not fit, in the order of the space."""
    beyond: tuple[Costed, ...] = ()
    """The plans that fit but do not keep the limits of the request."""
    bounded: tuple[tuple[Candidate, float], ...] = ()
    """The pruned plans, which cannot be among the best, with their bounds in the unit of the
    objective: most examples per second, least latency in seconds, or least USD per example."""
    refusals: Refusals = field(default_factory=lambda: Refusals({}))
    """The reasons why values are in no plan."""

    @property
    def total(self) -> int:
        """Number of plans in the space."""
        return len(self.plans)

    @property
    def plans(self) -> list[Plan]:
        """All plans of the space."""
        return [
            *(costed.candidate.plan for costed in (*self.ranking, *self.beyond)),
            *(candidate.plan for candidate, _ in self.unfit),
            *(candidate.plan for candidate, _ in self.bounded),
        ]


def costed(candidate: Candidate, *, streams: bool) -> Costed:
    """Return the cost of a plan; with `streams`, inputs overlap in a stream.

    Raises:
        FxpartError: if the plan does not fit, or is invalid.

    """
    config = candidate.config
    result = plan(config, model_spec(config), may_capture=False, advises=False)
    shares = time_shares(config, result, streams=streams)
    return Costed(candidate, headline(result), result.subject_line, shares)


def shortly(error: FxpartError) -> str:
    """Return the message of an error, without its advice."""
    return str(error).split(";", maxsplit=1)[0]


def none_fits(outcome: Outcome, limits: Mapping[str, float]) -> InfeasibleError:
    """Return the error for a space without a plan that fits, naming the one that lacks least."""
    if outcome.beyond:
        nearest = min(
            outcome.beyond,
            key=lambda plan: max(plan.excess(*limit) for limit in limits.items()),
        )
        return InfeasibleError(
            f"none of {counted(outcome.total, 'plan')} keeps the limits; nearest is"
            f" {' '.join(nearest.candidate.overrides)}: {nearest.beyond(limits)}; take other"
            " limits, more or faster devices, or another batch"
        )

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

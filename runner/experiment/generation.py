"""A generation: prompts and decode on one placement, and how much more that placement holds.

The mode places the last decode, against the fullest cache. The pass over the prompts runs where
that leaves weights and caches. A size fits by the verdict of a run of that size.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from fxpart.core.assignment import Assignment
from fxpart.core.granularity import group_operators
from fxpart.core.graph import OpGraph
from fxpart.core.reserve import rounded
from fxpart.cost.device_memory import DeviceMemory
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.holding import holding
from fxpart.cost.problem import Problem, make_problem
from fxpart.cost.tables import LatencySource
from fxpart.errors import SpecError
from fxpart.placement.follow import follow
from fxpart.placement.search.refine import latency_of
from runner.config.sections import Config
from runner.experiment.device_memory import device_needs
from runner.experiment.runtime import as_kernels, devices_compiled_for
from runner.experiment.serving_steps import ServingSteps, Sizes
from runner.experiment.topology import rounding_bytes
from runner.output.terminal import counted
from runner.output.units import format_s, format_size

__all__ = [
    "Generation",
    "GenerationPlan",
    "Pace",
    "generation",
    "generation_lines",
    "generation_metrics",
]

_MOST_TEXTS, _MOST_TOKENS = 2**20, 2**24
"""Where the searches for the largest batch and the longest context end."""
_SEARCHED = "the search ends there"
_STRIDE = 64
"""The share of a size that is tried less of at first, where the largest that has room is too much:
what an allocator keeps is some percent."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a plan takes for a batch of prompts and their continuations."""

    texts: int
    prompt_len: int
    output_len: int
    ttft_s: float
    """Time to the first token of each text, which the pass over the prompts makes."""
    tpot_s: float
    """Mean time of each other token."""

    @property
    def total_s(self) -> float:
        """Time from the prompts to the last tokens."""
        return self.ttft_s + (self.output_len - 1) * self.tpot_s

    @property
    def texts_per_s(self) -> float:
        """Texts, each with all its tokens: the caches of the next batch need the room of these."""
        return self.texts / self.total_s if self.total_s else float("inf")

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated for all texts, over the whole time."""
        return self.texts_per_s * self.output_len


@dataclass(frozen=True, slots=True)
class Generation(Pace):
    """What a plan takes for the sizes that it was made for, and what else it holds."""

    max_batch: int
    """The most texts of this length."""
    max_context: int
    """The most tokens of as many texts as there are, with prompts as they are."""
    batch_end: str = ""
    """Why there is no larger batch, where that is not memory."""
    context_end: str = ""
    """Why there is no longer context, where that is not memory."""


@dataclass(frozen=True, eq=False, slots=True)
class GenerationPlan:
    """One placement of both steps, costed at any size."""

    config: Config
    steps: ServingSteps
    problem: Problem
    """Of the last decode."""
    assignment: Assignment
    """Of the operators of every decode."""
    latency: LatencySource
    peers: Mapping[int, int]
    """With how many devices each exchanges tensors."""
    _follows: dict[tuple[str, ...], Assignment] = field(default_factory=dict)
    """Placements of prompts, and of decodes captured otherwise, by the names of operators."""

    @property
    def sizes(self) -> Sizes:
        """Those that the plan was made for."""
        return self.steps.sizes

    def needs(self, at: Sizes | None = None) -> tuple[DeviceMemory, ...]:
        """Return what each device needs for both steps, in the order of logical ids."""
        most: dict[int, DeviceMemory] = {}
        for problem, assignment in self._both(at or self.sizes):
            for need in self._needs_of(problem, assignment):
                known = most.get(need.device)
                if known is None or need.needed.expected > known.needed.expected:
                    most[need.device] = need
        return tuple(most[device] for device in sorted(most))

    def fits(self, at: Sizes) -> bool:
        """Return whether a run of these sizes would be told to fit: its tensors, and all else."""
        return all(self._holds(*placed) for placed in self._both(at))

    def has_room(self, at: Sizes) -> bool:
        """Return whether tensors of this size fit beside the reserve, as they do where it `fits`.

        That takes a tenth of the time.
        """
        return all(self._holds_tensors(*placed) for placed in self._both(at))

    def decode_s(self, batch: int, context_len: int) -> float:
        """Return the time of one token of each text against `context_len` tokens, its own too."""
        problem, assignment = self._placed(self.steps.decode(batch, context_len))
        return latency_of(problem, assignment.device_of)

    def pace(self, at: Sizes) -> Pace:
        """Return the times of a generation of these sizes, whether or not it fits."""
        _, (problem, assignment) = self._both(at)
        return Pace(
            at.texts,
            at.prompt_len,
            at.context_len - at.prompt_len,
            ttft_s=latency_of(problem, assignment.device_of),
            tpot_s=_mean_decode_s(self, at.texts, at.prompt_len + 1, at.context_len - 1),
        )

    def _both(self, at: Sizes) -> Iterator[tuple[Problem, Assignment]]:
        """Yield the decode of these sizes, then the pass over prompts that fill its cache."""
        decode = self.steps.decode(at.texts, at.context_len)
        yield self._placed(decode)
        yield self._placed(self.steps.prefill(at.texts, at.prompt_len, decode))

    def _placed(self, graph: OpGraph) -> tuple[Problem, Assignment]:
        multiple = rounding_bytes(self.config.devices, self.config.reserve)
        topology = self.problem.topology
        devices = devices_compiled_for(self.assignment)
        grouped = group_operators(rounded(graph, multiple), self.config.granularity)
        kernels = as_kernels(self.config, grouped, devices, is_kept=False)
        problem = make_problem(kernels, topology, self.latency)
        # All sizes of a capture have the same names, in one tuple.
        if graph.names == self.problem.graph.names:
            return problem, self.assignment
        if graph.names not in self._follows:
            self._follows[graph.names] = follow(self.problem.graph, self.assignment, graph)
        return problem, self._follows[graph.names]

    def _needs_of(self, problem: Problem, assignment: Assignment) -> tuple[DeviceMemory, ...]:
        held = holding(problem.memory, assignment, problem.topology.n_devices).peak_bytes
        by_device = dict(enumerate(held.tolist()))
        return device_needs(self.config, problem, assignment, by_device, self.peers)

    def _holds_tensors(self, problem: Problem, assignment: Assignment) -> bool:
        held = holding(problem.memory, assignment, problem.topology.n_devices).peak_bytes
        return bool((held <= problem.topology.memory_bytes).all())

    def _holds(self, problem: Problem, assignment: Assignment) -> bool:
        if not self._holds_tensors(problem, assignment):
            return False
        needs = self._needs_of(problem, assignment)
        return all(need.verdict != "does not fit" for need in needs)


def generation(plan: GenerationPlan) -> Generation:
    """Return the times of a plan at the sizes of its configuration, and its limits."""
    sizes, pace = plan.sizes, plan.pace(plan.sizes)
    max_batch = _largest(
        lambda texts: plan.has_room(sizes._replace(texts=texts)),
        lambda texts: plan.fits(sizes._replace(texts=texts)),
        sizes.texts,
        _MOST_TEXTS,
    )
    max_context, context_end = _longest(plan, sizes)
    return Generation(
        **asdict(pace),
        max_batch=max_batch,
        max_context=max_context,
        batch_end=_SEARCHED if max_batch == _MOST_TEXTS else "",
        context_end=context_end,
    )


def _mean_decode_s(plan: GenerationPlan, batch: int, first: int, last: int) -> float:
    """Return the mean time of a decode over contexts from `first` to `last`, by Simpson's rule.

    The time of an operator grows in proportion to the context, where it grows, but for a kernel
    that changes from one of its limits to another.
    """
    if first >= last:
        return plan.decode_s(batch, first)
    middle = plan.decode_s(batch, (first + last) // 2)
    return (plan.decode_s(batch, first) + 4 * middle + plan.decode_s(batch, last)) / 6


def _longest(plan: GenerationPlan, sizes: Sizes) -> tuple[int, str]:
    """Return the longest context that fits, from one that does, and why no longer one is tried."""
    context_len = sizes.context_len
    while True:
        end = plan.steps.end_of_range(sizes.texts, context_len)
        most = min(end or _MOST_TOKENS, _MOST_TOKENS)
        longest = _largest(
            lambda tokens: plan.has_room(sizes._replace(context_len=tokens)),
            lambda tokens: plan.fits(sizes._replace(context_len=tokens)),
            context_len,
            most,
        )
        if longest < most:
            return longest, ""
        if end != most:
            return longest, _SEARCHED
        try:
            fits = plan.fits(sizes._replace(context_len=end + 1))
        except SpecError:
            return longest, "the model's longest"
        if not fits:
            return longest, ""
        context_len = end + 1


def _largest(
    has_room: Callable[[int], bool], fits: Callable[[int], bool], known: int, most: int
) -> int:
    """Return the largest size up to `most` that fits, from a `known` one that does.

    `has_room` is quick, and true of whatever fits.
    """
    low, high = known, known
    while high < most and has_room(high):
        low, high = high, min(2 * high, most)
    top = high if has_room(high) else _last(has_room, low, high)
    if fits(top):
        return top
    high, stride = top, max(1, top // _STRIDE)
    while (low := max(known, high - stride)) > known and not fits(low):
        high, stride = low, 2 * stride
    return _last(fits, low, high)


def _last(is_true: Callable[[int], bool], low: int, high: int) -> int:
    """Return the last size from `low`, of which it is true, before `high`, of which it is not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_true(middle) else (low, middle)
    return low


def generation_metrics(made: Generation) -> dict[str, float]:
    """Return the metrics of a generation by name, without those of its cache."""
    return {
        "ttft_ms": made.ttft_s * 1e3,
        "tpot_ms": made.tpot_s * 1e3,
        "tokens_per_s": made.tokens_per_s,
        "max_batch": float(made.max_batch),
        "max_context": float(made.max_context),
    }


def generation_lines(made: Generation, evaluation: Evaluation, rate: str) -> tuple[str, str]:
    """Return the times in one line, and in another what the placement holds; `evaluation` is its.

    The cache of each device is that of the last decode; `rate` is the throughput as text.
    """
    times = (
        f"first token after {format_s(made.ttft_s)}, then {format_s(made.tpot_s)} a token;"
        f" {made.output_len} tokens of {counted(made.texts, 'text')} in {format_s(made.total_s)},"
        f" {rate}"
    )
    cached = [use for use in evaluation.devices if use.cache_bytes]
    most = max((use.cache_bytes for use in cached), default=0)
    context_len = made.prompt_len + made.output_len
    batch_end = f" ({made.batch_end})" if made.batch_end else ""
    context_end = f" ({made.context_end})" if made.context_end else ""
    holds = (
        f"{format_size(most)} a device at most; this plan holds"
        f" {counted(made.max_batch, 'text')} of {context_len:,} tokens{batch_end}, or"
        f" {made.texts} of {made.max_context:,}{context_end}"
    )
    return times, holds

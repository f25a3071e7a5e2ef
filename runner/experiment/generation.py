"""Generation: prefill and decode on one placement, and the largest sizes that it can hold.

The mode places the last decode step, which has the fullest cache. Prefill follows the placement of
weights and caches. A size fits if a run of that size would.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import NamedTuple

from fxpart.core.assignment import Assignment
from fxpart.core.granularity import group_operators
from fxpart.core.graph import OpGraph
from fxpart.core.reserve import rounded
from fxpart.cost.device_memory import DeviceMemory
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.problem import Problem, make_problem
from fxpart.cost.tables import LatencySource
from fxpart.errors import SpecError
from fxpart.placement.follow import follow
from fxpart.placement.offload.machine import Machine
from fxpart.placement.offload.other_sizes import PlacedStep, TieredPlan, most_offloaded
from runner.config.schema import Config
from runner.experiment.device_memory import device_needs
from runner.experiment.largest_size import largest
from runner.experiment.runtime import as_kernels, devices_compiled_for
from runner.experiment.serving_steps import ServingSteps, Sizes, keep
from runner.experiment.topology import rounding_bytes
from runner.output.terminal import counted
from runner.output.units import format_s, format_size

__all__ = [
    "Generation",
    "GenerationPlan",
    "Limits",
    "Pace",
    "generation",
    "generation_lines",
    "generation_metrics",
]

_MOST_TEXTS, _MOST_TOKENS = 2**20, 2**24
"""Limits of the searches for the largest batch and the longest context."""
_SEARCHED = "the search ends there"
_STEPS_KEPT = 4
"""Number of steps kept: a search asks for the room of a size, then for its memory."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of a plan for a batch of prompts and their continuations."""

    texts: int
    """Texts of all replicas, which share them equally."""
    prompt_len: int
    output_len: int
    ttft_s: float
    """Time to the first token of each text, produced by prefill."""
    tpot_s: float
    """Mean time of every further token, including the wait for the prompts of other texts."""
    waited_s: float
    """That wait: with ``prefill_batch``, texts that end are replaced one pass after the other."""

    @property
    def total_s(self) -> float:
        """Time from the prompts to the last tokens."""
        return self.ttft_s + (self.output_len - 1) * self.tpot_s

    @property
    def texts_per_s(self) -> float:
        """Whole texts per second: batch after batch, or of texts that replace those that end."""
        return self.texts / self.total_s if self.total_s else float("inf")

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all texts per second of total time."""
        return self.texts_per_s * self.output_len


class Limits(NamedTuple):
    """The largest sizes that fit the devices and tiers."""

    batch: int
    """The most texts of the planned length, in all replicas."""
    context: int
    """The most tokens per text for the planned number of texts and prompt length."""
    batch_end: str = ""
    """Why there is no larger batch, if not for memory."""
    context_end: str = ""
    """Why there is no longer context, if not for memory."""


@dataclass(frozen=True, slots=True)
class Generation(Pace):
    """Times of a plan at its own sizes, and the largest sizes that fit."""

    limits: Limits
    """Limits of this placement."""
    in_tiers: Limits | None = None
    """Limits of placements with everything possible in tiers; None without tiers."""
    longest_tpot_s: float | None = None
    """Time per token at the longest context of `in_tiers`, if a placement holds it."""


@dataclass(frozen=True, eq=False, slots=True)
class GenerationPlan:
    """One placement of both steps, costed at any size."""

    config: Config
    steps: ServingSteps
    problem: Problem
    """The problem of the last decode."""
    assignment: Assignment
    """The placement of every decode's operators."""
    latency: LatencySource
    peers: Mapping[int, int]
    """Number of communication peers of each device."""
    machine: Machine | None = None
    """The devices with their tiers; None without tiers."""
    tiers: TieredPlan | None = None
    """The tensors in tiers, if any."""
    _follows: dict[tuple[str, ...], Assignment] = field(default_factory=dict)
    """Placements of prefill, and of decodes from other captures, by operator names."""
    _problems: dict[tuple[OpGraph, int], Problem] = field(default_factory=dict)
    """The latest problems by graph and number of devices, also of other plans."""
    _decodes: dict[OpGraph, PlacedStep] = field(default_factory=dict)
    """The latest decodes by graph."""
    _prefills: dict[Sizes, PlacedStep] = field(default_factory=dict)
    """The latest prefills by the sizes of their cache."""
    _memory: dict[PlacedStep, tuple[DeviceMemory, ...]] = field(default_factory=dict)
    """The memory of the latest steps."""

    @property
    def sizes(self) -> Sizes:
        """The sizes that the plan was made for, of one replica."""
        return self.steps.sizes

    def needs(self, sizes: Sizes | None = None) -> tuple[DeviceMemory, ...]:
        """Return the memory that each device needs for both steps, in the order of logical ids."""
        needs_of: dict[int, DeviceMemory] = {}
        for step in self._both(sizes or self.sizes):
            for need in self._needs_of(step):
                largest_need = needs_of.get(need.device)
                if largest_need is None or need.needed.expected > largest_need.needed.expected:
                    needs_of[need.device] = need
        return tuple(needs_of[device] for device in sorted(needs_of))

    def fits(self, sizes: Sizes) -> bool:
        """Return whether a run of these sizes would fit, with its memory besides tensors."""
        return self.needed_share(sizes) <= 1

    def needed_share(self, sizes: Sizes) -> float:
        """Return the share of the fullest device's memory that a run of these sizes needs."""
        return self._share(sizes, self._needed_by)

    def room_share(self, sizes: Sizes) -> float:
        """Return the share of memory next to the reserve that tensors of these sizes take.

        It is at most 1 if a run fits, and takes a tenth of the time of `needed_share`.
        """
        return self._share(sizes, lambda step: step.room_share)

    def _share(self, sizes: Sizes, share_of: Callable[[PlacedStep], float]) -> float:
        """Return the largest share of both steps, or one above 1 if the first step has it."""
        share = 0.0
        for step in self._both(sizes):
            share = max(share, share_of(step))
            if share > 1:
                break
        return share

    def decode_s(self, batch: int, context_len: int) -> float:
        """Return the time of one decode step at `context_len` tokens, the new token included."""
        return self._decode(self.steps.decode(batch, context_len)).latency_s

    def pace(self, sizes: Sizes) -> Pace:
        """Return the times of a generation of these sizes, whether or not it fits."""
        _, prompts = self._both(sizes)
        output_len = sizes.context_len - sizes.prompt_len
        # While a text decodes, each of the others is replaced once.
        other_passes = sizes.texts / self._prompts_at_once(sizes) - 1
        waited_s = other_passes * prompts.latency_s / (output_len - 1)
        decode_s = _mean_decode_s(self, sizes.texts, sizes.prompt_len + 1, sizes.context_len - 1)
        return Pace(
            sizes.texts * self.config.data_parallel,
            sizes.prompt_len,
            output_len,
            ttft_s=prompts.latency_s,
            tpot_s=decode_s + waited_s,
            waited_s=waited_s,
        )

    def _prompts_at_once(self, sizes: Sizes) -> int:
        return min(self.config.prefill_batch or sizes.texts, sizes.texts)

    def most_offloaded(self, sizes: Sizes) -> "GenerationPlan | None":
        """Return a plan of these sizes with everything possible in tiers; None if it does not fit.

        Its placement is not searched for.
        """
        if self.machine is None:
            return None
        graph = self.steps.decode(sizes.texts, sizes.context_len)
        problem = self._problem(graph)
        offloaded = most_offloaded(replace(self.machine, problem=problem, first=None))
        if offloaded is None:
            return None
        tiers, step = offloaded
        plan = replace(
            self,
            problem=step.problem,
            assignment=step.assignment,
            tiers=tiers,
            _follows={},
            _decodes={},
            _prefills={},
            _memory={},
        )
        if plan._problem(graph) is problem:
            plan._decodes[graph] = step
        return plan if plan.fits(sizes) else None

    def _both(self, sizes: Sizes) -> Iterator[PlacedStep]:
        """Yield the decode of these sizes, then the prefill of its cache."""
        decode = self.steps.decode(sizes.texts, sizes.context_len)
        yield self._decode(decode)
        prompts = self._prefills.get(sizes)
        if prompts is None:
            at_once = self._prompts_at_once(sizes)
            prompts = self._prompts(self.steps.prefill(at_once, sizes.prompt_len, decode))
            keep(self._prefills, sizes, prompts, _STEPS_KEPT)
        yield prompts

    def _decode(self, graph: OpGraph) -> PlacedStep:
        step = self._decodes.get(graph)
        if step is None:
            problem = self._problem(graph)
            step = PlacedStep(problem, self._assignment(problem.graph))
            if self.tiers is not None:
                step = self.tiers.placed(problem, step.assignment)
            keep(self._decodes, graph, step, _STEPS_KEPT)
        return step

    def _prompts(self, graph: OpGraph) -> PlacedStep:
        """Return the placed prefill: the fastest variant that fits."""
        problem = self._problem(graph)
        assignment = self._assignment(problem.graph)
        if self.tiers is None:
            return PlacedStep(problem, assignment)
        steps = self.tiers.prompts(problem, assignment)
        return next((step for step in steps[:-1] if self._holds(step)), steps[-1])

    def _problem(self, graph: OpGraph) -> Problem:
        """Return the problem of a graph on the plan's devices, without tiers."""
        config, machine = self.config, self.machine
        topology = machine.problem.topology if machine else self.problem.topology
        in_parts = topology.n_devices if self.tiers else devices_compiled_for(self.assignment)
        problem = self._problems.get((graph, in_parts))
        if problem is not None:
            return problem
        multiple = rounding_bytes(config.devices, config.reserve)
        grouped = group_operators(rounded(graph, multiple), config.granularity)
        kernels = as_kernels(config, grouped, in_parts, is_kept=False)
        problem = make_problem(kernels, topology, self.latency)
        keep(self._problems, (graph, in_parts), problem, _STEPS_KEPT)
        return problem

    def _assignment(self, graph: OpGraph) -> Assignment:
        # All sizes of a capture share one tuple of names.
        if graph.names == self.problem.graph.names:
            return self.assignment
        if graph.names not in self._follows:
            self._follows[graph.names] = follow(self.problem.graph, self.assignment, graph)
        return self._follows[graph.names]

    def _needs_of(self, step: PlacedStep) -> tuple[DeviceMemory, ...]:
        needs = self._memory.get(step)
        if needs is None:
            held_bytes = dict(enumerate(step.held_bytes.tolist()))
            needs = device_needs(self.config, step.problem, step.assignment, held_bytes, self.peers)
            keep(self._memory, step, needs, _STEPS_KEPT)
        return needs

    def _holds(self, step: PlacedStep) -> bool:
        return self._needed_by(step) <= 1

    def _needed_by(self, step: PlacedStep) -> float:
        """Return the share of memory that a step needs; tensors alone may need too much."""
        needs = self._needs_of(step) if step.room_share <= 1 else ()
        shares = (need.needed.expected / max(need.total_bytes, 1) for need in needs)
        return max(step.room_share, *shares, 0.0)


def generation(plan: GenerationPlan) -> Generation:
    """Return the times of a plan at the sizes of its configuration, and its limits."""
    own_limits = _limits(plan, plan.sizes, plan.room_share, plan.needed_share)
    in_tiers, slowest = None, None
    if plan.machine:

        def share(sizes: Sizes) -> float:
            # Whether it fits is all that is known, so the search halves.
            return inf if plan.most_offloaded(sizes) is None else 0.0

        known = (
            plan.sizes._replace(texts=own_limits.batch),
            plan.sizes._replace(context_len=own_limits.context),
        )
        in_tiers = _limits(plan, plan.sizes, share, share, known)
        longest = plan.sizes._replace(context_len=in_tiers.context)
        offloaded = plan.most_offloaded(longest)
        slowest = offloaded.decode_s(longest.texts, longest.context_len) if offloaded else None
    pace, replicas = plan.pace(plan.sizes), plan.config.data_parallel
    return Generation(
        **asdict(pace),
        limits=own_limits._replace(batch=own_limits.batch * replicas),
        in_tiers=in_tiers and in_tiers._replace(batch=in_tiers.batch * replicas),
        longest_tpot_s=slowest,
    )


def _limits(
    plan: GenerationPlan,
    sizes: Sizes,
    room: Callable[[Sizes], float],
    needed: Callable[[Sizes], float],
    known: tuple[Sizes, Sizes] | None = None,
) -> Limits:
    """Return the largest batch and the longest context that fit, starting from `known` ones."""
    batch, context = known or (sizes, sizes)
    max_batch = largest(
        lambda texts: room(sizes._replace(texts=texts)),
        lambda texts: needed(sizes._replace(texts=texts)),
        batch.texts,
        _MOST_TEXTS,
    )
    max_context, context_end = _longest(plan, context, room, needed)
    batch_end = _SEARCHED if max_batch == _MOST_TEXTS else ""
    return Limits(max_batch, max_context, batch_end, context_end)


def _mean_decode_s(plan: GenerationPlan, batch: int, first: int, last: int) -> float:
    """Return the mean decode time over contexts from `first` to `last`, by Simpson's rule.

    Operator times are constant or linear in the context, except where a kernel changes from one
    bound (compute, bandwidth) to another.
    """
    if first >= last:
        return plan.decode_s(batch, first)
    middle = plan.decode_s(batch, (first + last) // 2)
    return (plan.decode_s(batch, first) + 4 * middle + plan.decode_s(batch, last)) / 6


def _longest(
    plan: GenerationPlan,
    sizes: Sizes,
    room: Callable[[Sizes], float],
    needed: Callable[[Sizes], float],
) -> tuple[int, str]:
    """Return the longest context that fits, starting from one that does, and why the search ended.

    The reason is empty if memory is the limit.
    """
    context_len = sizes.context_len
    while True:
        end = plan.steps.end_of_range(sizes.texts, context_len)
        limit = min(end or _MOST_TOKENS, _MOST_TOKENS)
        longest = largest(
            lambda tokens: room(sizes._replace(context_len=tokens)),
            lambda tokens: needed(sizes._replace(context_len=tokens)),
            context_len,
            limit,
        )
        if longest < limit:
            return longest, ""
        if end != limit:
            return longest, _SEARCHED
        try:
            is_next = needed(sizes._replace(context_len=end + 1)) <= 1
        except SpecError:
            return longest, "the model's longest"
        if not is_next:
            return longest, ""
        context_len = end + 1


def generation_metrics(generation: Generation) -> dict[str, float]:
    """Return the metrics of a generation by name, except those of its cache."""
    return {
        "ttft_ms": generation.ttft_s * 1e3,
        "tpot_ms": generation.tpot_s * 1e3,
        "tokens_per_s": generation.tokens_per_s,
        "max_batch": float(generation.limits.batch),
        "max_context": float(generation.limits.context),
        **(
            {
                "max_batch_in_tiers": float(generation.in_tiers.batch),
                "max_context_in_tiers": float(generation.in_tiers.context),
            }
            if generation.in_tiers
            else {}
        ),
    }


def generation_lines(
    generation: Generation, evaluation: Evaluation, rate: str
) -> list[tuple[str, str]]:
    """Return titled lines on times, the limits of the placement, and those with tiers.

    `evaluation` is of the last decode, with the cache of each device; `rate` is the throughput as
    text.
    """
    waits = (
        f" ({format_s(generation.waited_s)} of it wait for the prompts of other texts)"
        if generation.waited_s
        else ""
    )
    times = (
        f"first token after {format_s(generation.ttft_s)}, then {format_s(generation.tpot_s)} a"
        f" token{waits}; {generation.output_len} tokens of {counted(generation.texts, 'text')} in"
        f" {format_s(generation.total_s)}, {rate}"
    )
    uses = [use for use in evaluation.devices if use.cache_bytes]
    context_len = generation.prompt_len + generation.output_len
    cache_line = f"this plan holds {_limits_text(generation.limits, generation.texts, context_len)}"
    if uses:
        largest_cache = format_size(max(use.cache_bytes for use in uses))
        cache_line = f"{largest_cache} a device at most; {cache_line}"
    lines = [("generate", times), ("cache", cache_line)]
    if generation.in_tiers:
        limits_in_tiers = _limits_text(generation.in_tiers, generation.texts, context_len)
        pace = (
            ""
            if generation.longest_tpot_s is None
            else f", {format_s(generation.longest_tpot_s)} a token"
        )
        lines.append(
            ("most", f"a plan with all in tiers that can lie there holds {limits_in_tiers}{pace}")
        )
    return lines


def _limits_text(limits: Limits, texts: int, context_len: int) -> str:
    batch_end = f" ({limits.batch_end})" if limits.batch_end else ""
    context_end = f" ({limits.context_end})" if limits.context_end else ""
    return (
        f"{counted(limits.batch, 'text')} of {context_len:,} tokens{batch_end}, or"
        f" {texts} of {limits.context:,}{context_end}"
    )

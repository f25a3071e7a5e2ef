"""The search space of plans: compatible degrees, stages, batches and modes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from fxpart.core.data_parallel import split_topology
from fxpart.core.tensor_groups import tensor_groups
from fxpart.core.topology import Topology
from fxpart.errors import NotApplicableError, SpecError, nearest_degrees
from runner.config.schema import Config, ModeConfig, ScheduleConfig
from runner.experiment.degrees import check_tensor_degree, expert_degrees, stated_experts
from runner.experiment.mesh import GATHERING
from runner.experiment.topology import build_topology
from runner.experiment.training import is_training
from runner.plans.request import ONLY, Request, Variant

__all__ = ["ALIKE", "KEYS", "REPLICAS", "STAGES", "WEIGHTS", "Plan", "Refusals", "plans", "shown"]

_DEGREES = (
    "tensor_parallel",
    "sequence_parallel",
    "data_parallel",
    "context_parallel",
    "expert_parallel",
    "zero",
)
ALIKE = (*_DEGREES, "microbatches", "checkpointing")
"""Settings with the same name in a plan and in a configuration."""
KEYS = {
    **{name: name for name in ALIKE},
    "batch": "model.batch_size",
    "schedule": "schedule",
    "mode": "mode",
}
"""The name of each setting of the space on the command line."""
STAGES = "stages"
"""Key of refusals of pipelines, by number of stages."""
WEIGHTS = "weights"
"""Key of refusals of formats of weights, by name."""
REPLICAS = "replicas"
"""Key of refusals of single-device replicas, by number of replicas."""
_MICROBATCHES = (8, 32)
"""Microbatches tried if the batch is free: a few, and enough for a small pipeline bubble."""
_BATCHES = (1, 2, 4)
"""Multiples of `model.batch_size` tried as microbatch sizes if the global batch is given."""
_TRAINS = ("1f1b", "interleaved")
"""Schedules tried: ``gpipe`` has the bubble of ``1f1b`` and uses more memory."""
_INTERLEAVED = "interleaved"
_CHUNKS = 2
"""Stages per device with ``interleaved``."""
_LONG = 16384
"""Sequence length in tokens from which context parallelism is tried: Llama 3 was trained without it
at 8,192 and with it at 131,072 (arXiv:2407.21783, table 4)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One point of the space."""

    tensor_parallel: int
    data_parallel: int
    groups: int
    """Devices, or tensor-parallel groups, of a replica."""
    mode: str
    schedule: str
    microbatches: int
    batch: int
    """Examples per replica at a time."""
    zero: int
    checkpointing: str
    interleave: int = 1
    """Stages per device, with ``schedule=interleaved``."""
    variant: Variant = ONLY
    """The choices of its configuration, where there are several."""
    sequence_parallel: bool = False
    context_parallel: int = 1
    expert_parallel: int = 1

    @property
    def replicas(self) -> int:
        """Replicas that all-reduce gradients: over examples, and over pieces of a sequence."""
        return self.data_parallel * self.context_parallel

    @property
    def batch_size(self) -> int:
        """Examples of all replicas at a time: ``model.batch_size`` of its run."""
        return self.batch * self.data_parallel

    @property
    def examples(self) -> int:
        """Examples of a step, or of one input, over all replicas."""
        return self.batch_size * self.microbatches

    def overrides(self, base: Config, *, has_mode: bool) -> tuple[str, ...]:
        """Return the overrides that turn a run of `base` into this plan.

        With `has_mode`, `base` already has the plan's mode.
        """
        # Options given with the mode are not repeated.
        has_chunks = self.interleave == 1 or (has_mode and "interleave" in base.mode.options)
        changed = self.configuration(base)
        settings: dict[str, tuple[object, object]] = {
            **{name: (getattr(self, name), getattr(base, name)) for name in _DEGREES},
            "async_tensor_parallel": (changed.async_tensor_parallel, base.async_tensor_parallel),
            "reduce_dtype": (changed.reduce_dtype, base.reduce_dtype),
            "loss_parallel": (changed.loss_parallel, base.loss_parallel),
            "expert_imbalance": (changed.expert_imbalance, base.expert_imbalance),
            "model.batch_size": (self.batch_size, base.model.batch_size),
            "schedule": (self.schedule, base.schedule.name),
            "microbatches": (self.microbatches, base.microbatches),
            "mode.interleave": (self.interleave, self.interleave if has_chunks else 1),
            "checkpointing": (self.checkpointing, base.checkpointing),
        }
        texts = [
            f"{key}={shown(value)}" for key, (value, usual) in settings.items() if value != usual
        ]
        return (*self.variant.overrides, *([] if has_mode else [f"mode={self.mode}"]), *texts)

    def configuration(self, base: Config) -> Config:
        """Return `base` with the `overrides` of this plan."""
        options = dict(base.mode.options) if base.mode.name == self.mode else {}
        if self.mode == "pipeline":
            options |= {"schedule": self.schedule, "microbatches": self.microbatches}
        if self.interleave > 1:
            options["interleave"] = self.interleave
        shared: dict[str, Any] = {name: getattr(self, name) for name in ALIKE}
        return replace(
            base,
            **shared,
            async_tensor_parallel=base.async_tensor_parallel and self.sequence_parallel,
            reduce_dtype=base.reduce_dtype if self.zero >= GATHERING else None,
            loss_parallel=base.loss_parallel and self.tensor_parallel > 1,
            expert_imbalance=base.expert_imbalance if self.expert_parallel > 1 else 1.0,
            model=replace(base.model, batch_size=self.batch_size),
            mode=ModeConfig(self.mode, options),
            schedule=ScheduleConfig(self.schedule),
        )


def shown(value: object) -> str:
    """Return a value as typed on a command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(slots=True)
class Refusals:
    """The reasons why values are in no plan, by setting and value."""

    reasons: dict[tuple[str, object], SpecError]

    def add(self, plan: Plan, error: SpecError) -> None:
        """Record `error` for each value of `plan` that has no reason yet."""
        for name in KEYS:
            self.reasons.setdefault((name, getattr(plan, name)), error)
        if plan.variant.weights:
            self.reasons.setdefault((WEIGHTS, plan.variant.weights), error)
        if plan.mode == "pipeline":
            self.reasons.setdefault((STAGES, plan.groups), error)
        if plan.tensor_parallel == plan.groups == plan.context_parallel == 1:
            self.reasons.setdefault((REPLICAS, plan.data_parallel), error)


def plans(
    config: Config,
    usual_batch: int,
    request: Request,
    typed: Mapping[str, object],
    refusals: Refusals,
    *,
    prefix: str,
    variant: Variant = ONLY,
) -> list[Plan]:
    """Return the plans of the space; those that share a captured graph are adjacent.

    Args:
        config: the configuration that all plans vary.
        usual_batch: the default number of examples per replica at a time.
        request: the objective and the values to try.
        typed: the fixed values of settings in `KEYS`, given as overrides.
        refusals: collects the reasons why degrees are left out.
        prefix: the prefix of `request` settings in messages, such as ``recommend.``.
        variant: the choices of `config`, where there are several.

    """
    axes: dict[str, list[object] | None] = {
        name: [typed[name]] if name in typed else getattr(request.space, name) for name in KEYS
    }
    topology = build_topology(config.devices, config.transfer_rate, config.reserve)
    interleave = config.mode.options.get("interleave", 1)
    settings = _Settings(
        request,
        prefix,
        usual_batch,
        topology,
        axes,
        is_training(config),
        stated_experts(config),
        interleave if isinstance(interleave, int) and interleave > 1 else None,
    )
    unique: dict[Plan, None] = {}
    for degrees in _degrees(config, settings, refusals):
        for shared in _shared_layers(settings, degrees):
            for plan in _of_degrees(settings, shared):
                unique.setdefault(replace(plan, variant=variant))
    return sorted(unique, key=_order)


def _order(plan: Plan) -> tuple[object, ...]:
    """Return the sort key of a plan: plans of one graph together, likely best first."""
    return (
        plan.checkpointing != "none",
        plan.tensor_parallel,
        plan.sequence_parallel,
        plan.context_parallel,
        plan.expert_parallel,
        plan.data_parallel,
        plan.zero,
        plan.batch,
        -plan.microbatches,
        plan.schedule,
        plan.mode,
    )


@dataclass(frozen=True, eq=False, slots=True)
class _Settings:
    """The inputs of a space."""

    request: Request
    prefix: str
    """Prefix of `request` settings in messages."""
    usual_batch: int
    topology: Topology
    axes: Mapping[str, list[object] | None]
    """The requested values by setting; None for all that apply."""
    trains: bool
    experts: list[int]
    """Experts per layer, if the model states them."""
    interleave: int | None = None
    """Stages per device requested with ``mode=pipeline``."""

    def numbers(self, name: str) -> list[int]:
        """Return the requested integers of a setting; empty for all."""
        return [value for value in self.axes[name] or () if isinstance(value, int)]

    def switches(self, name: str) -> list[bool]:
        """Return the requested booleans of a setting; empty for all."""
        return [value for value in self.axes[name] or () if isinstance(value, bool)]

    def words(self, name: str) -> list[str]:
        return [str(value) for value in self.axes[name] or ()]


def _degrees(config: Config, settings: _Settings, refusals: Refusals) -> Iterator[Plan]:
    """Yield the degrees possible for the devices and heads, as plans without other settings."""
    topology = settings.topology
    divisors = _divisors(topology.n_devices)
    sequence, batch = config.model.seq_len or 0, settings.request.global_batch
    pieces = divisors if sequence >= _LONG else [1]
    for tensor in settings.numbers("tensor_parallel") or divisors:
        try:
            check_tensor_degree(config, tensor, topology.n_devices)
            groups = tensor_groups(topology, tensor)
        except NotApplicableError as error:
            refusals.reasons.setdefault(("tensor_parallel", tensor), error)
            continue
        for data, context in product(
            settings.numbers("data_parallel") or divisors,
            settings.numbers("context_parallel") or pieces,
        ):
            if batch is not None and batch % data:
                refusals.reasons["data_parallel", data] = NotApplicableError(
                    f"data_parallel={data} must divide {settings.prefix}global_batch={batch};"
                    f" use {nearest_degrees(data, [batch])}"
                )
                continue
            degrees = Plan(tensor, data, 1, "", "none", 1, 1, 0, "none", context_parallel=context)
            overrides = f"data_parallel={data}" + f" context_parallel={context}" * (context > 1)
            try:
                parallel = split_topology(groups.topology, degrees.replicas, overrides)
            except NotApplicableError as error:
                degree = ("context_parallel", context) if context > 1 else ("data_parallel", data)
                refusals.reasons.setdefault(degree, error)
                continue
            yield replace(degrees, groups=parallel.replica.n_devices)


def _divisors(count: int) -> list[int]:
    return [d for d in range(1, count + 1) if count % d == 0]


def _shared_layers(settings: _Settings, degrees: Plan) -> Iterator[Plan]:
    """Yield `degrees` with each option of sequence and expert parallelism."""
    split = degrees.tensor_parallel > 1
    sequences = [False]
    if split:
        sequences = settings.switches("sequence_parallel") or [False, True][: 1 + settings.trains]
    experts = settings.numbers("expert_parallel")
    if not experts:
        experts = [1]
        if settings.experts:
            fitting = expert_degrees(degrees.tensor_parallel, degrees.replicas, settings.experts)
            # With tensor parallelism as in vLLM: over all devices of a stage, or not at all.
            experts += fitting[-1:] if split else fitting
    for sequence, expert in product(sequences, experts):
        yield replace(degrees, sequence_parallel=sequence, expert_parallel=expert)


def _of_degrees(settings: _Settings, degrees: Plan) -> Iterator[Plan]:
    """Yield the plans with these degrees."""
    zeros = [0]
    if settings.trains and degrees.replicas > 1:
        # Gathering weights again in each forward does not lower the peak of a pipeline.
        zeros = [0, 1, 2, 3] if degrees.groups == 1 else [0, 1, 2]
    for mode, schedule, zero, recomputed in product(
        settings.words("mode") or _modes(settings, degrees),
        settings.words("schedule") or (["none", *_TRAINS] if settings.trains else ["none"]),
        settings.numbers("zero") or zeros,
        settings.words("checkpointing") or (["none", "block"] if settings.trains else ["none"]),
    ):
        # Replicas of several devices shard weights only in a pipeline over microbatches.
        if zero >= GATHERING and degrees.groups > 1 and schedule == "none":
            continue
        if schedule != "none" and not _takes_turns(mode, schedule, degrees):
            continue
        plan = replace(degrees, mode=mode, schedule=schedule, zero=zero, checkpointing=recomputed)
        if schedule == _INTERLEAVED:
            plan = replace(plan, interleave=settings.interleave or _CHUNKS)
        yield from filter(_has_equal_rounds, _with_batches(settings, plan))


def _takes_turns(mode: str, schedule: str, degrees: Plan) -> bool:
    """Return whether a schedule suits the mode; with a single stage, all schedules are the same."""
    if degrees.groups == 1:
        return mode == "single" and schedule == "1f1b"
    return mode == "pipeline"


def _has_equal_rounds(plan: Plan) -> bool:
    """Return whether ``interleaved`` divides the microbatches into equal rounds, as it must."""
    rounds = max(1, plan.microbatches // plan.groups)
    return plan.schedule != _INTERLEAVED or plan.microbatches % rounds == 0


def _modes(settings: _Settings, degrees: Plan) -> list[str]:
    """Return the modes that may be best on a replica's devices."""
    if degrees.groups == 1:
        return ["single"]
    is_uniform = len({(spec.memory_bytes, spec.name) for spec in settings.topology.devices}) == 1
    latency_counts = settings.request.objective == "latency" and not settings.trains
    if degrees.replicas == 1 and (not is_uniform or latency_counts):
        return ["single", "size_based", "pipeline", "kl_based"]
    return ["single", "pipeline"]


def _with_batches(settings: _Settings, plan: Plan) -> Iterator[Plan]:
    """Yield `plan` with each size and number of microbatches that gives the requested batch."""
    usual, global_batch = settings.usual_batch, settings.request.global_batch
    batches, counts = settings.numbers("batch"), settings.numbers("microbatches")
    scheduled = plan.schedule != "none"
    if global_batch is None:
        for batch in batches or [usual]:
            if scheduled:
                for count in counts or _MICROBATCHES:
                    yield replace(plan, batch=batch, microbatches=count)
            elif not counts or 1 in counts:
                yield replace(plan, batch=batch)
        return
    share = global_batch // plan.data_parallel
    if not scheduled:
        if (not batches or share in batches) and (not counts or 1 in counts):
            yield replace(plan, batch=share)
        return
    for batch in batches or sorted({usual * times for times in _BATCHES}):
        if share % batch == 0 and (not counts or share // batch in counts):
            yield replace(plan, batch=batch, microbatches=share // batch)

"""The plans that are tried: which degrees, stages, batches and modes go together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from fxpart.core.data_parallel import split_topology
from fxpart.core.tensor_groups import tensor_groups
from fxpart.core.topology import Topology
from fxpart.errors import NotApplicableError, SpecError, nearest_degrees
from runner.config.sections import Config, ModeConfig, ScheduleConfig
from runner.experiment.degrees import check_tensor_degree, expert_degrees, stated_experts
from runner.experiment.mesh import GATHERING
from runner.experiment.topology import build_topology
from runner.experiment.training import is_training
from runner.plans.request import Request

__all__ = ["ALIKE", "KEYS", "REPLICAS", "STAGES", "Plan", "Refusals", "plans", "shown"]

_DEGREES = (
    "tensor_parallel",
    "sequence_parallel",
    "data_parallel",
    "context_parallel",
    "expert_parallel",
    "zero",
)
ALIKE = (*_DEGREES, "microbatches", "checkpointing")
"""Settings that a plan and a configuration call the same."""
KEYS = {
    **{name: name for name in ALIKE},
    "batch": "model.batch_size",
    "schedule": "schedule",
    "mode": "mode",
}
"""What each setting of the space is called on the command line."""
STAGES = "stages"
"""The setting under which reasons against pipelines are kept, by their number of stages."""
REPLICAS = "replicas"
"""The same of replicas of one device, by their number."""
_MICROBATCHES = (8, 32)
"""Of a step whose batch is free: a few, and so many that a pipeline is hardly ever empty."""
_BATCHES = (1, 2, 4)
"""With a given batch, a microbatch has so many times `model.batch_size` examples."""
_TRAINS = ("1f1b", "interleaved")
"""Schedules that are tried: ``gpipe`` has the bubble of ``1f1b``, and holds more."""
_INTERLEAVED = "interleaved"
_CHUNKS = 2
"""Stages on each device that ``interleaved`` is tried with."""
_LONG = 16384
"""Tokens from which sequences are cut: Llama 3 was trained without that at 8,192, and with it at
131,072 (arXiv:2407.21783, table 4)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One point of the space."""

    tensor_parallel: int
    data_parallel: int
    groups: int
    """Devices of a replica, or tensor-parallel groups of them."""
    mode: str
    schedule: str
    microbatches: int
    batch: int
    """Examples that a replica takes at a time."""
    zero: int
    checkpointing: str
    interleave: int = 1
    """Stages on each device, of ``schedule=interleaved``."""
    devices: str = ""
    """Where there are several to choose from, which."""
    sequence_parallel: bool = False
    context_parallel: int = 1
    expert_parallel: int = 1

    @property
    def replicas(self) -> int:
        """Replicas that add up gradients: of examples, and of pieces of a sequence."""
        return self.data_parallel * self.context_parallel

    @property
    def batch_size(self) -> int:
        """Examples that all replicas take at a time: ``model.batch_size`` of its run."""
        return self.batch * self.data_parallel

    @property
    def examples(self) -> int:
        """Examples of a step, or of one input of all replicas."""
        return self.batch_size * self.microbatches

    def overrides(self, base: Config, *, has_mode: bool) -> tuple[str, ...]:
        """Return what makes this plan of a run with the configuration `base`.

        With `has_mode` that has the plan's mode already.
        """
        # What stands beside a mode that is given is not said again.
        has_chunks = self.interleave == 1 or (has_mode and "interleave" in base.mode.options)
        changed = self.configuration(base)
        settings: dict[str, tuple[object, object]] = {
            **{name: (getattr(self, name), getattr(base, name)) for name in _DEGREES},
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
        first = [f"devices={self.devices}"] if self.devices else []
        return (*first, *([] if has_mode else [f"mode={self.mode}"]), *texts)

    def configuration(self, base: Config) -> Config:
        """Return that of its run, what `base` is with its `overrides`."""
        options = dict(base.mode.options) if base.mode.name == self.mode else {}
        if self.mode == "pipeline":
            options |= {"schedule": self.schedule, "microbatches": self.microbatches}
        if self.interleave > 1:
            options["interleave"] = self.interleave
        alike: dict[str, Any] = {name: getattr(self, name) for name in ALIKE}
        return replace(
            base,
            **alike,
            expert_imbalance=base.expert_imbalance if self.expert_parallel > 1 else 1.0,
            model=replace(base.model, batch_size=self.batch_size),
            mode=ModeConfig(self.mode, options),
            schedule=ScheduleConfig(self.schedule),
        )


def shown(value: object) -> str:
    """Return a value as a command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(slots=True)
class Refusals:
    """Why values that were asked for by name are in no plan: by setting and value."""

    reasons: dict[tuple[str, object], SpecError]

    def add(self, plan: Plan, error: SpecError) -> None:
        """Note `error` for each value of `plan` that has no reason yet."""
        for name in KEYS:
            self.reasons.setdefault((name, getattr(plan, name)), error)
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
    devices: str = "",
) -> list[Plan]:
    """Return the space, plans that share a captured graph next to each other.

    Args:
        config: the run that all plans vary.
        usual_batch: examples that a replica takes at a time, where no other number is asked for.
        request: what is asked for.
        typed: values of settings in `KEYS` that were given as overrides, each the only one tried.
        refusals: takes the reasons why degrees are left out.
        prefix: what settings of `request` are named with, such as ``recommend.``.
        devices: what those of `config` are called, where there are others to choose from.

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
    known: dict[Plan, None] = {}
    for degrees in _degrees(config, settings, refusals):
        for shared in _shared_layers(settings, degrees):
            for plan in _of_degrees(settings, shared):
                known.setdefault(replace(plan, devices=devices))
    return sorted(known, key=_order)


def _order(plan: Plan) -> tuple[object, ...]:
    """Return what plans are sorted by: those of one graph together, the likely best first."""
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
    """What a space is made from."""

    request: Request
    prefix: str
    """What settings of `request` are named with."""
    usual_batch: int
    topology: Topology
    axes: Mapping[str, list[object] | None]
    """The values that are asked for, by setting; None for all that go."""
    trains: bool
    experts: list[int]
    """How many a layer has, where the model has experts and says so."""
    interleave: int | None = None
    """Stages on each device that were asked for beside ``mode=pipeline``."""

    def numbers(self, name: str) -> list[int]:
        """Return the values of a setting; none where all are tried."""
        return [value for value in self.axes[name] or () if isinstance(value, int)]

    def switches(self, name: str) -> list[bool]:
        """Return the same of a setting that is true or false."""
        return [value for value in self.axes[name] or () if isinstance(value, bool)]

    def words(self, name: str) -> list[str]:
        return [str(value) for value in self.axes[name] or ()]


def _degrees(config: Config, settings: _Settings, refusals: Refusals) -> Iterator[Plan]:
    """Yield the degrees that devices and heads can have, as plans whose rest is still open."""
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
            asked = f"data_parallel={data}" + f" context_parallel={context}" * (context > 1)
            try:
                parallel = split_topology(groups.topology, degrees.replicas, asked)
            except NotApplicableError as error:
                degree = ("context_parallel", context) if context > 1 else ("data_parallel", data)
                refusals.reasons.setdefault(degree, error)
                continue
            yield replace(degrees, groups=parallel.replica.n_devices)


def _divisors(count: int) -> list[int]:
    return [d for d in range(1, count + 1) if count % d == 0]


def _shared_layers(settings: _Settings, degrees: Plan) -> Iterator[Plan]:
    """Yield `degrees` with each way to share what lies between layers, and experts."""
    split = degrees.tensor_parallel > 1
    sequences = [False]
    if split:
        sequences = settings.switches("sequence_parallel") or [False, True][: 1 + settings.trains]
    experts = settings.numbers("expert_parallel")
    if not experts:
        experts = [1]
        if settings.experts:
            fitting = expert_degrees(degrees.tensor_parallel, degrees.replicas, settings.experts)
            # Beside split layers as vLLM does it, over all devices of a stage or not at all.
            experts += fitting[-1:] if split else fitting
    for sequence, expert in product(sequences, experts):
        yield replace(degrees, sequence_parallel=sequence, expert_parallel=expert)


def _of_degrees(settings: _Settings, degrees: Plan) -> Iterator[Plan]:
    """Yield the plans with the degrees of `degrees`."""
    zeros = [0]
    if settings.trains and degrees.replicas > 1:
        # A pipeline that gathers weights again for each forward holds as much at its peak.
        zeros = [0, 1, 2, 3] if degrees.groups == 1 else [0, 1, 2]
    for mode, schedule, zero, recomputed in product(
        settings.words("mode") or _modes(settings, degrees),
        settings.words("schedule") or (["none", *_TRAINS] if settings.trains else ["none"]),
        settings.numbers("zero") or zeros,
        settings.words("checkpointing") or (["none", "block"] if settings.trains else ["none"]),
    ):
        # Replicas of several devices share weights over microbatches alone.
        if zero >= GATHERING and degrees.groups > 1 and schedule == "none":
            continue
        if schedule != "none" and not _takes_turns(mode, schedule, degrees):
            continue
        plan = replace(degrees, mode=mode, schedule=schedule, zero=zero, checkpointing=recomputed)
        if schedule == _INTERLEAVED:
            plan = replace(plan, interleave=settings.interleave or _CHUNKS)
        yield from filter(_has_equal_rounds, _with_batches(settings, plan))


def _takes_turns(mode: str, schedule: str, degrees: Plan) -> bool:
    """Return whether a schedule says anything of a plan: of one stage they are all the same."""
    if degrees.groups == 1:
        return mode == "single" and schedule == "1f1b"
    return mode == "pipeline"


def _has_equal_rounds(plan: Plan) -> bool:
    """Return whether ``interleaved`` can divide the microbatches, as it asks for."""
    rounds = max(1, plan.microbatches // plan.groups)
    return plan.schedule != _INTERLEAVED or plan.microbatches % rounds == 0


def _modes(settings: _Settings, degrees: Plan) -> list[str]:
    """Return the modes that may be the best on a replica's devices."""
    if degrees.groups == 1:
        return ["single"]
    alike = len({(spec.memory_bytes, spec.name) for spec in settings.topology.devices}) == 1
    latency_counts = settings.request.objective == "latency" and not settings.trains
    if degrees.replicas == 1 and (not alike or latency_counts):
        return ["single", "size_based", "pipeline", "kl_based"]
    return ["single", "pipeline"]


def _with_batches(settings: _Settings, plan: Plan) -> Iterator[Plan]:
    """Yield `plan` with each size and number of microbatches that makes the batch asked for."""
    usual, asked = settings.usual_batch, settings.request.global_batch
    given, counts = settings.numbers("batch"), settings.numbers("microbatches")
    scheduled = plan.schedule != "none"
    if asked is None:
        for batch in given or [usual]:
            if scheduled:
                for count in counts or _MICROBATCHES:
                    yield replace(plan, batch=batch, microbatches=count)
            elif not counts or 1 in counts:
                yield replace(plan, batch=batch)
        return
    share = asked // plan.data_parallel
    if not scheduled:
        if (not given or share in given) and (not counts or 1 in counts):
            yield replace(plan, batch=share)
        return
    for batch in given or sorted({usual * times for times in _BATCHES}):
        if share % batch == 0 and (not counts or share // batch in counts):
            yield replace(plan, batch=batch, microbatches=share // batch)

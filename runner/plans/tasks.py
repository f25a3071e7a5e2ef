"""The tasks of a search: the bounds of plans, and the cost of one. Any process may run them."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from fxpart.capture.cache import cache_key, cached_path
from fxpart.capture.captured import step_key
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.phases import CHECKPOINTING
from fxpart.errors import FxpartError, NotApplicableError
from fxpart.support.digest import stable_digest
from fxpart.support.whole_file import write_whole
from runner.config.schema import BUDGET, Config
from runner.experiment.budget import within_budget
from runner.experiment.model_spec import model_spec
from runner.experiment.subject import Subject, shared_subject, symbols_of
from runner.experiment.training import step_options
from runner.output.terminal import progress, without_progress
from runner.plans.bounds import Bounds, bounds_of
from runner.plans.evaluate import Candidate, Costed, costed

__all__ = [
    "NotCapturedError",
    "bare_bounds",
    "bare_config",
    "captured_subject",
    "cost",
    "graph_label",
    "sharp_bounds",
]

_RECOMPUTED = ("none", BUDGET, *(name for name in reversed(CHECKPOINTING) if name != "none"))
"""Ways of checkpointing, in rising order of recomputation."""


class NotCapturedError(FxpartError):
    """A plan whose graph cannot be captured; `reason` says why."""

    def __init__(self, reason: FxpartError) -> None:
        super().__init__(str(reason))
        self.reason = reason

    def __reduce__(self) -> tuple[type["NotCapturedError"], tuple[FxpartError]]:
        return type(self), (self.reason,)


def bare_config(group: Sequence[Candidate]) -> Config:
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


def bare_bounds(bare: Config, configs: Mapping[Hashable, Config]) -> dict[Hashable, Bounds]:
    """Return the bounds of plans on the `bare` step that they extend, by key of `configs`.

    Raises:
        FxpartError: if the step cannot be captured.

    """
    subject, checkpointing = captured_subject(bare), _bounded_checkpointing(bare)
    return {
        key: bounds_of(config, subject, checkpointing=checkpointing)
        for key, config in configs.items()
    }


def sharp_bounds(config: Config, bare: Config, *, with_latency: bool) -> Bounds:
    """Return the bounds of the plan `config` on the `bare` step that it extends.

    Raises:
        NotCapturedError: if the step cannot be captured.

    """
    return bounds_of(
        config,
        _subject(bare),
        checkpointing=_bounded_checkpointing(bare),
        with_latency=with_latency,
    )


def _bounded_checkpointing(bare: Config) -> str:
    """Return the checkpointing that bounds assume: none for a budget, which is decided later."""
    return "none" if bare.checkpointing == BUDGET else bare.checkpointing


def cost(candidate: Candidate, *, streams: bool) -> Costed:
    """Return the cost of a plan, whose budget is decided first; with `streams`, in a stream.

    Raises:
        NotCapturedError: if the plan cannot be captured.
        FxpartError: if it does not fit, or is invalid.

    """
    if candidate.config.capture.use_cache:
        _subject(candidate.config)
    with without_progress():
        if candidate.plan.checkpointing == BUDGET:
            decided, _ = within_budget(candidate.config)
            candidate = replace(candidate, config=decided)
        return costed(candidate, streams=streams)


def _subject(config: Config) -> Subject:
    try:
        with progress(f"capturing {graph_label(config)}"):
            return captured_subject(config)
    except FxpartError as error:
        raise NotCapturedError(error) from error


def graph_label(config: Config) -> str:
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


def captured_subject(config: Config) -> Subject:
    """Return the `shared_subject` of `config`; a refused capture is not repeated by later runs.

    A refusal is a text file in the folder of cached graphs. Its name is a hash of everything that
    determines the graph, the code that captures it included.

    Raises:
        NotApplicableError: if settings conflict with the model, now or in an earlier run.
        FxpartError: if the model cannot be built, captured or held in memory.

    """
    spec = model_spec(config)
    path = _refusal_path(config, spec)
    if path is not None and path.is_file():
        raise NotApplicableError(path.read_text())
    try:
        return shared_subject(config, spec)
    except NotApplicableError as error:
        if path is not None:
            write_whole(path, str(error), "the refusal of a capture", "make its folder writable")
        raise


def _refusal_path(config: Config, spec: ModelSpec) -> Path | None:
    """Return the file of a refusal; None if graphs are not cached, or are of a user's module."""
    phase = config.phase
    if not config.capture.use_cache or spec.factory is not None:
        return None
    formats = {"weights": asdict(config.weights), "kv_cache": config.kv_cache}
    model = {**spec.key(), "symbols": symbols_of(config), "refused": stable_digest(formats)}
    step = step_key(phase.name, train_mode=phase.train_mode, options=step_options(config))
    key = cache_key(model, config.capture.level, phase.name, step, symbolic=True)
    return cached_path(Path(config.capture.cache_dir), key).with_suffix(".refused")

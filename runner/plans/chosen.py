"""``mode=recommend``: replace a configuration by that of the best plan."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace

from fxpart.errors import NotApplicableError, SpecError, nearest_names
from fxpart.placement import refuse_of_another
from runner.config.schema import RECOMMEND, RECOMMEND_OPTIONS, Config, ModeConfig, ScheduleConfig
from runner.experiment.check import check_all
from runner.experiment.mesh import check_imbalance
from runner.experiment.tensor_split import check_async, check_loss_parallel
from runner.experiment.zero import check_reduce_dtype
from runner.output.terminal import counted
from runner.plans.evaluate import Candidate, Outcome, none_fits
from runner.plans.request import ONLY, Request, Space, Variant, check_price, check_request
from runner.plans.search import evaluated
from runner.plans.space import ALIKE, KEYS, Plan, Refusals, plans, shown

__all__ = ["best_of", "recommended_plan"]

_MODE = "mode."
_NOUNS: Mapping[type, str] = {bool: "true or false", int: "whole numbers", str: "names"}


def recommended_plan(config: Config) -> tuple[Config, str]:
    """Return the configuration of the best plan for `config`, and a summary of the search.

    Settings that differ from their defaults are fixed; all others are searched. The result is
    deterministic across processes.

    Raises:
        FxpartError: if the model cannot be captured, or no plan fits.

    """
    request = _request(config.mode)
    defaults = Config(mode=config.mode)
    typed: dict[str, object] = {
        name: value for name in ALIKE if (value := getattr(config, name)) != getattr(defaults, name)
    }
    if config.schedule.name != "none":
        typed["schedule"] = config.schedule.name
    twice = [name for name in typed if getattr(request.space, name) is not None]
    if twice:
        raise SpecError(
            f"{twice[0]}={typed[twice[0]]} fixes what mode.space.{twice[0]} varies; leave out one"
        )
    base = replace(
        config,
        **{name: getattr(defaults, name) for name in ALIKE},
        schedule=ScheduleConfig(),
        mode=ModeConfig("single", {}),
        serving_sweep=defaults.serving_sweep,
    )
    outcome = best_of({ONLY: base}, request, typed, config.model.batch_size, prefix=_MODE)
    best = outcome.ranking[0]
    search = f"{counted(outcome.total - len(outcome.bounded), 'plan')} of {outcome.total} costed"
    chosen = replace(best.candidate.config, serving_sweep=config.serving_sweep)
    return chosen, f"{' '.join(best.candidate.overrides)} ({search})"


def _request(mode: ModeConfig) -> Request:
    options = {name: value for name, value in mode.options.items() if name != "space"}
    space = mode.options.get("space") or {}
    refuse_of_another(RECOMMEND, options)
    for name in options:
        if name not in RECOMMEND_OPTIONS:
            suggestion = nearest_names(name, RECOMMEND_OPTIONS)
            raise SpecError(f"mode={RECOMMEND} has no option {name}; {suggestion}")
    if not isinstance(space, Mapping):
        raise SpecError(f"mode.space={space} must be a mapping, such as {{zero: [0, 3]}}")
    values: dict[str, list[object]] = {}
    for name, value in space.items():
        kinds = {
            field.name: next(kind for kind in _NOUNS if kind.__name__ in str(field.type))
            for field in fields(Space)
        }
        if name not in kinds:
            raise SpecError(f"mode.space.{name} does not exist; {nearest_names(name, kinds)}")
        values[name] = value if isinstance(value, list) else [value]
        for item in values[name]:
            if type(item) is not kinds[name]:  # bool is a subclass of int
                raise SpecError(f"mode.space.{name}={item} must be {_NOUNS[kinds[name]]}")
    batch = options.get("global_batch")
    if batch is not None and (not isinstance(batch, int) or isinstance(batch, bool)):
        raise SpecError(f"mode.global_batch={batch} must be 1 or more, or null")
    objective = str(options.get("objective", "throughput"))
    limits = options.get("limits") or {}
    if not isinstance(limits, Mapping) or not all(
        isinstance(limit, int | float) and not isinstance(limit, bool) for limit in limits.values()
    ):
        raise SpecError(
            f"mode.limits={limits} must map metrics to numbers, such as {{tpot_ms: 50}}"
        )
    request = Request(objective, batch, 1, limits=dict(limits), space=Space(**values))  # type: ignore[arg-type]
    check_request(request, _MODE)
    return request


def _check_base(base: Config) -> None:
    """Refuse a configuration that no plan can vary.

    Settings that only some plans use are checked for such a plan; `expert_imbalance` is checked
    when it is known whether there is one.
    """
    without = replace(base, async_tensor_parallel=False, loss_parallel=False, reduce_dtype=None)
    check_all(replace(without, expert_imbalance=1.0))
    if base.async_tensor_parallel:
        check_async(replace(base, sequence_parallel=True))
    if base.loss_parallel:
        check_loss_parallel(replace(base, tensor_parallel=2))
    if base.reduce_dtype is not None:
        check_reduce_dtype(replace(base, zero=2))


def best_of(
    bases: Mapping[Variant, Config],
    request: Request,
    typed: Mapping[str, object],
    batch: int,
    *,
    prefix: str,
    mode_given: bool = False,
    processes: int = 1,
) -> Outcome:
    """Return the costed plans of a search space, best first.

    Args:
        bases: the configurations that plans vary, by their choices.
        request: the objective and the space.
        typed: the values of fixed settings, by name.
        batch: the default number of examples per replica at a time.
        prefix: the prefix of `request` settings in messages, such as ``recommend.``.
        mode_given: whether the base run already has a mode, perhaps with options.
        processes: the number of processes that search.

    Raises:
        SpecError: if a setting is invalid, or a requested value is in no plan.
        InfeasibleError: if no plan fits, or none keeps the limits.

    """
    refusals, candidates = Refusals({}), list[Candidate]()
    for variant, base in bases.items():
        _check_base(base)
        check_price(base, request)
        space = plans(base, batch, request, typed, refusals, prefix=prefix, variant=variant)
        candidates += _candidates(base, space, mode_given=mode_given)
    requested = {**asdict(request.space), **{name: [value] for name, value in typed.items()}}
    _refuse_left_out(requested, [candidate.plan for candidate in candidates], refusals)
    max_experts = max(candidate.plan.expert_parallel for candidate in candidates)
    for base in bases.values():
        check_imbalance(base.expert_imbalance, max_experts)
    outcome = evaluated(candidates, request, refusals, processes=processes)
    _refuse_left_out(requested, outcome.plans, refusals)
    if not outcome.ranking:
        raise none_fits(outcome, request.limits)
    return outcome


def _candidates(base: Config, space: Sequence[Plan], *, mode_given: bool) -> Iterator[Candidate]:
    """Yield the plans of `space` with their overrides and configurations."""
    for plan in space:
        overrides = plan.overrides(base, has_mode=mode_given)
        yield Candidate(plan, overrides, plan.configuration(base))


def _refuse_left_out(
    requested: Mapping[str, Sequence[object] | None], space: Sequence[Plan], refusals: Refusals
) -> None:
    """Raise the error for a requested value that is in no plan, if there is one."""
    for name, values in requested.items():
        for value in values or ():
            if any(getattr(plan, name) == value for plan in space):
                continue
            reason = refusals.reasons.get((name, value))
            if reason is not None:
                raise reason
            raise NotApplicableError(
                f"{KEYS[name]}={shown(value)} is in no plan of this space; widen the space, or"
                " leave it out"
            )
    if not space:
        raise next(iter(refusals.reasons.values()), None) or NotApplicableError(
            "no plan is possible with these settings; leave out some of them"
        )

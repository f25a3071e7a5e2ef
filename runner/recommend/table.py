"""The printed recommendation: the best plans, habitual plans in comparison, and what was proved."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.core.phases import CHECKPOINTING
from fxpart.schedule import SCHEDULES
from runner.config.paths import shown_path
from runner.config.schema import BUDGET
from runner.experiment.degrees import stated_experts
from runner.experiment.serving import is_serving
from runner.experiment.training import is_training
from runner.output.terminal import add_numbers, counted, empty_table, rate_text, show
from runner.output.units import GIB, format_s, format_size, time_unit
from runner.plans.bottleneck import limit_of
from runner.plans.evaluate import Candidate, Costed, Outcome, shortly
from runner.plans.request import Request
from runner.plans.space import REPLICAS, STAGES, WEIGHTS, Plan

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "habit_lines",
    "left_out_formats",
    "proof",
    "run_command",
    "safe_line",
    "show_outcome",
    "untried",
]

_FSDP = 3
"""The ZeRO stage of FSDP2."""


def show_outcome(command: Sequence[str], request: Request, outcome: Outcome, folder: Path) -> None:
    """Print the best plans, the best one's command, habitual plans and what was proved.

    `command` are the overrides that all plans share.
    """
    best = outcome.ranking[0]
    shown = outcome.ranking[: request.rows]
    show(best.subject_line, _table(shown))
    # Overrides go below the table: they are too long for a column.
    for index, costed in enumerate(shown):
        show(f"{index + 1:>3}  {' '.join(costed.candidate.overrides)}{_remark(costed)}")
    show("")
    show(f"best:      {run_command(command, best.candidate)}{_remark(best)}")
    if _is_tight(best):
        show(f"safe:      {safe_line(command, request, outcome)}")
    for line in habit_lines(request, outcome):
        show(f"habit:     {line}")
    for line in left_out_formats(request, outcome):
        show(f"left out:  {line}")
    show(f"proved:    {proof(request, outcome)}", f"not tried: {untried(outcome)}")
    show(f"files:     {shown_path(folder)}")


def run_command(command: Sequence[str], candidate: Candidate) -> str:
    """Return the command that runs a single plan."""
    return shlex.join(["python", "-m", "runner", *command, *candidate.overrides])


def _remark(costed: Costed) -> str:
    """Return what speaks against a plan, as a comment of the shell; empty if nothing does."""
    idle = costed.devices_idle
    remarks = [f"{idle} of {counted(idle + costed.devices_used, 'device')} idle"] if idle else []
    if _is_tight(costed):
        remarks.append("tight: may not fit")
    return f"  # {', '.join(remarks)}" if remarks else ""


def _is_tight(costed: Costed) -> bool:
    return bool(costed.metrics.get("memory_is_tight"))


def safe_line(command: Sequence[str], request: Request, outcome: Outcome) -> str:
    """Return the command of the first plan that is sure to fit, and how it compares."""
    safe = next((costed for costed in outcome.ranking if not _is_tight(costed)), None)
    if safe is None:
        return "no plan that was costed is sure to fit; a larger recommend.rows= costs more of them"
    amounts = _amounts(request, outcome.ranking[0], safe)
    return f"{run_command(command, safe.candidate)}  # {amounts}"


def _table(ranking: Sequence[Costed]) -> "Table":
    table = empty_table("")
    unit = time_unit(max(plan.latency_s for plan in ranking))
    with_tokens = ranking[0].tokens_per_s is not None
    tokens = ["tokens\n/s"] if with_tokens else []
    with_price = all(plan.price < float("inf") for plan in ranking)
    price = [f"USD per\nM {_priced(ranking[0])}"] if with_price else []
    add_numbers(
        table,
        "",
        "examples\n/s",
        *tokens,
        "MFU\n%",
        *price,
        f"latency\n{unit.name}",
        "memory\nGiB",
        "on",
    )
    table.add_column("most of the time")
    for index, plan in enumerate(ranking):
        table.add_row(
            str(index + 1),
            f"{plan.examples_per_s:,.2f}",
            *([f"{plan.tokens_per_s:,.0f}"] if with_tokens else []),
            f"{plan.metrics.get('mfu_pct', 0.0):.0f}",
            *([_price_text(plan)] if with_price else []),
            unit.show(plan.latency_s),
            f"{plan.memory_bytes / GIB:.1f}",
            str(plan.devices_used),
            plan.limit,
        )
    return table


def _priced(costed: Costed) -> str:
    return "tokens" if costed.tokens_per_s is not None else "examples"


def _price_text(costed: Costed) -> str:
    """Return the USD per million tokens, or per million examples without tokens, as text."""
    rate = costed.tokens_per_s or costed.examples_per_s
    million = costed.price * costed.examples_per_s / rate * 1e6 if rate else 0.0
    return f"{million:,.2f}" if million >= 0.1 else f"{million:.3g}"


def proof(request: Request, outcome: Outcome) -> str:
    """Return a sentence on how much of the space was costed, and what that proves."""
    best = {
        "throughput": "the most examples a second",
        "latency": "the least latency",
        "cost": "the least money an example",
    }
    unfit, beyond, bounded = len(outcome.unfit), len(outcome.beyond), len(outcome.bounded)
    costed = outcome.total - bounded
    failing = [f"{unfit} {'does' if unfit == 1 else 'do'} not fit"] * bool(unfit)
    failing += [f"{beyond} {'is' if beyond == 1 else 'are'} beyond the limits"] * bool(beyond)
    fit = f", of which {' and '.join(failing)}" if failing else ""
    first = f"the first has {best[request.objective]} of the space"
    first += " within the limits" * bool(request.limits)
    if any(plan.interleave > 1 for plan in outcome.plans):
        first += "; interleaved stages are cut by a search, which may miss faster or fitting cuts"
    if not bounded:
        several = outcome.total > 1
        plans = f"all {outcome.total} plans of the space were" if several else "the only plan was"
        return f"{plans} costed{fit}; {first}"
    return (
        f"{costed} of {counted(outcome.total, 'plan')} were costed{fit}; {bounded} cannot be among"
        f" the best {request.rows} on any placement, by their operators' times; {first}"
    )


def untried(outcome: Outcome) -> str:
    """Return the settings that a wider space could try, as text."""
    config, plans = outcome.ranking[0].candidate.config, outcome.plans
    parts = []
    if is_training(config):
        all_of = {"checkpointing": (*CHECKPOINTING, BUDGET), "schedule": ("none", *SCHEDULES)}
        for name, values in all_of.items():
            tried = {getattr(plan, name) for plan in plans}
            missing = [value for value in values if value not in tried]
            parts += [f"{name}={','.join(missing)}"] * bool(missing)
        counts = sorted({plan.microbatches for plan in plans})
        parts.append(f"microbatches other than {', '.join(map(str, counts))}")
        chunks = max(plan.interleave for plan in plans)
        parts += [f"mode.interleave other than {chunks}"] * (chunks > 1)
    batches = sorted({plan.batch for plan in plans})
    parts.append(f"batches of a replica other than {', '.join(map(str, batches))}")
    if stated_experts(config) and any(plan.tensor_parallel > 1 for plan in plans):
        parts.append("other degrees of expert_parallel beside tensor_parallel")
    parts += ["weights or states on tiers"] * (not config.devices.tiers)
    if is_serving(config):
        formats = {"weights": "formats of weights", "kv_cache": "dtypes of the cache"}
        parts += [
            f"other {words} (recommend.{name}=[...])"
            for name, words in formats.items()
            if not any(getattr(plan.variant, name) for plan in plans)
        ]
    return "; ".join(parts)


def left_out_formats(request: Request, outcome: Outcome) -> Iterator[str]:
    """Yield the requested formats of weights that are in no plan, with the reason."""
    tried = {plan.variant.weights for plan in outcome.plans}
    for name in dict.fromkeys(request.weights or ()):
        reason = outcome.refusals.reasons.get((WEIGHTS, name))
        if name not in tried and reason is not None:
            yield f"weights={name}: {reason}"


@dataclass(frozen=True, slots=True)
class _Habit:
    """Plans that people commonly use without a search."""

    name: str
    setting: str
    value: int
    """The value of `setting` that these plans need, used to look up why it was refused."""
    plans: list[Plan]


def habit_lines(request: Request, outcome: Outcome) -> Iterator[str]:
    """Yield comparisons of commonly used plans with the best one."""
    for habit in _habits(outcome):
        fitting = [costed for costed in outcome.ranking if costed.candidate.plan in habit.plans]
        beyond = [costed for costed in outcome.beyond if costed.candidate.plan in habit.plans]
        refused = [error for candidate, error in outcome.unfit if candidate.plan in habit.plans]
        bounds = [bound for candidate, bound in outcome.bounded if candidate.plan in habit.plans]
        reason = outcome.refusals.reasons.get((habit.setting, habit.value))
        if fitting:
            yield f"{habit.name}: {_beside(request, outcome.ranking[0], fitting[0])}"
        elif beyond:
            yield f"{habit.name}: beyond the limits: {beyond[0].beyond(request.limits)}"
        elif bounds:
            yield f"{habit.name}: {_bounded(request, outcome.ranking[0], bounds)}"
        elif refused:
            yield f"{habit.name}: does not fit: {shortly(refused[0])}"
        elif reason is not None:
            yield f"{habit.name}: not possible: {shortly(reason)}"


def _habits(outcome: Outcome) -> Iterator[_Habit]:
    # Only plans on the devices of the best plan, and in its formats.
    chosen = outcome.ranking[0].candidate.plan.variant
    space = [plan for plan in outcome.plans if plan.variant == chosen]
    n = max(plan.tensor_parallel * plan.replicas * plan.groups for plan in space)
    if n == 1:
        return
    yield _Habit(
        f"all tensor parallel (tensor_parallel={n})",
        "tensor_parallel",
        n,
        [plan for plan in space if plan.tensor_parallel == n],
    )
    replicas = [p for p in space if p.data_parallel == n and p.expert_parallel == 1]
    refused = (REPLICAS, n) in outcome.refusals.reasons
    zeros = {plan.zero for plan in replicas} & {0, _FSDP} if replicas else {0}
    for zero in sorted(zeros, reverse=True):
        name = f"all replicas (data_parallel={n}{f' zero={zero}' if zero else ''})"
        of_stage = [plan for plan in replicas if plan.zero == zero]
        yield _Habit(name, REPLICAS if refused else "data_parallel", n, of_stage)
    stages = [plan for plan in space if plan.groups == n and plan.mode == "pipeline"]
    yield _Habit(f"all stages (mode=pipeline on {n})", STAGES, n, stages)


def _beside(request: Request, best: Costed, habit: Costed) -> str:
    if habit is best:
        return "is the best"
    return (
        f"{_amounts(request, best, habit)}; its time is"
        f" {limit_of(habit.shares)}, the best plan's {limit_of(best.shares)}"
    )


def _amounts(request: Request, best: Costed, other: Costed) -> str:
    """Return the cost of a plan by the objective, its change from the best, and its memory."""
    if request.objective == "latency":
        increase = other.latency_s / best.latency_s - 1.0
        amount, change = format_s(other.latency_s), f"{increase:+.1%}"
    elif request.objective == "cost":
        amount = f"{_price_text(other)} USD per million {_priced(other)}"
        change = f"{other.price / best.price - 1.0:+.1%}"
    else:
        relative_rate = other.examples_per_s / best.examples_per_s - 1.0
        amount, change = rate_text(other.examples_per_s), f"{relative_rate:+.1%}"
    return f"{amount} ({change}), {format_size(other.memory_bytes)}"


def _bounded(request: Request, best: Costed, bounds: Sequence[float]) -> str:
    """Return the best bound of pruned plans, compared with the best plan."""
    if request.objective == "latency":
        least_s = min(bounds)
        return f"at least {format_s(least_s)} ({least_s / best.latency_s - 1.0:+.1%}), not costed"
    if request.objective == "cost":
        return f"at least {min(bounds) / best.price - 1.0:+.1%} money, not costed"
    best_rate = max(bounds)
    return (
        f"at most {rate_text(best_rate)} ({best_rate / best.examples_per_s - 1.0:+.1%}), not costed"
    )

"""Compare latencies of kl_based and cost_aware with torch's, all evaluated by torch's functions."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.static_case import (
    Case,
    architecture_cases,
    equal_shares,
    make_case,
    random_case,
)
from benchmarks.text_table import table
from benchmarks.time_limit import OverLimitError
from benchmarks.torch_families import FAMILIES, OPERATORS_PER_BLOCK
from benchmarks.torch_judge import Judge, Verdict, make_judge
from benchmarks.two_sides import FXPART, TORCH, Answer, Mode, Question, Side, solve

__all__ = ["LatencyPlan", "Tally", "compare_latency", "compare_pair"]

EQUAL = 1e-9
"""Relative difference up to which two latencies are equal: summation order differs."""


@dataclass(frozen=True, slots=True)
class LatencyPlan:
    """The modes, graphs and limits of a comparison."""

    graphs: int
    """Number of random graphs for each mode."""
    most_operators: dict[Mode, int]
    """By mode, the largest graph that is compared; at least 8 operators."""
    small_only: bool
    """Leave out the larger architectures."""
    limit_s: float
    """Graphs on which torch takes longer are skipped and counted."""
    kinds: tuple[str, ...] = ("random", "regular", "known")


@dataclass(slots=True)
class Tally:
    """The results of one mode on one kind of graph."""

    lower: int = 0
    equal: int = 0
    higher: int = 0
    torch_invalid: int = 0
    torch_refuses: int = 0
    both_refuse: int = 0
    over_limit: int = 0
    wrong: int = 0
    """Ours refuses or is invalid where torch is valid, or the emitted module deviates from it."""
    ratios: list[float] = field(default_factory=list)
    """Our latency divided by torch's, where both are valid."""
    emitted_ratios: list[float] = field(default_factory=list)
    """The same against torch's emitted module, where that differs from torch's partitions."""

    def row(self) -> list[str]:
        """Return the cells of the table."""
        counts = (self.lower, self.equal, self.higher, self.torch_invalid, self.torch_refuses)
        failures = (self.both_refuse, self.over_limit, self.wrong)
        means = [_mean(self.ratios), f"{min(self.ratios, default=math.nan):.3f}"]
        emitted = [str(len(self.emitted_ratios)), _mean(self.emitted_ratios)]
        return [*map(str, counts), *map(str, failures), *means, *emitted]


HEADS = (
    "lower", "equal", "higher", "torch invalid", "torch refuses", "both refuse", "over limit",
    "wrong", "mean ratio", "least ratio", "torch emits otherwise", "mean ratio to that",
)  # fmt: skip


def _mean(ratios: list[float]) -> str:
    """Return the geometric mean of `ratios` as text."""
    return f"{statistics.geometric_mean(ratios):.3f}" if ratios else "-"


def _devices(answer: Answer) -> dict[int, tuple[int, ...]]:
    return {part.number: part.devices for part in answer.partitions}


def _verdict(judge: Judge, answer: Answer) -> Verdict:
    """Return the verdict of torch's functions on an answer; an error counts as a fault."""
    if answer.error:
        return Verdict(math.nan, answer.error)
    return judge.verdict(answer.partition_of, _devices(answer))


def _wrong(judge: Judge, torch_verdict: Verdict, ours: Answer, our_verdict: Verdict) -> str:
    """Return what is wrong with our answer apart from its latency, or an empty string."""
    if ours.error:
        if torch_verdict.valid:
            return f"refuses where torch has {_ms(torch_verdict)}: {ours.error}"
        return "" if ours.runtime_error else f"not a RuntimeError: {ours.error}"
    if not our_verdict.valid:
        return f"invalid: {our_verdict.fault}"
    if not ours.same_outputs:
        return "the emitted module computes something else"
    if ours.emitted != ours.partition_of:
        emitted = judge.verdict(ours.emitted, _devices(ours))
        return f"the emitted module does not follow the partitions: {_ms(emitted)}"
    return ""


def _ms(verdict: Verdict) -> str:
    return f"{verdict.latency_s * 1e3:.6g} ms"


def compare_pair(case: Case, theirs: Answer, ours: Answer, tally: Tally) -> str:
    """Count one pair of answers; return a message if ours is worse, else an empty string."""
    judge = make_judge(case)
    torch_verdict, our_verdict = _verdict(judge, theirs), _verdict(judge, ours)
    wrong = _wrong(judge, torch_verdict, ours, our_verdict)
    if wrong:
        tally.wrong += 1
        return f"wrong: {wrong}"
    if theirs.error:
        tally.torch_refuses += not ours.error
        tally.both_refuse += bool(ours.error)
        return ""
    if not torch_verdict.valid:
        tally.torch_invalid += 1
        return ""
    ratio = our_verdict.latency_s / torch_verdict.latency_s
    tally.ratios.append(ratio)
    tally.lower += ratio < 1 - EQUAL
    tally.higher += ratio > 1 + EQUAL
    tally.equal += abs(ratio - 1) <= EQUAL
    message = _compare_emitted(judge, theirs, our_verdict, tally)
    if ratio > 1 + EQUAL:
        return (
            f"higher: fxpart {_ms(our_verdict)}, torch {_ms(torch_verdict)}, ratio {ratio:.6f},"
            f" {len(theirs.partitions)} / {len(ours.partitions)} partitions"
        )
    return message


def _compare_emitted(judge: Judge, theirs: Answer, our_verdict: Verdict, tally: Tally) -> str:
    """Compare with torch's emitted module where that differs from torch's partitions."""
    if theirs.emitted == theirs.partition_of:
        return ""
    emitted = judge.verdict(theirs.emitted, _devices(theirs))
    if not emitted.valid:
        return ""
    ratio = our_verdict.latency_s / emitted.latency_s
    tally.emitted_ratios.append(ratio)
    if ratio <= 1 + EQUAL:
        return ""
    return (
        f"higher than torch's emitted module: {_ms(our_verdict)}, {_ms(emitted)}, ratio {ratio:.6f}"
    )


def _family_cases(max_operators: int) -> Iterator[Case]:
    """Yield regular graphs of up to `max_operators` on 2 and 4 devices, at three transfer rates."""
    for name, build in FAMILIES.items():
        largest = max(1, min(max_operators, 60) // OPERATORS_PER_BLOCK[name])
        for blocks in sorted({max(1, largest // 3), largest}):
            for devices in (2, 4):
                for ratio in (0.1, 1.0, 10.0):
                    case_name = f"{name}, {blocks} blocks, {devices} devices, ratio {ratio}"
                    yield make_case(case_name, build(blocks), equal_shares(devices), ratio)


def _cases(plan: LatencyPlan, mode: Mode) -> Iterator[tuple[str, Case]]:
    """Yield the kind of graph and the case."""
    max_operators = plan.most_operators[mode]
    sources = {
        "random": (random_case(seed, 8, min(40, max_operators)) for seed in range(plan.graphs)),
        "regular": _family_cases(max_operators),
        "known": architecture_cases(plan.small_only),
    }
    for kind in plan.kinds:
        for case in sources[kind]:
            if len(case.operators) <= max_operators:
                yield kind, case


def compare_latency(plan: LatencyPlan, ours: Side = FXPART) -> int:
    """Print how the latencies compare, and list every graph where ours is higher or wrong.

    Returns:
        The number of graphs listed.

    """
    tallies: dict[tuple[Mode, str], Tally] = {}
    lines: list[str] = []
    for mode in plan.most_operators:
        for kind, case in _cases(plan, mode):
            tally = tallies.setdefault((mode, kind), Tally())
            try:
                theirs = solve(TORCH, case, Question(mode), plan.limit_s)
            except OverLimitError:
                tally.over_limit += 1
                continue
            message = compare_pair(case, theirs, solve(ours, case, Question(mode)), tally)
            if message:
                lines.append(f"  {mode}, {case.name}, {len(case.operators)} operators: {message}")
    rows = [[f"{mode}, {kind}", *tally.row()] for (mode, kind), tally in tallies.items()]
    print(table(["latency, fxpart by torch", *HEADS], rows))
    for line in lines:
        print(line)
    return len(lines)

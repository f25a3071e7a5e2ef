"""Parity: the modes where torch's answer is the one to give, on random graphs and architectures.

Compared are, for each partition in order, its number, the names of all its nodes, its devices and
its bytes; or that both sides refuse.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks.plain_models import SMALL
from benchmarks.static_case import (
    Case,
    architecture_cases,
    make_case,
    random_case,
    sparse_case,
)
from benchmarks.text_table import table
from benchmarks.torch_judge import make_judge
from benchmarks.two_sides import FXPART, TORCH, Answer, Question, Side, solve

__all__ = ["compare_answers", "reason"]

REASONS = (
    "same answer",
    "both refuse",
    "torch invalid",
    "torch refuses, ours valid",
    "bytes counted otherwise",
    "numbered otherwise",
    "ours refuses",
    "ours invalid",
    "other",
)
WRONG = REASONS[5:]
"""Differences that need mending."""


@dataclass(frozen=True, slots=True)
class Query:
    """One question about one case."""

    kind: str
    case: Case
    question: Question


def _fault(case: Case, answer: Answer) -> str:
    """Return the fault of an answer as torch judges it, or an empty string."""
    devices = {part.number: part.devices for part in answer.partitions}
    return make_judge(case).verdict(answer.partition_of, devices).fault


def reason(case: Case, theirs: Answer, ours: Answer) -> tuple[str, str]:
    """Return the class of the difference between two answers, one of `REASONS`, and details."""
    errors = f"torch: {theirs.error or 'answers'}; fxpart: {ours.error or 'answers'}"
    if ours.error:
        if not ours.runtime_error:
            return "other", f"not a RuntimeError; {errors}"
        if theirs.error:
            return "both refuse", errors
        fault = _fault(case, theirs)
        if not fault and theirs.total_bytes != ours.total_bytes:
            return "bytes counted otherwise", f"{_totals(theirs, ours)}; {errors}"
        return ("torch invalid", fault) if fault else ("ours refuses", errors)
    broken = _broken(case, ours)
    if broken[0]:
        return broken
    return (
        ("torch refuses, ours valid", errors) if theirs.error else _valid_both(case, theirs, ours)
    )


def _broken(case: Case, ours: Answer) -> tuple[str, str]:
    """Return the class and details of a fault in our answer by itself, or two empty strings."""
    fault = _fault(case, ours)
    if fault:
        return "ours invalid", fault
    if not ours.same_outputs:
        return "other", "the emitted module computes something else"
    if ours.emitted != ours.partition_of:
        return "other", "the emitted module does not follow the partitions"
    return "", ""


def _totals(theirs: Answer, ours: Answer) -> str:
    return f"the graph has {theirs.total_bytes} / {ours.total_bytes} bytes"


def _valid_both(case: Case, theirs: Answer, ours: Answer) -> tuple[str, str]:
    """Return the class of the difference where both sides answer."""
    if theirs.partitions == ours.partitions:
        return "same answer", ""
    fault = _fault(case, theirs)
    if fault:
        return "torch invalid", fault
    if theirs.total_bytes != ours.total_bytes:
        return "bytes counted otherwise", _totals(theirs, ours)
    sets = [{(p.nodes, p.devices, p.used_bytes) for p in a.partitions} for a in (theirs, ours)]
    if sets[0] == sets[1]:
        return "numbered otherwise", ""
    for their, our in zip(theirs.partitions, ours.partitions, strict=False):
        if their != our:
            only = sorted(their.nodes - our.nodes), sorted(our.nodes - their.nodes)
            return "other", (
                f"partition {their.number} on {their.devices} / {our.devices},"
                f" {their.used_bytes} / {our.used_bytes} bytes, only there {only[0]},"
                f" only here {only[1]}"
            )
    return "other", f"{len(theirs.partitions)} / {len(ours.partitions)} partitions"


def _ahead_of_time(case: Case, seed: int) -> Question:
    """Return runs of operators on random devices, numbered in random order."""
    rng = random.Random(seed)
    count = min(rng.randint(2, 5), len(case.operators))
    cuts = sorted(rng.sample(range(1, len(case.operators)), count - 1))
    numbers = rng.sample(range(count), count)
    aot = {n: numbers[sum(c <= i for c in cuts)] for i, n in enumerate(case.operators)}
    if seed % 4 == 3:  # Most often a circle, which both sides have to refuse.
        moved = rng.sample(case.operators, 2)
        aot |= {moved[0]: aot[moved[1]], moved[1]: aot[moved[0]]}
    on = {p: sorted(rng.sample(range(len(case.memory_bytes)), rng.randint(1, 2))) for p in numbers}
    # Bytes are not checked by torch in this mode: give room, so that judged answers are valid.
    return Question("aot_based", aot=aot, aot_devices=on)


def _roomy(case: Case, factor: float) -> Case:
    """Return the case on devices that hold `factor` times the model each."""
    return replace(case, memory_bytes=(int(case.total_bytes * factor),) * len(case.memory_bytes))


def _queries(graphs: int, small_only: bool) -> Iterator[Query]:
    """Yield every question of the comparison."""
    drawn = (random_case(seed) for seed in range(graphs))
    for number, case in enumerate(itertools.chain(drawn, architecture_cases(small_only))):
        yield Query("size_based", case, Question("size_based"))
        yield Query("single", _roomy(case, 1.0), Question("kl_based"))
        yield Query("aot_based", _roomy(case, 2.0), _ahead_of_time(case, number))
        doubled = replace(case, memory_bytes=case.memory_bytes * 2)
        saturated = Question("size_based", saturate_host=True)
        yield Query("saturate_host", doubled, saturated)
    for seed in range(graphs):
        yield Query("sparse_nn", sparse_case(seed), Question("sparse_nn"))
    torch.manual_seed(0)
    dlrm = make_case("dlrm, sparse_nn", SMALL["dlrm"](), (0.6, 0.6, 0.6), 1.0)
    yield Query("sparse_nn", dlrm, Question("sparse_nn"))


def compare_answers(
    graphs: int, small_only: bool = False, *, ours: Side = FXPART, most: int = 12
) -> int:
    """Print how often the answers are the same over `graphs` seeds, and list the differences.

    Returns:
        The number of differences that need mending.

    """
    counts: dict[str, Counter[str]] = {}
    listed: Counter[str] = Counter()
    details: list[str] = []
    for query in _queries(graphs, small_only):
        their_answer = solve(TORCH, query.case, query.question)
        our_answer = solve(ours, query.case, query.question)
        why, detail = reason(query.case, their_answer, our_answer)
        counts.setdefault(query.kind, Counter())[why] += 1
        if why not in REASONS[:2]:
            listed[why] += 1
            if listed[why] <= most:
                details.append(f"  {why}: {query.kind}, {query.case.name}: {detail}")
    heads = ["answers", *REASONS]
    rows = [[kind, *(str(count[why]) for why in REASONS)] for kind, count in counts.items()]
    print(table(heads, rows))
    for line in sorted(details):
        print(line)
    return sum(count[why] for count in counts.values() for why in WRONG)

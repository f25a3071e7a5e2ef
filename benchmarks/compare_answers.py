"""Parity with torch in the modes where its answer is the reference, on random and known graphs.

For each partition in order, its number, the names of its nodes, its devices and its bytes are
compared; or both sides must refuse.
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
"""Differences that have to be fixed."""


@dataclass(frozen=True, slots=True)
class Query:
    """One question about one case."""

    kind: str
    case: Case
    question: Question


def _fault(case: Case, answer: Answer) -> str:
    """Return the fault that torch's functions find in an answer, or an empty string."""
    devices = {part.number: part.devices for part in answer.partitions}
    return make_judge(case).verdict(answer.partition_of, devices).fault


def reason(case: Case, theirs: Answer, ours: Answer) -> tuple[str, str]:
    """Return the kind of difference between two answers, one of `REASONS`, and details."""
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
    own_fault = _own_fault(case, ours)
    if own_fault[0]:
        return own_fault
    return (
        ("torch refuses, ours valid", errors)
        if theirs.error
        else _compare_valid(case, theirs, ours)
    )


def _own_fault(case: Case, ours: Answer) -> tuple[str, str]:
    """Return the kind and details of a fault in our answer alone, or two empty strings."""
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


def _compare_valid(case: Case, theirs: Answer, ours: Answer) -> tuple[str, str]:
    """Return the kind of difference, and details, where both sides answer."""
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
    """Return a question: consecutive operators on random devices, numbered in random order."""
    rng = random.Random(seed)
    count = min(rng.randint(2, 5), len(case.operators))
    cuts = sorted(rng.sample(range(1, len(case.operators)), count - 1))
    numbers = rng.sample(range(count), count)
    aot = {n: numbers[sum(c <= i for c in cuts)] for i, n in enumerate(case.operators)}
    if seed % 4 == 3:  # Usually a cycle, which both sides have to refuse.
        moved = rng.sample(case.operators, 2)
        aot |= {moved[0]: aot[moved[1]], moved[1]: aot[moved[0]]}
    devices = {
        p: sorted(rng.sample(range(len(case.memory_bytes)), rng.randint(1, 2))) for p in numbers
    }
    # Torch does not check bytes in this mode: ample memory keeps the evaluated answers valid.
    return Question("aot_based", aot=aot, aot_devices=devices)


def _with_memory(case: Case, factor: float) -> Case:
    """Return the case on devices that each hold `factor` times the model."""
    return replace(case, memory_bytes=(int(case.total_bytes * factor),) * len(case.memory_bytes))


def _queries(graphs: int, small_only: bool) -> Iterator[Query]:
    """Yield every question of the comparison."""
    random_cases = (random_case(seed) for seed in range(graphs))
    for number, case in enumerate(itertools.chain(random_cases, architecture_cases(small_only))):
        yield Query("size_based", case, Question("size_based"))
        yield Query("single", _with_memory(case, 1.0), Question("kl_based"))
        yield Query("aot_based", _with_memory(case, 2.0), _ahead_of_time(case, number))
        doubled = replace(case, memory_bytes=case.memory_bytes * 2)
        saturated = Question("size_based", saturate_host=True)
        yield Query("saturate_host", doubled, saturated)
    for seed in range(graphs):
        yield Query("sparse_nn", sparse_case(seed), Question("sparse_nn"))
    torch.manual_seed(0)
    dlrm = make_case("dlrm, sparse_nn", SMALL["dlrm"](), (0.6, 0.6, 0.6), 1.0)
    yield Query("sparse_nn", dlrm, Question("sparse_nn"))


def compare_answers(
    graphs: int, small_only: bool = False, *, ours: Side = FXPART, max_listed: int = 12
) -> int:
    """Print how often the answers agree over `graphs` seeds, and list the differences.

    Returns:
        The number of differences that have to be fixed.

    """
    counts: dict[str, Counter[str]] = {}
    listed: Counter[str] = Counter()
    details: list[str] = []
    for query in _queries(graphs, small_only):
        their_answer = solve(TORCH, query.case, query.question)
        our_answer = solve(ours, query.case, query.question)
        difference, detail = reason(query.case, their_answer, our_answer)
        counts.setdefault(query.kind, Counter())[difference] += 1
        if difference not in REASONS[:2]:
            listed[difference] += 1
            if listed[difference] <= max_listed:
                details.append(f"  {difference}: {query.kind}, {query.case.name}: {detail}")
    heads = ["answers", *REASONS]
    rows = [[kind, *(str(count[name]) for name in REASONS)] for kind, count in counts.items()]
    print(table(heads, rows))
    for line in sorted(details):
        print(line)
    return sum(count[name] for count in counts.values() for name in WRONG)

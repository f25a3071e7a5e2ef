"""``python -m benchmarks.architectures``: every architecture of transformers, captured and placed.

Covers all model classes that transformers lists for its Auto classes, with default configurations
cut to 2 layers, each in its own process with a CPU time limit, two at a time. A row shows whether
the model was placed or captured, or which step failed (build, inputs, capture) and why; the counts
and the failures grouped by reason follow.

    --only NAME    architectures whose name contains NAME; may be repeated
    --limit N      only the first N
    --sample N     a reproducible random sample of N
    --seed N       seed of the sample; 0 by default
    --bases        one class for each kind of model, without heads
"""

import argparse
import multiprocessing
import random
import re
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection

from benchmarks.architecture_job import Outcome, judge

WORKERS = 2
CPU_LIMIT_S = 120
"""CPU time, so that other work on the machine does not count."""
WAIT_S = 8 * CPU_LIMIT_S
__all__ = ["architectures", "outcomes_of", "summary"]

Judge = Callable[[str], Outcome]
"""Tries one architecture."""

_CAPTURED = ("captured", "placed")


def architectures(bases_only: bool) -> list[str]:
    """Return the names of the classes that transformers lists for its Auto classes, sorted."""
    from transformers.models.auto import modeling_auto

    classes: set[str] = set()
    for mapping, entries in vars(modeling_auto).items():
        if mapping == "MODEL_MAPPING_NAMES" or (
            not bases_only and mapping.startswith("MODEL_") and mapping.endswith("_NAMES")
        ):
            for entry in entries.values():
                classes |= {entry} if isinstance(entry, str) else set(entry)
    return sorted(classes)


def _judge_and_send(judge: Judge, architecture: str, sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 1))
    sender.send(judge(architecture))


def _judge_in_child(judge: Judge, architecture: str) -> Outcome:
    """Return the outcome of `architecture`, judged in its own process."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_judge_and_send, args=(judge, architecture, sender))
    child.start()
    sender.close()
    try:
        if receiver.poll(WAIT_S):
            return receiver.recv()  # type: ignore[no-any-return]
        return Outcome(architecture, "time", f"not finished within {WAIT_S} s", seconds=WAIT_S)
    except EOFError:
        child.join()
        if child.exitcode == -signal.SIGXCPU:
            reason = f"not finished within {CPU_LIMIT_S} s of CPU time"
            return Outcome(architecture, "time", reason, seconds=CPU_LIMIT_S)
        return Outcome(architecture, "crash", f"the process exited with code {child.exitcode}")
    finally:
        child.kill()
        child.join()


def outcomes_of(names: Sequence[str], judge: Judge) -> Iterator[Outcome]:
    """Yield what `judge` returns for each architecture, in order, or why it did not end."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["benchmarks.architecture_warm"]
    )
    with ThreadPoolExecutor(WORKERS) as pool:
        yield from pool.map(partial(_judge_in_child, judge), names)


def _reason_pattern(outcome: Outcome) -> str:
    """Return the reason of a failure without numbers and the architecture's name."""
    reason = outcome.reason.replace(outcome.architecture, "it")
    return re.sub(r"\d+", "N", reason)[:150]


def summary(outcomes: Sequence[Outcome], seconds: float) -> Iterator[str]:
    """Yield lines with the counts, then the failures grouped by reason."""
    total = len(outcomes)
    counts = Counter(outcome.status for outcome in outcomes)
    captured = sum(counts[status] for status in _CAPTURED)
    yield f"{total} architectures in {seconds:.0f} s"
    yield f"captured {captured} ({captured / total:.1%}), placed {counts['placed']}"
    for status, count in counts.most_common():
        if status in _CAPTURED:
            continue
        yield f"refused at {status}: {count}"
        kinds = Counter(_reason_pattern(o) for o in outcomes if o.status == status)
        yield from (f"  {number:>4}  {kind}" for kind, number in kinds.most_common())


def main() -> None:
    """Print a row for each architecture, then the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--limit", type=int, default=None, metavar="N")
    parser.add_argument("--sample", type=int, default=None, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--bases", action="store_true")
    arguments = parser.parse_args()
    names = [
        name
        for name in architectures(arguments.bases)
        if not arguments.only or any(part in name for part in arguments.only)
    ][: arguments.limit]
    if arguments.sample is not None:
        names = random.Random(arguments.seed).sample(names, min(arguments.sample, len(names)))
    begin, outcomes = time.perf_counter(), []
    for outcome in outcomes_of(names, judge):
        outcomes.append(outcome)
        print(
            f"{outcome.architecture:<45} {outcome.status:<9} {outcome.operators:>6}"
            f" {outcome.seconds:>6.1f} s  {outcome.reason or outcome.inputs}",
            flush=True,
        )
    print(*summary(outcomes, time.perf_counter() - begin), sep="\n")


if __name__ == "__main__":
    main()

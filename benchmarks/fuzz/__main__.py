"""``python -m benchmarks.fuzz``: 5,000 odd specs, files, configurations, models and commands.

Each must either be accepted with plausible figures or be refused in one line. Anything else is
printed when it occurs: a traceback, a case of over 60 seconds of CPU, an input accepted that was
wrong on purpose.
"""

import argparse
import contextlib
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings

from benchmarks.fuzz.configs import fuzz_commands, fuzz_configs
from benchmarks.fuzz.files import fuzz_files
from benchmarks.fuzz.judge import Tally
from benchmarks.fuzz.models import fuzz_models
from benchmarks.fuzz.specs import fuzz_specs
from benchmarks.text_table import table

__all__ = ["fuzz", "runner_of"]

_SHARES = {
    "specs": 0.4,
    "files": 0.38,
    "configurations": 0.09,
    "decoders": 0.04,
    "models": 0.05,
    "commands": 0.04,
}
"""Shares of all cases. A text takes microseconds, a command a second."""


def runner_of(number: int) -> Callable[[Any, int], None]:
    """Return a function that runs a hypothesis test on a number of examples, with seed `number`."""

    def run(test: Any, examples: int) -> None:  # noqa: ANN401 - hypothesis' own type
        chosen = settings(
            max_examples=max(1, examples),
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        chosen(seed(number)(test))()

    return run


def fuzz(cases: int, number: int, kinds: Sequence[str], folder: Path) -> list[Tally]:
    """Try `cases` of `kinds`, divided as in `_SHARES`, and print how long each kind took.

    The working folder is `folder` meanwhile, so that odd paths lie in it.
    """
    run = runner_of(number)
    fuzzers: dict[str, Callable[[int], Tally]] = {
        "specs": lambda count: fuzz_specs(run, count),
        "files": lambda count: fuzz_files(run, count, folder),
        "configurations": lambda count: fuzz_configs(run, count, folder),
        "decoders": lambda count: fuzz_configs(run, count, folder, decoders=True),
        "models": lambda count: fuzz_models(run, count),
        "commands": lambda count: fuzz_commands(run, count, folder),
    }
    tallies = []
    for kind in kinds:
        begin = time.perf_counter()
        with contextlib.chdir(folder):
            tallies.append(fuzzers[kind](round(cases * _SHARES[kind])))
        print(
            f"{kind}: {tallies[-1].cases} cases in {time.perf_counter() - begin:.0f} s", flush=True
        )
    return tallies


def main() -> int:
    """Print each failed case, then the counts; return 1 if any case failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=tuple(_SHARES))
    options = parser.parse_args()
    root = Path(__file__).resolve().parents[2]
    os.environ["PYTHONPATH"] = os.pathsep.join((str(root), str(root / "runner" / "plugins")))
    logging.disable(logging.CRITICAL)  # torch's messages on models that it cannot export
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        tallies = fuzz(options.cases, options.seed, options.kind or tuple(_SHARES), Path(folder))
    heads = ["", "cases", "taken", "refused", "tracebacks", "hangs", "wrong successes"]
    rows = [
        [
            t.kind,
            *map(str, (t.cases, t.taken, t.refused)),
            *(str(len(bad)) for bad in (t.tracebacks, t.hangs, t.wrong)),
        ]
        for t in tallies
    ]
    print(table(heads, rows))
    return 1 if any(tally.tracebacks or tally.hangs or tally.wrong for tally in tallies) else 0


if __name__ == "__main__":
    sys.exit(main())

"""One run of torch's own partitioner: ``python -m benchmarks.torch_child`` and the question.

The question is ``<family> <blocks> <devices> <mode> <limit in seconds>``. It runs in its own
process, because a run may never end, and only a process can be stopped reliably. Prints one line of
JSON: the seconds of ``partition_graph`` and the answer.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.static_case import Case, equal_shares, make_case
from benchmarks.time_limit import OverLimitError
from benchmarks.torch_families import FAMILIES
from benchmarks.two_sides import TORCH, Mode, Question, solve

__all__ = ["TorchRun", "family_case", "run_torch"]

_OVER_LIMIT = 3
"""Exit status of a process that exceeded its limit."""

_START_S = 60.0
"""Seconds after the limit until a process that has not stopped itself is killed."""


@dataclass(frozen=True, slots=True)
class TorchRun:
    """The time and answer of torch's own partitioner."""

    seconds: float
    partition_of: dict[str, int]
    devices: dict[int, list[int]]
    error: str


def family_case(family: str, blocks: int, devices: int) -> Case:
    """Return a regular graph on equal devices that together hold 1.8 times the model."""
    name = f"{family}, {blocks} blocks, {devices} devices"
    return make_case(name, FAMILIES[family](blocks), equal_shares(devices), 1.0)


def run_torch(
    family: str, blocks: int, devices: int, mode: Mode, limit_s: float
) -> TorchRun | None:
    """Return torch's result from a fresh process, or None if it takes longer than `limit_s`.

    Raises:
        SystemExit: if the process fails for another reason.

    """
    command = [sys.executable, "-m", "benchmarks.torch_child", family, str(blocks), str(devices)]
    try:
        process = subprocess.run(
            [*command, mode, str(limit_s)],
            cwd=Path(__file__).resolve().parent.parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s + _START_S,
        )
    except subprocess.TimeoutExpired:
        return None
    if process.returncode == _OVER_LIMIT:
        return None
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} {mode} failed:\n{process.stdout}{process.stderr}")
    answer = json.loads(process.stdout.splitlines()[-1])
    return TorchRun(
        seconds=answer["seconds"],
        partition_of=answer["partition_of"],
        devices={int(number): ids for number, ids in answer["devices"].items()},
        error=answer["error"],
    )


def main() -> None:
    """Partition once and print the answer."""
    torch.set_num_threads(1)
    family, blocks, devices, mode, limit_s = sys.argv[1:]
    case = family_case(family, int(blocks), int(devices))
    question = Question(mode)  # type: ignore[arg-type]  # torch looks the name up
    try:
        answer = solve(TORCH, case, question, float(limit_s))
    except OverLimitError:
        sys.exit(_OVER_LIMIT)
    answer_json = {
        "seconds": answer.seconds,
        "partition_of": dict(answer.partition_of),
        "devices": {part.number: part.devices for part in answer.partitions},
        "error": answer.error,
    }
    print(json.dumps(answer_json))


if __name__ == "__main__":
    main()

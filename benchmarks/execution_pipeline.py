"""The stages of a GPT-2 as processes on torch's engine: measured steps beside predicted ones.

Each row is one run of the command, with operators profiled on this machine.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.process import run_python

__all__ = ["pipeline_rows"]

HEADS = (
    "step",
    "stages",
    "schedule",
    "measured ms",
    "predicted ms",
    "error",
    "with a core each ms",
    "peak MiB",
    "predicted MiB",
    "results",
)
MICROBATCHES = 8
MODEL = (
    "model=gpt2",
    "model.config={n_layer: 6, n_embd: 512, n_head: 8, vocab_size: 16000, n_positions: 256}",
    "model.batch_size=2",
    "model.seq_len=128",
)
STEPS = (
    ("inference", 2, "gpipe"),
    ("inference", 4, "gpipe"),
    ("training", 2, "gpipe"),
    ("training", 2, "1f1b"),
    ("training", 4, "gpipe"),
    ("training", 4, "1f1b"),
)


def _run(folder: Path, phase: str, stages: int, schedule: str) -> dict[str, Any]:
    out = folder / f"{phase}_{stages}_{schedule}"
    run_python(
        [
            "-m",
            "runner",
            *MODEL,
            f"phase={phase}",
            "optimizer=none",
            "phase.train_mode=false",
            "mode=pipeline",
            f"mode.stages={stages}",
            f"devices={stages}xcpu",
            "transfer_rate=loopback",
            "latency=profiled",
            f"schedule={schedule}",
            f"microbatches={MICROBATCHES}",
            "execute=pipeline",
            "execute.repeats=5",
            "tracking=none",
            f"hydra.run.dir={out}",
        ],
        folder,
    )
    metrics: dict[str, Any] = json.loads((out / "result.json").read_text())["metrics"]
    return metrics


def pipeline_rows() -> tuple[Sequence[str], list[list[str]]]:
    """Return the column heads, and a row for each kind of step, number of stages and schedule."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for phase, stages, schedule in STEPS:
            measured = _run(Path(name), phase, stages, schedule)
            rows.append(
                [
                    phase,
                    str(stages),
                    schedule,
                    f"{measured['measured_ms']:.0f}",
                    f"{measured['predicted_ms']:.0f}",
                    f"{measured['time_error_pct']:+.1f}%",
                    f"{measured['step_ms']:.0f}",
                    f"{measured['measured_peak_gib'] * 1024:.0f}",
                    f"{measured['predicted_peak_gib'] * 1024:.0f}",
                    _agreement(measured),
                ]
            )
            print(" ".join(rows[-1]), flush=True)
    return HEADS, rows


def _agreement(measured: dict[str, Any]) -> str:
    difference = max(measured["max_difference"], measured.get("gradient_difference", 0.0))
    return "equal" if difference == 0 else f"within {difference:.1g}"

"""Predictions for split models beside processes of gloo: ``python -m benchmarks.sharding``.

Each row is a model on a number of processes, which run it on torch's own `parallelize_module` (a
mixture of experts on transformers' styles): bytes at the peak of a process that has most, and the
collectives that an observer counts, in a forward and in a training step without an optimizer.
"""

import argparse
from collections import Counter

import numpy as np

from benchmarks.sharding.group import run_group
from benchmarks.sharding.predicted import predicted
from benchmarks.sharding.tensor_run import Counted, tensor_run, whole_run
from benchmarks.text_table import table
from fxpart.capture.models.spec import ModelSpec

_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}
MODELS = {
    "llama": ModelSpec(
        "llama",
        architecture="LlamaForCausalLM",
        config={**_SIZES, "intermediate_size": 176},
        batch_size=2,
        seq_len=32,
    ),
    "mixtral": ModelSpec(
        "mixtral",
        architecture="MixtralForCausalLM",
        config={
            **_SIZES,
            "intermediate_size": 128,
            "num_local_experts": 4,
            "experts_implementation": "grouped_mm",
        },
        batch_size=2,
        seq_len=32,
    ),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharding", description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--processes", nargs="*", type=int, default=[2, 4])
    given = parser.parse_args()
    rows = []
    for name in given.models:
        whole = whole_run(0, 1, MODELS[name])
        for count in given.processes:
            rows += _rows(name, count, whole)
    print(table(_HEADINGS, rows))


_HEADINGS = ["model", "processes", "part", "predicted B", "counted B", "error %", "collectives"]


def _rows(name: str, count: int, whole: Counted) -> list[list[str]]:
    spec = MODELS[name]
    forecast, runs = predicted(spec, count), run_group(count, tensor_run, spec)
    far = max(float(np.abs(run.result - whole.result).max()) for run in runs)
    assert far < 1e-4, f"{name} on {count} processes is {far} from one process"
    rows = []
    for part in ("forward", "step"):
        said: int = getattr(forecast, f"{part}_bytes")
        counted = max(getattr(run, f"{part}_bytes") for run in runs)
        expected: Counter[tuple[str, int]] = getattr(forecast, f"{part}_collectives")
        same = all(Counter(getattr(run, f"{part}_collectives")) == expected for run in runs)
        found = Counter(getattr(runs[0], f"{part}_collectives"))
        verdict = f"{expected.total()} equal" if same else f"{expected} but {found}"
        error = f"{(said / counted - 1) * 100:+.2f}"
        rows.append([name, str(count), part, str(said), str(counted), error, verdict])
    return rows


if __name__ == "__main__":
    main()

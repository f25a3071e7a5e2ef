"""Predictions for sharded models beside gloo processes: ``python -m benchmarks.sharding``.

Each row is a model on a number of processes. Tensor parallelism uses torch's own
`parallelize_module` (transformers' styles for a mixture of experts), for a forward pass and a
training step without an optimizer; expert parallelism uses transformers'
`apply_expert_parallelism`, alone and with tensor parallelism; context parallelism splits sequences
and gathers keys and values with plain `torch.distributed`; ZeRO uses `fully_shard`, for a step with
AdamW, also for a GPT-2 in two stages of two replicas on torch's pipelining. Rows show the peak
bytes of the fullest process, and the collectives that an observer counts; results are checked
against those of one process.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks.sharding.context_run import context_run, piece
from benchmarks.sharding.expert_run import expert_run
from benchmarks.sharding.group import run_group
from benchmarks.sharding.pipeline_run import (
    REPLICAS,
    STAGES,
    pipeline_run,
    predicted_pipeline,
)
from benchmarks.sharding.predicted import Predicted, predicted, predicted_zero
from benchmarks.sharding.tensor_run import Counted, tensor_run, whole_run
from benchmarks.sharding.zero_run import zero_run
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
    "gpt2": ModelSpec(
        "gpt2",
        architecture="GPT2LMHeadModel",
        config={
            "n_layer": 2,
            "n_embd": 64,
            "n_head": 4,
            "vocab_size": 256,
            "n_positions": 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
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

LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": ["layers.1.self_attn.v_proj"]}
"""Adapters in the last block alone, so that no other has a backward."""
_WITHOUT_PLAN = ("gpt2",)
"""Models without a tensor-parallel plan in transformers."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharding", description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--processes", nargs="*", type=int, default=[2, 4])
    options = parser.parse_args()
    rows: list[list[str]] = []
    for name in options.models:
        split = name not in _WITHOUT_PLAN
        for count in options.processes:
            rows += _split_rows(name, count) if split else []
            rows += [_zero_row(name, MODELS[name], count, stage) for stage in (2, 3)]
            if name == "llama":
                tuned = replace(MODELS[name], lora=LORA)
                rows += [_zero_row(f"{name}, LoRA", tuned, count, stage) for stage in (2, 3)]
    if "gpt2" in options.models and STAGES * REPLICAS in options.processes:
        for stage, schedule in product((2, 3), ("1f1b", "gpipe")):
            rows += _pipeline_rows(stage, schedule)
    print(table(_HEADINGS, rows))


_HEADINGS = ["model", "processes", "part", "predicted B", "counted B", "error %", "collectives"]


def _split_rows(name: str, count: int) -> Iterator[list[str]]:
    """Yield the rows of a model with layers, experts or sequences split over `count` processes."""
    spec = MODELS[name]
    whole = whole_run(0, 1, spec)
    runs = run_group(count, tensor_run, spec)
    _check_results(runs, [whole.result] * count)
    yield from _comparison_rows(name, "tp", predicted(spec, count), runs)
    if name == "mixtral":
        spec = replace(spec, batch_size=count)  # one example per device
        whole = expert_run(0, 1, spec)
        for tensor in _divisors(count):
            groups = count // tensor
            runs = run_group(count, expert_run, spec, tensor)
            shares = np.split(whole.result, groups)
            _check_results(runs, [shares[rank // tensor] for rank in range(count)])
            share = replace(spec, batch_size=spec.batch_size // groups, expert_parallel=count)
            part = f"ep={count}" + f" tp={tensor}" * (tensor > 1)
            yield from _comparison_rows(name, part, predicted(share, tensor), runs)
    if name == "llama":
        # The CPU kernel has no grouped-query attention: keys would be copied for each head.
        ungrouped = {"num_key_value_heads": _SIZES["num_attention_heads"]}
        spec = replace(spec, config={**spec.config, **ungrouped})
        whole = whole_run(0, 1, spec)
        runs = run_group(count, context_run, spec)
        logits = torch.from_numpy(whole.result)
        _check_results(runs, [piece(logits, rank, count).numpy() for rank in range(count)])
        yield from _comparison_rows(
            name, "cp", predicted(replace(spec, context_parallel=count)), runs
        )


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def _check_results(runs: Sequence[Counted], expected: Sequence[Any]) -> None:
    error = max(
        float(np.abs(run.result - reference).max())
        for run, reference in zip(runs, expected, strict=True)
    )
    assert error < 1e-4, f"the results of {len(runs)} processes are {error} from those of one"


def _comparison_rows(
    name: str, method: str, forecast: Predicted, runs: Sequence[Counted]
) -> Iterator[list[str]]:
    for part in ("forward", "step"):
        predicted_bytes: int = getattr(forecast, f"{part}_bytes")
        counted = max(getattr(run, f"{part}_bytes") for run in runs)
        expected: Counter[tuple[str, int]] = getattr(forecast, f"{part}_collectives")
        same = all(Counter(getattr(run, f"{part}_collectives")) == expected for run in runs)
        actual = Counter(getattr(runs[0], f"{part}_collectives"))
        verdict = f"{expected.total()} equal" if same else f"{expected} but {actual}"
        error = f"{(predicted_bytes / counted - 1) * 100:+.2f}"
        numbers = [str(predicted_bytes), str(counted), error, verdict]
        yield [name, str(len(runs)), f"{method} {part}", *numbers]


def _zero_row(name: str, spec: ModelSpec, count: int, stage: int) -> list[str]:
    forecast = predicted_zero(spec, count, stage, "adamw")
    runs = run_group(count, zero_run, spec, stage, ("adamw", None))
    counted = max(run.step_bytes for run in runs)
    same = all(Counter(run.step_collectives) == forecast.step_collectives for run in runs)
    actual = Counter(runs[0].step_collectives)
    total = forecast.step_collectives
    verdict = f"{total.total()} equal" if same else f"{total} but {actual}"
    error = f"{(forecast.step_bytes / counted - 1) * 100:+.2f}"
    numbers = [str(forecast.step_bytes), str(counted), error, verdict]
    return [name, str(count), f"zero={stage} step", *numbers]


def _pipeline_rows(zero: int, schedule: str) -> Iterator[list[str]]:
    """Yield a row for each stage of the pipeline."""
    runs = run_group(STAGES * REPLICAS, pipeline_run, zero, schedule)
    for stage, forecast in enumerate(predicted_pipeline(zero, schedule)):
        stage_runs = runs[REPLICAS * stage :][:REPLICAS]
        counted = max(run.peak_bytes for run in stage_runs)
        same = all(run.collectives == forecast.collectives for run in stage_runs)
        total = forecast.collectives
        verdict = f"{total.total()} equal" if same else f"{total} but {stage_runs[0].collectives}"
        error = f"{(forecast.peak_bytes / counted - 1) * 100:+.2f}"
        part = f"zero={zero} {schedule}, stage {stage}"
        numbers = [str(forecast.peak_bytes), str(counted), error, verdict]
        yield ["gpt2", str(STAGES * REPLICAS), part, *numbers]


if __name__ == "__main__":
    main()

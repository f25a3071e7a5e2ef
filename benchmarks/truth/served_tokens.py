"""Time per output token of a served Llama-3.1-70B, compared with runs that decode it.

    python -m benchmarks.truth --data FOLDER --set served_tokens

A row is a run of the command: ``phase=generate prefill_batch=1 runtime=compiled mode=single
latency=kernels`` with weights in the row's layout. Nothing is fitted to these rows. A server also
samples and fuses more than a compiler does, which is not modelled.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.truth.gpt_fast import MODELS
from benchmarks.truth.measured import count_left_out, published
from benchmarks.truth.planned_run import time_of_alike_layers_s
from benchmarks.truth.row import Row
from runner.experiment.result import Result

__all__ = ["NAME", "SOURCE", "rows"]

NAME = "served_tokens"
SOURCE = "ai-dynamo/aiconfigurator systems/silicon_sample.csv@095f58a (Apache-2.0), vLLM, TensorRT"
_MODELS = {"meta-llama/Llama-3.1-70B": "Llama-3.1-70B", "meta-llama/Llama-3.1-8B": "Llama-3.1-8B"}
_DEVICES = {"a100_sxm": "a100_80gb", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200"}
_LINKS = {"a100_80gb": "nvlink3", "h100": "nvlink4", "h200": "nvlink4", "b200": "nvlink5"}
_WEIGHTS = {
    "fp8": ("weights=fp8", "weights.activations=fp8"),
    "bf16": (),
    "int8": ("weights=int8",),
}


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each time per output token.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    left_out: Counter[str] = Counter()
    for point in published(data, "ai-dynamo/aiconfigurator"):
        if reason := _reason(point):
            left_out[reason] += 1
            continue
        prompt, answer = _lengths(point)
        label = f"{_MODELS[point['model']]} {point['hardware']} {point['parallel'].strip()}"
        predicted_ms = 1e3 * _token_s(point, prompt, answer)
        yield Row(
            f"{label}, {prompt} + {answer} tokens",
            predicted_ms,
            float(point["value"]),
            "ms",
            held_out=True,
        )
    count_left_out(left_out)


def _reason(point: Mapping[str, Any]) -> str:
    """Return why no run can express a published row, or an empty string if one can."""
    if point["metric"] != "tpot_ms":
        return "a time to the first token includes waiting for other requests"
    if point["model"] not in _MODELS:
        return "no preset describes the model"
    if point["hardware"] not in _DEVICES:
        return f"no curves of {point['hardware']}"
    if point["dtype"] not in _WEIGHTS:
        return f"no layout for {point['dtype']}"
    if not str(point["parallel"]).startswith(f"TP={point['n_devices']} "):
        return "other than tensor parallel"
    return ""


def _lengths(point: Mapping[str, Any]) -> tuple[int, int]:
    """Return the tokens of a prompt and of an answer, from ``isl 1024 osl 8192``."""
    _, prompt, _, answer = str(point["seq"]).split()
    return int(prompt), int(answer)


def _token_s(point: Mapping[str, Any], prompt: int, answer: int) -> float:
    device, devices = _DEVICES[point["hardware"]], int(point["n_devices"])
    run = (
        "phase=generate",
        f"prompt_len={prompt}",
        f"output_len={answer}",
        "prefill_batch=1",
        f"model.batch_size={point['batch']}",
        f"devices={devices}x{device}",
        f"tensor_parallel={devices}",
        f"transfer_rate={_LINKS[device]}",
        *_WEIGHTS[point["dtype"]],
        "runtime=compiled",
        "mode=single",
        "latency=kernels",
    )
    preset, changed = MODELS[_MODELS[point["model"]]]
    # The presets are Llama 3, whose maximum length is below these contexts.
    changed = {**changed, "max_position_embeddings": 131072}
    return time_of_alike_layers_s(preset, changed, run, _tpot_s)


def _tpot_s(result: Result) -> float:
    assert result.generation is not None
    return result.generation.tpot_s

"""Activations of a layer of Megatron's GPTs, compared with the formulas of Korthikanti et al.

Figure 1 of the paper is drawn from its own formulas, which the published numbers match to every
digit: they are not measurements, but what Megatron-LM's authors count. Here the activations of a
layer are its contribution to the peak of a step beyond weights and their states, from plans of 2
and 3 layers. The first stage holds activations of all layers of the model, with interleaved stages
1 + (p - 1) / (p m) times as many (section 4.2.3); the formulas count neither the embedding nor the
head. Nothing is fitted.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from benchmarks.truth.measured import published
from benchmarks.truth.megatron_paper import MODELS, PAPER, SEQUENCE, TENSOR, Gpt
from benchmarks.truth.megatron_steps import gpt_overrides, parallel_overrides, planned_step
from benchmarks.truth.row import Row

__all__ = ["NAME", "SOURCE", "rows"]

NAME = "megatron_paper_memory"
SOURCE = f"Korthikanti et al. 2022, {PAPER} (figure 1, its formulas), by calculon-ai/calculon"
_GIB = 2**30
_LAYERS = (2, 3)
"""Layers of the plans; a single layer is not a repeated block that checkpointing recomputes."""


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each bar of the figure.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    for point in published(data, PAPER):
        gpt, parallel = MODELS[point["model"]], point["parallel"]
        if point["metric"] == "step_time":
            continue
        kept_bytes, weight_bytes = _layer_bytes(gpt, selective="selective" in parallel)
        if point["metric"] == "activation_memory":
            in_flight = 1 + (gpt.stages - 1) / (gpt.stages * gpt.chunks) * (gpt.chunks > 1)
            predicted = kept_bytes * gpt.layers * in_flight
        else:
            predicted = weight_bytes * gpt.layers / gpt.stages
        label = f"{point['model']} {parallel}, {point['metric']}"
        yield Row(label, predicted / _GIB, float(point["value"]), point["unit"], held_out=True)


@cache
def _layer_bytes(gpt: Gpt, *, selective: bool) -> tuple[int, int]:
    """Return the bytes of a layer's activations, and of its weights, gradients and states."""
    peaks, weights = zip(
        *(_device_bytes(gpt, n, selective=selective) for n in _LAYERS), strict=True
    )
    weight_bytes = weights[1] - weights[0]
    return peaks[1] - peaks[0] - weight_bytes, weight_bytes


def _device_bytes(gpt: Gpt, layers: int, *, selective: bool) -> tuple[int, int]:
    """Return the peak of a device, and its part of weights, gradients and states."""
    result = planned_step(
        (
            *gpt_overrides(gpt.hidden, gpt.heads, layers, SEQUENCE),
            f"model.batch_size={gpt.micro_batch}",
            "microbatches=1",
            "transfer_rate=nvlink3",
            *parallel_overrides(TENSOR, 1, 1, "a100_80gb", has_pieces=selective),
            f"checkpointing={'core_attention' if selective else 'none'}",
        )
    )
    use = result.device_uses[0]
    return result.device_memory[0].parts["tensors"].expected, use.weight_bytes + use.state_bytes

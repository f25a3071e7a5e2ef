"""gpt-fast's tokens per second at batch 1 on one A100, beside a decode of the same model.

gpt-fast runs `torch.compile` with CUDA graphs: what is no product is fused into one, so a token
takes the sum of its products and attention by the roofline, each with a kernel's own time.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from omegaconf import OmegaConf

from benchmarks.truth.row import Row
from fxpart.capture.captured import captured_graph
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.few_bits import WeightFormat, with_few_bits
from fxpart.core.graph import OpGraph
from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from fxpart.cost.roofline import LatencyModel, op_time_s
from runner.config.paths import conf_dir

__all__ = ["NAME", "SOURCE", "rows"]

NAME = "gpt_fast"
SOURCE = "pytorch-labs/gpt-fast README.md@32971d3 (BSD-3), batch 1, prompt 5, 200 tokens, one A100"

_MODELS = {
    "Llama-2-7B": ("llama2_7b", {}),
    "Llama-2-70B": ("llama3_70b", {"vocab_size": 32000, "rope_theta": 10000.0}),
    "Llama-3.1-8B": ("llama3_1_8b", {}),
    "Mixtral-8x7B": ("mixtral_8x7b", {}),
}
"""By the name of a row, the preset and what of its configuration differs."""
_LAYOUTS = {"bf16": ("none", {}), "int8": ("int8", {}), "int4-g32": ("int4", {"group_size": 32})}
_CONTEXT = 5 + 200 // 2
"""Tokens in the cache halfway."""
_KERNELS = LatencyModel(
    compute_efficiency=0.7, bandwidth_efficiency=0.8, op_overhead_s=2e-6
)  # conf/latency: roofline's shares, and kernels' time of a kernel that does next to nothing


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each model and layout of weights on one device."""
    with (data / "measured.json").open(encoding="utf-8") as file:
        points = json.load(file)
    for point in points:
        measures_one = point["n_devices"] == 1 and point["metric"] == "tokens_per_s"
        if "gpt-fast" in point["source"] and measures_one:
            seconds = _token_s(point["model"], point["dtype"])
            label = f"{point['model']} {point['dtype']}"
            # The read_share of a layout of few bits is fitted to its row of this set.
            is_fitted = point["dtype"] != "bf16"
            yield Row(label, 1 / seconds, point["value"], "tokens/s", held_out=not is_fitted)


def _token_s(model: str, dtype: str) -> float:
    graph = _graph(model, dtype)
    link = Link(1e9)
    times = op_time_s(graph, uniform_topology((_a100(),), link), _KERNELS)[:, 0]
    return float(times[graph.flops > 0].sum())


def _graph(model: str, dtype: str) -> OpGraph:
    preset, changed = _MODELS[model]
    fields = _yaml("model", preset)
    spec = ModelSpec(
        name=model,
        architecture=fields["architecture"],
        config={**fields["config"], **changed},
        step="decode",
        cache_len=_CONTEXT,
        dtype="bfloat16",
    )
    graph = captured_graph(spec, "operator", Path.home() / ".cache/fxpart").graph
    layout, settings = _LAYOUTS[dtype]
    if layout == "none":
        return graph
    # gpt-fast converts every linear layer, that of the scores too.
    chosen = {**_yaml("weights", layout), **settings, "keep": ()}
    chosen.pop("source")
    return with_few_bits(graph, WeightFormat(**chosen))


def _yaml(group: str, name: str) -> dict:  # type: ignore[type-arg]
    fields = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{name}.yaml"))
    assert isinstance(fields, dict)
    return fields


def _a100() -> DeviceSpec:
    fields = _yaml("accelerator", "a100_80gb")
    return DeviceSpec(
        "a100_80gb",
        memory_bytes=80 * 10**9,
        flops_per_s={k: float(v) for k, v in fields["flops_per_s"].items()},
        memory_bandwidth_bytes_per_s=float(fields["memory_bandwidth_bytes_per_s"]),
    )

"""gpt-fast's tokens per second, compared with the summed times of a token's products.

    python -m benchmarks.truth --data FOLDER --set gpt_fast gpt_fast_products

gpt-fast runs `torch.compile` with CUDA graphs, which fuses the operators between products; a run of
fxpart fuses nothing (the set `gpt_fast`). Here the time of a token is the sum of its products,
attention and collectives, each with the time of its kernel. `read_share` of ``weights=int8`` and
``int4`` is fitted with this sum, each to one row. gpt-fast splits the layers over the devices of a
machine, but neither the embedding nor the head. All layers of these models are alike, so models
with a few layers determine the time of any number.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from benchmarks.truth import gpt_fast
from benchmarks.truth.row import Row
from fxpart.capture.captured import captured_graph
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.few_bits import WeightFormat, with_few_bits
from fxpart.core.graph import FloatArray, OpGraph
from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from fxpart.cost.collective_times import collective_bytes, collective_kinds
from fxpart.cost.collectives import CollectiveCurves, collective_time_s
from fxpart.cost.curves.family import family_from
from fxpart.cost.roofline import LatencyModel, op_time_s
from runner.config.paths import conf_dir

__all__ = ["NAME", "SOURCE", "rows"]

NAME = "gpt_fast_products"
SOURCE = (
    f"{gpt_fast.SOURCE}: a sum of products, no run;"
    " read_share of int8 and of int4 is fitted to one row each"
)

_NVLINK = Link(300e9)  # conf/transfer_rate/nvlink3
_LAYERS = (2, 4)
"""Numbers of layers of the captured models."""
_HEAD = "lm_head"
_KERNELS = LatencyModel(
    compute_efficiency=0.7, bandwidth_efficiency=0.8, op_overhead_s=2e-6
)  # conf/latency: the shares of roofline, and the op_overhead_s of kernels


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each model, weight layout and number of devices.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    for point in gpt_fast.points(data):
        dtype, devices = point.dtype, point.devices
        # The read_share of a low-bit layout is fitted to its row with one device.
        held_out = dtype == "bf16" or devices > 1
        seconds = _token_s(point.model, dtype, devices)
        yield Row(point.label, 1 / seconds, point.tokens_per_s, "tokens/s", held_out=held_out)


def _token_s(model: str, dtype: str, devices: int) -> float:
    """Return the time of one token: all layers split over `devices`, and the unsplit head."""
    few, more = _LAYERS
    few_s, more_s = (_layers_s(_graph(model, dtype, devices, n), devices) for n in _LAYERS)
    preset, changed = gpt_fast.MODELS[model]
    layers = int({**_yaml("model", preset)["config"], **changed}["num_hidden_layers"])
    layer_s = (more_s - few_s) / (more - few)
    unsplit = _graph(model, dtype, 1, few)
    head = [
        op for op, module in enumerate(unsplit.modules) if module == _HEAD and unsplit.flops[op]
    ]
    return few_s + (layers - few) * layer_s + float(_times(unsplit)[head].sum())


def _layers_s(graph: OpGraph, devices: int) -> float:
    """Return the time of products, attention and collectives outside the head."""
    outside = np.array([module != _HEAD for module in graph.modules])
    seconds = float(_times(graph)[outside & (graph.flops > 0)].sum())
    kinds, curves = collective_kinds(graph), _collectives()
    for op, size_bytes in collective_bytes(graph).items():
        if outside[op]:
            seconds += collective_time_s(kinds[op], size_bytes, devices, _NVLINK, curves)
    return seconds


def _times(graph: OpGraph) -> FloatArray:
    times: FloatArray = op_time_s(graph, uniform_topology((_a100(),), _NVLINK), _KERNELS)[:, 0]
    return times


def _graph(model: str, dtype: str, devices: int, layers: int) -> OpGraph:
    preset, changed = gpt_fast.MODELS[model]
    fields = _yaml("model", preset)
    spec = ModelSpec(
        name=model,
        architecture=fields["architecture"],
        config={**fields["config"], **changed, "num_hidden_layers": layers},
        step="decode",
        cache_len=gpt_fast.CONTEXT,
        dtype="bfloat16",
        tensor_parallel=devices,
    )
    graph = captured_graph(spec, "operator", Path.home() / ".cache/fxpart").graph
    layout, _, group = dtype.partition("-g")
    if layout == "bf16":
        return graph
    # gpt-fast quantizes every linear layer, the output layer too.
    settings = {**_yaml("weights", layout), "keep": ()}
    settings.pop("source")
    if group:
        settings["group_size"] = int(group)
    return with_few_bits(graph, WeightFormat(**settings))


def _collectives() -> CollectiveCurves | None:
    curves = _yaml("latency", "kernels")["curves"]["a100"]
    return family_from("a100", curves).collectives


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

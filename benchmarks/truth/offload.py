"""Accelerate's table of large models on two Titan RTX, and OPT-30B on a T4, with offload.

A row of the table is costed for the device map that accelerate's own `infer_auto_device_map`
returns for the memory that was free: weights and tensors of each device, and the time of a decoded
token with its copies. A "GB" of that table is 1000 MiB, as the stated weights of OPT-30B on its
second device and on the CPU show. A token is a pass over one token without a cache: OPT has no
graph with a cache here (transformers 5.23 sizes a tensor of its positions by a mask's values), and
reading the cache takes little time next to copying weights.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.truth.measured import count_left_out, published
from benchmarks.truth.row import Row
from fxpart.capture.captured import captured_graph
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.graph import OpGraph
from fxpart.core.module_paths import covering
from fxpart.core.partitions import partition_by_device
from fxpart.core.tiers import OffloadOptions, Tier, Tiers
from fxpart.core.topology import DeviceSpec, Link, Topology, uniform_topology
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.problem import Problem, make_problem
from fxpart.cost.roofline import LatencyModel
from fxpart.cost.streams import Source, Streams, Uses, copies_of, with_streams
from fxpart.cost.tables import memory_tables
from fxpart.placement.offload.machine import Machine
from fxpart.placement.offload.plan import offload
from fxpart.placement.size_based import size_based
from runner.config.specs import HOST_LAUNCH_S

__all__ = ["NAME", "SOURCE", "fit_note", "rows"]

NAME = "offload"
SOURCE = (
    "huggingface/accelerate benchmarks/big_model_inference@16cb6eb (Apache-2.0), two Titan RTX;"
    " FMInference/FlexLLMGen README.md@004ffef (Apache-2.0), HF Accelerate on a T4"
)

_TABLE = "huggingface/accelerate"
_PUBLISHERS = (_TABLE, "FlexLLMGen")
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "GPT-J-6B": ("GPTJForCausalLM", {}),
    "GPT-NeoX-20B": ("GPTNeoXForCausalLM", {}),
    "OPT-6.7B": (
        "OPTForCausalLM",
        {
            "hidden_size": 4096,
            "word_embed_proj_dim": 4096,
            "ffn_dim": 16384,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    ),
    "OPT-30B": (
        "OPTForCausalLM",
        {
            "hidden_size": 7168,
            "word_embed_proj_dim": 7168,
            "ffn_dim": 28672,
            "num_hidden_layers": 48,
            "num_attention_heads": 56,
        },
    ),
    "OPT-175B": (
        "OPTForCausalLM",
        {
            "hidden_size": 12288,
            "word_embed_proj_dim": 12288,
            "ffn_dim": 49152,
            "num_hidden_layers": 96,
            "num_attention_heads": 96,
        },
    ),
}
"""For each model name, the class and the published changes to its default configuration."""
_DTYPES = {"fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}
_MIB = 2**20
_TITAN = DeviceSpec(
    "titan_rtx",
    memory_bytes=24_217 * _MIB,
    flops_per_s={"float32": 16.3e12, "float16": 65.2e12},  # fp16 with float32 accumulation
    memory_bandwidth_bytes_per_s=672e9,
)  # NVIDIA Titan RTX, specifications
T4 = DeviceSpec(
    "t4",
    memory_bytes=16 * 10**9,
    flops_per_s={"float32": 8.1e12, "float16": 65e12},
    memory_bandwidth_bytes_per_s=320e9,
    sustained_flops_per_s={"float16": 24e12},
)  # conf/accelerator
_FREE_MIB = {0: 23_000, 1: 23_000, "cpu": 27_000}
"""Memory that accelerate found free, of 24,217 MiB per device and 32 GB of the host: fitted to the
published splits. Since accelerate places whole layers, 22,700 to 23,200 per device and 26,200 to
27,900 on the CPU give the same splits."""
PCIE3 = Link(15.75e9, 10e-6)
_PAGEABLE = 0.3
"""Share of a link that copies from pageable memory reach, as in conf/offload: fitted to the two
published rows with a time and copies."""
_DISK_BYTES_PER_S = 3.5e9
"""Rated speed of a solid-state disk on PCI Express 3.0 x4; the table does not name the disk."""
ROOFLINE = LatencyModel(compute_efficiency=0.7, bandwidth_efficiency=0.8, op_overhead_s=5e-6)
_CONTEXT_BYTES = 2**29  # conf/reserve


def rows(data: Path) -> Iterator[Row]:
    """Yield rows for the time of a token, the memory of each device, and tokens per second.

    Published rows that cannot be expressed are printed with the reason and counted.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    left_out: Counter[str] = Counter()
    for point in published(data, *_PUBLISHERS):
        label = f"{point['model']} {point['dtype']}"
        if reason := _left_out(point):
            print(f"{label}, {point['parallel']}, is left out: {reason}")
            left_out[reason] += 1
        elif _TABLE in point["source"]:
            yield from _table_rows(point, label)
        else:
            held_out = not _is_fitted(point)
            yield Row(label, _generated_per_s(point), point["value"], "tokens/s", held_out=held_out)
    count_left_out(left_out)


def _left_out(point: Mapping[str, Any]) -> str:
    """Return why a published row is left out, or an empty string if it is not."""
    if _TABLE not in point["source"] and "HF Accelerate" not in point["parallel"]:
        return "in the set flexgen"
    if point["model"] not in MODELS:
        return "no configuration of the model"
    return "" if point["dtype"] in _DTYPES else "no such dtype"


def _is_fitted(point: Mapping[str, Any]) -> bool:
    """Return whether `_PAGEABLE` is fitted to the row."""
    fitted = ("time_per_token", "GPT-NeoX-20B", "fp32"), ("tokens_per_s", "OPT-30B", "fp16")
    return (point["metric"], point["model"], point["dtype"]) in fitted


def fit_note(data: Path, _: Sequence[Row]) -> str:
    """Return a sentence with the share of a link that each fitted row implies."""
    kept_points = (point for point in published(data, *_PUBLISHERS) if not _left_out(point))
    points = [point for point in kept_points if _is_fitted(point)]
    shares = [f"{_fit_share(point):.2f} ({point['model']} {point['dtype']})" for point in points]
    shares_text = " and ".join(shares) or "nothing"
    return f"the rows imply for pageable copies a share of {shares_text}, {_PAGEABLE} is taken"


def _fit_share(point: Mapping[str, Any]) -> float:
    """Return the share that reproduces the measured time, which is linear in 1 / share."""

    def seconds(share: float) -> float:
        if point["metric"] == "time_per_token":
            return _token(point["model"], point["dtype"], share)[0].latency_s
        return 1 / _generated_per_s(point, share)

    value = float(point["value"])
    measured_s = value if point["metric"] == "time_per_token" else 1 / value
    lower_share = 0.8 * _PAGEABLE
    time_s, slower_s = seconds(_PAGEABLE), seconds(lower_share)
    slope = (slower_s - time_s) / (1 / lower_share - 1 / _PAGEABLE)
    return 1 / (1 / _PAGEABLE + (measured_s - time_s) / slope)


def _table_rows(point: Mapping[str, Any], label: str) -> Iterator[Row]:
    evaluation, on_cpu = _token(point["model"], point["dtype"])
    if point["metric"] == "time_per_token":
        yield Row(label, evaluation.latency_s, point["value"], "s", held_out=not _is_fitted(point))
        return
    # The published sizes are those of placed weights, without the temporary copies.
    sizes = [*(use.weight_bytes for use in evaluation.devices), on_cpu]
    for name, size, measured in zip(("0", "1", "cpu"), sizes, point["value"], strict=True):
        if measured:
            # The split follows from `_FREE_MIB`, which is fitted to it.
            row_label = f"{label} memory of {name}"
            yield Row(row_label, size / _MIB / 1000, measured, "1000 MiB", held_out=False)


def _token(model: str, dtype: str, share: float = _PAGEABLE) -> tuple[Evaluation, int]:
    """Return the cost of a token under accelerate's own device map, and the bytes on the CPU."""
    spec = _spec(model, dtype, batch=1, length=1)
    graph = captured_graph(spec, "operator", Path.home() / ".cache/fxpart").graph
    entries = _accelerate_map(spec)
    places = [entries.get(covering(path, entries) or "", 0) for path in _paths(graph)]
    # Modules on the CPU or the disk run on the first device.
    homes = np.array([place if isinstance(place, int) else 0 for place in places], dtype=np.int64)
    device_of = homes[graph.group]
    unit_of, modules = _units(graph, entries)
    topology = uniform_topology((_TITAN, _TITAN), PCIE3)
    problem = _problem(graph, replace(topology, host_launch_s=HOST_LAUNCH_S))
    sources = [Source(share, from_disk=entries[module] == "disk") for module in modules]
    streams = Streams(
        np.full(2, PCIE3.bytes_per_s),
        np.full(2, PCIE3.latency_s),
        overlap=False,
        disk_bytes_per_s=_DISK_BYTES_PER_S,
    )
    bare = replace(graph, weight_bytes=np.where(unit_of >= 0, 0, graph.weight_bytes))
    evaluation = with_streams(
        replace(problem, graph=bare, memory=memory_tables(bare)),
        partition_by_device(graph, device_of),
        copies_of(Uses(graph.users, graph.uses, graph.weight_bytes), device_of, unit_of, sources),
        streams,
        bound_s=0.0,
        least_load_s=0.0,
    )
    on_cpu = [unit for unit, module in enumerate(modules) if entries[module] == "cpu"]
    return evaluation, int(graph.weight_bytes[np.isin(unit_of, on_cpu)].sum())


def _spec(model: str, dtype: str, *, batch: int, length: int) -> ModelSpec:
    architecture, config = MODELS[model]
    return ModelSpec(
        name=model,
        architecture=architecture,
        config=config,
        batch_size=batch,
        seq_len=length,
        dtype=_DTYPES[dtype],
    )


def _problem(graph: OpGraph, topology: Topology) -> Problem:
    return make_problem(graph, topology, ROOFLINE)


def _accelerate_map(spec: ModelSpec) -> dict[str, int | str]:
    """Return accelerate's device map for the free memory."""
    from accelerate import infer_auto_device_map

    module = build_model(spec).module
    device_map: dict[str, int | str] = infer_auto_device_map(
        module,
        {place: size * _MIB for place, size in _FREE_MIB.items()},
        no_split_module_classes=module._no_split_modules,
    )
    return device_map


def _paths(graph: OpGraph) -> list[str]:
    """Return the module of each operator: that of its weights if their path is longer."""
    paths = list(graph.modules)
    for weight, op in zip(graph.uses.tolist(), graph.users.tolist(), strict=True):
        name = graph.weight_names[weight]
        paths[op] = max(paths[op], name.rpartition(".")[0], key=len)
    return paths


def _units(graph: OpGraph, entries: Mapping[str, int | str]) -> tuple[Any, list[str]]:
    """Return the unit of each weight, -1 for those on a device, and the map entry of each unit."""
    unit_of = np.full(len(graph.weight_names), -1, dtype=np.int64)
    units: dict[str, int] = {}
    places: list[str] = []
    for weight, name in enumerate(graph.weight_names):
        entry = covering(name, entries)
        if entry is not None and isinstance(entries[entry], str):
            owner = name.rpartition(".")[0]
            if owner not in units:
                units[owner] = len(units)
                places.append(entry)
            unit_of[weight] = units[owner]
    return unit_of, places


def _generated_per_s(point: Mapping[str, Any], share: float = _PAGEABLE) -> float:
    """Return the generated tokens per second, prompt included, with fxpart's plan of streams."""
    prompt, output = (int(word) for word in point["seq"].split() if word.isdigit())
    batch, (_, config) = point["batch"], MODELS[point["model"]]
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    cache_bytes = 2 * 2 * layers * width * batch * (prompt + output)  # keys, values; 2 bytes each
    seconds = [
        _streamed_s(
            _spec(point["model"], point["dtype"], batch=batch, length=n), cache_bytes, share
        )
        for n in (prompt, 1)
    ]
    return float(batch * output / (seconds[0] + (output - 1) * seconds[1]))


def _streamed_s(spec: ModelSpec, cache_bytes: int, share: float) -> float:
    graph = captured_graph(spec, "operator", Path.home() / ".cache/fxpart").graph
    device = replace(T4, memory_bytes=T4.memory_bytes - cache_bytes - _CONTEXT_BYTES)
    topology = replace(uniform_topology((device,), PCIE3), host_launch_s=HOST_LAUNCH_S)
    options = OffloadOptions(
        "accelerate", overlap=False, on_host=False, pageable_share=share
    )  # conf/offload/accelerate.yaml
    machine = Machine(
        _problem(graph, topology),
        Tiers(
            Tier("host", "host", 208 * 10**9), Tier("disk", "disk", 1500 * 10**9, _DISK_BYTES_PER_S)
        ),
        options,
        link=(PCIE3.bytes_per_s, PCIE3.latency_s),
        host_times=None,
    )
    return offload(machine, size_based).evaluation.latency_s

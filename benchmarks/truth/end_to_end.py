"""Published training steps of sharded data parallelism, compared with runs of fxpart.

The rows are those of `measured.json` from engines built on torch's FSDP. A row's fields become the
overrides of a run: ``mode=single data_parallel=N zero=3 latency=kernels``. Rows that no run can
express are printed with the reason and counted. Nothing is fitted. The versions of torch that were
measured ran FlashAttention-2 on an H100 (`_OLD_ATTENTION`).

- ``bf16``, ``amp_bf16``: float32 weights, cast to bfloat16 for computation, which is
  ``optimizer.master_weights=true``; ``bf16 pure``: everything in bfloat16.
- ``float8``: torchao's linear layers, ``float8=tensorwise``. FSDP gathers weights in bfloat16 here.
- MPT is GPT-2's block without biases: transformers' own MPT computes attention as separate
  products, while the measured engine uses one fused kernel.
- ``torch.compile`` compiles each block by itself, ``runtime=compiled runtime.regional=true``. Rows
  of 2025-06 also compiled the loss, ``runtime.compiled_loss=true``.
- torchtitan sums gradients in float32 (``mixed_precision_reduce``), which is ``reduce_dtype``.
- Groups that share layers (``TP``) split sequences too, and compute the loss from shards of the
  logits, torchtitan's default. ``asyncTP`` is ``async_tensor_parallel=true``. Tokens are published
  per device of a group.
- Pipelines (``PP``) run as many microbatches as they have stages, torchtitan's default at that time
  (``pipeline_parallel_microbatches``), and keep weights gathered after a forward, ``zero=2``. Their
  time and the bytes of their tensors follow from runs with fewer layers, in which they are linear.
- With gradient accumulation, each microbatch counts as a step.
- Memory is what torch's allocator reserved.
- A card limited to fewer watts than the H100's 700 is assumed to compute at the square root of that
  share of its peak, since power grows with the square to the cube of the clock.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.truth.measured import count_left_out, published
from benchmarks.truth.planned_run import run_config
from benchmarks.truth.row import Row
from fxpart.errors import FxpartError
from runner.config.device_schema import LinkConfig
from runner.config.paths import conf_dir
from runner.config.schema import Config
from runner.experiment.experiment import plan
from runner.experiment.model_spec import model_spec

__all__ = [
    "NAME",
    "SOURCE",
    "Figures",
    "Inexpressible",
    "Pipeline",
    "Run",
    "rows",
    "run_of",
]

NAME = "training steps on FSDP"
SOURCE = "pytorch/torchtitan (BSD-3) and mosaicml/llm-foundry (Apache-2.0), as their benchmarks say"
_ENGINES = ("pytorch/torchtitan", "mosaicml/llm-foundry")
_OLD_ATTENTION = "latency.curves.h100.torch_attention={family: a100, compute_share: 0.629}"
"""Share of an H100's peak that torch's attention reached with Ampere's instructions (Luo et al.:
Dissecting the Nvidia Hopper GPU architecture, arXiv:2402.13499)."""
_GIB = 2**30
_NODE = 8
"""Devices per machine."""
_WATTS = {"h100": 700.0, "h200": 700.0, "a100": 400.0}
"""Rated power in the data sheets of the SXM cards."""
_LINKS = {"h100": "nvlink4", "h200": "nvlink4", "a100": "nvlink3"}
_CHECKPOINTING = {
    "none": "none",
    "selective": "selective",
    "per-op selective": "selective",
    "full": "block",
}
_RESERVED = ("tensors", "unread weights", "kernel workspaces", "allocator", "library workspaces")
"""Parts of a device's memory that torch's allocator reserves."""
_LLAMA = {
    "8b": ("model=llama3_1_8b",),
    "70b": ("model=llama3_70b",),
    "405b": (
        "model=llama3_70b",
        "model.config.hidden_size=16384",
        "model.config.intermediate_size=53248",
        "model.config.num_attention_heads=128",
    ),
}
_LAYERS = {"405b": 126}
"""Layers of models that differ in them from the model that is named."""
_COMPILED = ("runtime=compiled", "runtime.regional=true")
_COMPILED_LOSS, _COMPILED_LOSS_MONTH = "runtime.compiled_loss=true", re.compile("2025-?06")
"""Rows of June 2025, recognised by the name of their file, also compiled the loss."""
_SCHEDULES = {"1F1B": 1, "interleaved-1F1B": 2}
"""Stages on each device by schedule; two are torchtitan's default if they are interleaved."""
_MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Width, layers and heads, from scripts/train/yamls/pretrain of llm-foundry."""


class Inexpressible(Exception):  # noqa: N818 - a reason, not an error
    """The reason why no run of fxpart can express a measurement."""


@dataclass(frozen=True, slots=True)
class Run:
    """The run that corresponds to a published row."""

    overrides: tuple[str, ...]
    memory_bytes: int | None
    """Memory of a device; None to use the value of the accelerator's file."""
    bytes_per_s: float | None
    """Memory bandwidth of a device; None likewise."""
    compute_share: float
    """Share of the peaks in the accelerator's file that the card reaches."""
    tokens: float
    """Tokens per step, over the devices that share them."""
    pipeline: "Pipeline | None" = None
    """How a pipeline of many layers follows from `overrides`."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The layers of a pipeline."""

    chunks: int
    """Stages of all devices."""
    layers: int
    """Layers of the model."""


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each figure that a run can express.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    left_out: Counter[str] = Counter()
    for point in published(data, *_ENGINES):
        try:
            run = run_of(point)
            predicted = _predicted(run, point["metric"])
        except (Inexpressible, FxpartError) as error:
            print(f"{_label(point)} is left out: {error}")
            left_out[point["metric"]] += 1
            continue
        measured = float(point["value"])
        yield Row(_label(point), predicted, measured, point["unit"], held_out=True)
    count_left_out(left_out)


def _label(point: Mapping[str, Any]) -> str:
    names = ("model", "hardware", "dtype", "batch", "seq", "parallel", "activation_checkpointing")
    return " ".join(str(point.get(name, "")) for name in (*names, "metric"))


def run_of(point: Mapping[str, Any]) -> Run:
    """Return the run that corresponds to `point`.

    Raises:
        Inexpressible: if there is none.

    """
    hardware = str(point["hardware"])
    name = re.match(r"(?:DGX-)?(h100|h200|a100)", hardware, re.IGNORECASE)
    if name is None or point["phase"] != "train":
        raise Inexpressible(f"{point['phase']} on {hardware} is no training step on known devices")
    family = name[1].lower()
    gigabytes = re.search(r"(\d+) ?GB\b", hardware)
    accelerator = f"a100_{gigabytes[1] if gigabytes else 80}gb" if family == "a100" else family
    rate, watts = re.search(r"([\d.]+) ?TB/s", hardware), re.search(r"(\d+) ?W\b", hardware)
    power = float(watts[1]) / _WATTS[family] if watts else 1.0
    degrees = _degrees(str(point["parallel"]), int(point["n_devices"]))
    batch, seq_len = _batch(str(point["batch"])), int(point["seq"])
    model, layers = _model(str(point["model"]), seq_len)
    pipeline = None
    if degrees.stages > 1:
        if layers is None:
            raise Inexpressible(f"pipelines of {point['model']} have no number of layers here")
        pipeline = Pipeline(degrees.chunks, layers)
    elif layers:
        model = (*model, f"model.config.num_hidden_layers={layers}")
    compiles = "torch.compile" in str(point["parallel"])
    with_loss = compiles and _COMPILED_LOSS_MONTH.search(str(point["source"]))
    reduced = ("reduce_dtype=float32",) if _ENGINES[0] in str(point["source"]) else ()
    overrides = (
        *model,
        f"model.batch_size={_microbatch(batch, degrees.stages) * degrees.replicas}",
        f"model.seq_len={seq_len}",
        *_devices(accelerator, family, int(point["n_devices"])),
        f"checkpointing={_checkpointing(point)}",
        *_numbers(str(point["dtype"])),
        "phase=training",
        *degrees.overrides,
        *((_COMPILED_LOSS,) if with_loss else ()),
        *reduced,
        "latency=kernels",
        _OLD_ATTENTION,
        "tracking=none",
    )
    memory_bytes = int(gigabytes[1]) * 10**9 if gigabytes else None
    bytes_per_s = float(rate[1]) * 1e12 if rate else None
    share = min(1.0, math.sqrt(power))
    # Published per device, several of which share their examples.
    tokens = batch * seq_len * degrees.replicas / int(point["n_devices"])
    return Run(overrides, memory_bytes, bytes_per_s, share, tokens, pipeline)


@dataclass(frozen=True, slots=True)
class _Degrees:
    """How a plan shares a model: the degrees that decide sizes, and the overrides for all."""

    replicas: int
    """Replicas over which weights are sharded, each with examples of its own."""
    stages: int
    chunks: int
    """Stages of all devices."""
    overrides: tuple[str, ...]


def _degrees(parallel: str, n_devices: int) -> _Degrees:
    """Return the degrees stated by `parallel`, a text such as ``FSDP=8 TP=8 PP=8 1F1B``."""
    sharded = re.match(r"FSDP(?: FULL_SHARD)?=(\d+)\b(.*)", parallel)
    words = sharded[2].replace("async TP", "asyncTP").replace("vanilla TP", "") if sharded else ""
    sizes = {name: int(size) for name, size in re.findall(r"\b(TP|PP|CP)=(\d+)\b", words)}
    rest = set(re.sub(r"\b(TP|PP|CP)=\d+\b", "", words).split())
    replicas = int(sharded[1]) if sharded else 0
    tensor, stages, context = (sizes.get(name, 1) for name in ("TP", "PP", "CP"))
    if replicas * tensor * stages * context != n_devices:
        raise Inexpressible(f"{parallel} are not the degrees of {n_devices} devices")
    schedules = rest & _SCHEDULES.keys()
    unknown = rest - _SCHEDULES.keys() - {"torch.compile", "asyncTP"}
    if unknown or len(schedules) != int(stages > 1):
        raise Inexpressible(f"nothing stands for {' '.join(sorted(unknown)) or parallel}")
    if n_devices > _NODE and n_devices % _NODE:
        raise Inexpressible(f"{n_devices} devices are no whole machines of {_NODE}")
    groups = (f"tensor_parallel={tensor}", "sequence_parallel=true", "loss_parallel=true")
    overlap = ("async_tensor_parallel=true",) if "asyncTP" in rest else ()
    chunks = _SCHEDULES[schedules.pop()] if schedules else 1
    schedule: tuple[str, ...] = ("schedule=1f1b",)
    if chunks > 1:
        schedule = ("schedule=interleaved", f"mode.interleave={chunks}")
    plan: tuple[str, ...] = ("mode=single", "zero=3")
    if stages > 1:
        plan = ("mode=equal_layers", "zero=2", f"microbatches={stages}", *schedule)
    return _Degrees(
        replicas,
        stages,
        stages * chunks,
        (
            *(_COMPILED if "torch.compile" in rest else ("runtime=eager",)),
            f"data_parallel={replicas}",
            *((f"context_parallel={context}",) if context > 1 else ()),
            *(groups if tensor > 1 else ()),
            *overlap,
            *plan,
        ),
    )


def _microbatch(batch: int, microbatches: int) -> int:
    """Return the examples of a microbatch."""
    if batch % microbatches:
        raise Inexpressible(f"a batch of {batch} is not {microbatches} equal microbatches")
    return batch // microbatches


def _batch(text: str) -> int:
    size = re.match(r"(?:local|micro) (\d+)", text)
    if size is None:
        raise Inexpressible(f"batch {text} is not stated for a device")
    return int(size[1])


def _model(name: str, seq_len: int) -> tuple[tuple[str, ...], int | None]:
    """Return the overrides of a model, and its layers if these do not state them."""
    llama = re.fullmatch(r"llama-3(?:\.\d)?-(\w+)", name.lower())
    if llama and llama[1] in _LLAMA:
        return _LLAMA[llama[1]], _LAYERS.get(llama[1])
    mpt = re.fullmatch(r"mpt-(\w+)", name.lower())
    if mpt is None or mpt[1] not in _MPT:
        raise Inexpressible(f"{name} has no configuration here")
    width, layers, heads = _MPT[mpt[1]]
    overrides = (
        "model=gpt2",
        f"model.name={mpt[0]}",
        f"model.config.n_embd={width}",
        f"model.config.n_layer={layers}",
        f"model.config.n_head={heads}",
        f"model.config.n_positions={seq_len}",
        "model.config.vocab_size=50368",
        "model.config.activation_function=gelu",
        *(f"+model.config.{kind}_pdrop=0" for kind in ("resid", "embd", "attn")),
    )
    return overrides, None


def _devices(accelerator: str, family: str, count: int) -> tuple[str, ...]:
    link = f"transfer_rate={_LINKS[family]}"
    machines = count // _NODE
    if machines <= 1:
        return f"devices={count}x{accelerator}", link
    pools = "+".join([f"{_NODE}x{accelerator}"] * machines)
    return (
        f"devices={pools}",
        f"devices.nodes={list(range(machines))}".replace(" ", ""),
        link,
    )


def _checkpointing(point: Mapping[str, Any]) -> str:
    stated = point.get("activation_checkpointing")
    if stated not in _CHECKPOINTING:
        raise Inexpressible(f"activation checkpointing {stated} is not known")
    return _CHECKPOINTING[stated]


def _numbers(dtype: str) -> tuple[str, ...]:
    if dtype not in ("bf16", "amp_bf16", "bf16 pure") and not dtype.startswith("float8"):
        raise Inexpressible(f"products are in {dtype}")
    master = "false" if dtype.endswith("pure") else "true"
    float8 = ("float8=tensorwise",) if dtype.startswith("float8") else ()
    return "model.dtype=bfloat16", f"optimizer.master_weights={master}", *float8


def _predicted(run: Run, metric: str) -> float:
    if metric == "tokens_per_s_per_gpu":
        return run.tokens / _figures(run).step_s
    if metric == "peak_memory":
        figures = _figures(run)
        return (figures.tensor_bytes + figures.other_bytes) / _GIB
    raise Inexpressible(f"{metric} is not predicted")


@dataclass(frozen=True, slots=True)
class Figures:
    """The time of a step, and what the allocator reserves on the device that needs the most."""

    step_s: float
    tensor_bytes: float
    other_bytes: float


def _figures(run: Run) -> Figures:
    """Return the figures of a run; a pipeline's tensors and time are linear in its layers."""
    if run.pipeline is None:
        return _planned(run)
    chunks = run.pipeline.chunks
    few, more = (
        _planned(replace(run, overrides=(*run.overrides, f"model.config.num_hidden_layers={n}")))
        for n in (chunks, 2 * chunks)
    )
    further = run.pipeline.layers / chunks - 2

    def extended(few_layers: float, more_layers: float) -> float:
        return more_layers + further * (more_layers - few_layers)

    return Figures(
        extended(few.step_s, more.step_s),
        extended(few.tensor_bytes, more.tensor_bytes),
        more.other_bytes,
    )


@cache
def _planned(run: Run) -> Figures:
    config = _config(run)
    result = plan(config, model_spec(config))
    needs = max(result.device_memory, key=lambda need: need.needed.expected).parts
    reserved = {part: size.expected for part, size in needs.items() if part in _RESERVED}
    step_s = result.schedule.step_s if result.schedule else result.evaluation.latency_s
    tensor_bytes = reserved.pop("tensors")
    return Figures(step_s, tensor_bytes, sum(reserved.values()))


def _config(run: Run) -> Config:
    config = run_config(run.overrides)
    # One 400 Gbit/s adapter per device.
    far = OmegaConf.load(conf_dir() / "transfer_rate" / "infiniband_ndr.yaml")
    between = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(LinkConfig), far))
    assert isinstance(between, LinkConfig)
    config.devices.between_nodes = between if config.devices.nodes else None
    for pool in config.devices.pools:
        pool.memory_bytes = run.memory_bytes or pool.memory_bytes
        pool.memory_bandwidth_bytes_per_s = run.bytes_per_s or pool.memory_bandwidth_bytes_per_s
        pool.flops_per_s = {k: rate * run.compute_share for k, rate in pool.flops_per_s.items()}
    return config

"""Generation of OPT by FlexGen on a T4, with weights and cache in host memory and on disk.

    python -m benchmarks.truth --data FOLDER --set flexgen

A row is a prompt pass and decodes with the mean context, both with streamed weights and caches
(`offload.cache=all`). FlexGen runs n batches through a block before it copies the next block; this
is modelled as n steps, each of which copies 1/n of the weights from 1/n of the host and the disk.
The policies are those of FlexGen's benchmark (bench_suite.py of FMInference/FlexLLMGen): for
OPT-30B a fifth of the weights stays on the device, with three batches of 48; for OPT-175B none,
with eight of 32. FlexGen computes attention over the cache on the CPU, which is not modelled: the
cache is copied instead. With the constants of FlexGen's own cost model (12.3 GFLOP/s on the CPU,
copies at 12.89 GB/s) both take equally long: attention needs one operation per byte of the cache.

OPT is represented by the GPT-2 class with OPT's sizes, since OPT's own class has no graph with a
cache here. The disk reads 2 GB/s, as in FlexGen's paper (arXiv 2303.06865, section 6), and is
assumed to write as fast.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.truth.measured import count_left_out, published
from benchmarks.truth.offload import MODELS, PCIE3, ROOFLINE, T4
from benchmarks.truth.row import Row
from fxpart.capture.captured import captured_graph
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.tiers import OffloadOptions, Tier, Tiers
from fxpart.core.topology import uniform_topology
from fxpart.cost.problem import make_problem
from fxpart.placement.offload.machine import Machine
from fxpart.placement.offload.offloaded_units import stream_order
from fxpart.placement.offload.plan import finished
from fxpart.placement.offload.units import RESIDENT, STREAMED
from fxpart.placement.size_based import size_based
from runner.config.specs import HOST_LAUNCH_S

__all__ = ["NAME", "SOURCE", "Policy", "generated_per_s", "rows"]

NAME = "flexgen"
SOURCE = "FMInference/FlexLLMGen README.md@004ffef (Apache-2.0), FlexGen on a T4"

_HOST_BYTES, _DISK_BYTES = 208 * 10**9, 1500 * 10**9
_DISK_BYTES_PER_S = 2e9
_PINNED_SHARE = 0.8  # conf/offload/prefetch.yaml
_ROOM_BYTES = 2**50
"""Memory of the device: unlimited, since the policy is fixed."""


class Policy(NamedTuple):
    """How FlexGen runs a model."""

    batches: int
    """Batches that pass through a block before the next block is copied."""
    resident: float
    """Share of the weights that stays on the device."""


_POLICIES = {("OPT-30B", 144): Policy(3, 0.2), ("OPT-175B", 256): Policy(8, 0.0)}
"""By model and sequences at once; prompts of 512 tokens, 32 generated tokens."""


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each of FlexGen's rates with a known policy. Nothing is fitted to them.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    left_out: Counter[str] = Counter()
    for point in published(data, "FlexLLMGen"):
        label = f"{point['model']} {point['parallel']} {point['batch']}"
        if "FlexGen" not in point["parallel"]:
            continue  # a row of the set `offload`
        policy = _POLICIES.get((point["model"], point["batch"]))
        if policy is None or "compress" in point["parallel"]:
            print(f"{label}, {point['seq']}, is left out: its policy is not known")
            left_out["policy"] += 1
            continue
        rate = generated_per_s(point, policy)
        yield Row(label, rate, point["value"], "tokens/s", held_out=True)
    count_left_out(left_out)


def generated_per_s(point: Mapping[str, Any], policy: Policy) -> float:
    """Return the generated tokens per second, counting the time of prompts and outputs."""
    prompt, output = (int(word) for word in point["seq"].split() if word.isdigit())
    texts = point["batch"] // policy.batches
    sizes = {"prefill": (prompt, prompt), "decode": (1, prompt + output // 2)}
    prompt_s, decode_s = (
        policy.batches * _step_s(_spec(point["model"], step, texts, *lengths), policy)
        for step, lengths in sizes.items()
    )
    return float(point["batch"] * output / (prompt_s + (output - 1) * decode_s))


def _spec(model: str, step: str, texts: int, length: int, cache_len: int) -> ModelSpec:
    _, opt = MODELS[model]
    return ModelSpec(
        name=model,
        architecture="GPT2LMHeadModel",
        config={
            "vocab_size": 50272,
            "n_positions": 2050,
            "n_embd": opt["hidden_size"],
            "n_inner": opt["ffn_dim"],
            "n_layer": opt["num_hidden_layers"],
            "n_head": opt["num_attention_heads"],
            "activation_function": "relu",
        },
        batch_size=texts,
        seq_len=length,
        dtype="float16",
        step=step,
        cache_len=cache_len,
    )


def _step_s(spec: ModelSpec, policy: Policy) -> float:
    """Return the time of one batch, which copies its share of the weights."""
    graph = captured_graph(spec, "operator", Path.home() / ".cache/fxpart").graph
    graph = replace(graph, weight_bytes=graph.weight_bytes // policy.batches)
    device = replace(T4, memory_bytes=_ROOM_BYTES)
    topology = replace(uniform_topology((device,), PCIE3), host_launch_s=HOST_LAUNCH_S)
    host = Tier("host", "host", _HOST_BYTES // policy.batches)
    disk = Tier("disk", "disk", _DISK_BYTES // policy.batches, _DISK_BYTES_PER_S)
    options = OffloadOptions("prefetch", on_host=False, pinned_share=_PINNED_SHARE, cache="all")
    task = make_problem(graph, topology, ROOFLINE)
    link = (PCIE3.bytes_per_s, PCIE3.latency_s)
    machine = Machine(task, Tiers(host, disk), options, link, None)
    machine = replace(machine, cached=np.ones(len(machine.units), dtype=np.bool_))
    ways, remaining_bytes = (
        np.full(len(machine.units), RESIDENT, dtype=np.int64),
        float(machine.sizes.sum()),
    )
    remaining_bytes *= 1 - policy.resident
    for unit in stream_order(machine):
        if remaining_bytes >= machine.sizes[unit] / 2:
            ways[unit], remaining_bytes = STREAMED, remaining_bytes - machine.sizes[unit]
    return finished(machine, ways, size_based).evaluation.latency_s

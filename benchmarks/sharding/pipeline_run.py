"""Run a GPT-2 in stages whose weights are sharded over replicas: torch's pipelining on FSDP2.

Four processes are two stages of two replicas each: `PipelineStage` and a schedule of
torch.distributed.pipelining over stages of transformers' own blocks, `fully_shard` called on each
block and on the stage.
"""

import gc
from collections import Counter
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy

from benchmarks.sharding.observer import Observer
from benchmarks.sharding.zero_run import resizing
from fxpart.capture.training.joint import joint_graph
from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.partitions import partition_by_device
from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from fxpart.core.weight_state import with_state
from fxpart.cost.problem import Problem, make_problem
from fxpart.cost.roofline import LatencyModel
from fxpart.execution.device import seeded
from fxpart.schedule import (
    ScheduleResult,
    engine_peak_bytes,
    engine_stages,
    ordered_actions,
    simulate_schedule,
    stage_costs,
)
from fxpart.schedule.stage_shards import WeightShards

__all__ = [
    "LOGITS_BYTES",
    "PASSED_BYTES",
    "REPLICAS",
    "STAGES",
    "PipelineCounted",
    "pipeline_run",
    "planned_pipeline",
    "predicted_pipeline",
]

STAGES, REPLICAS, MICROBATCHES = 2, 2, 4
_LAYERS, _BATCH, _TOKENS, _VOCABULARY = 4, 2, 32, 256
_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
_CPU = torch.device("cpu")
PASSED_BYTES = MICROBATCHES * _BATCH * _TOKENS * 64 * 4
"""Receive buffers of each stage; the plan of a run has none."""
LOGITS_BYTES = _BATCH * _TOKENS * _VOCABULARY * 4
"""Logits of one microbatch in float32, which the engine keeps in addition to the plan of a run."""


@dataclass(frozen=True, slots=True)
class PipelineCounted:
    """The peak bytes of one stage, and its collectives by kind and input bytes."""

    peak_bytes: int
    collectives: Counter[tuple[str, int]]
    losses: tuple[float, ...] = ()


class Part(nn.Module):
    """Some layers of a GPT-2, with the embeddings before the first and the head after the last."""

    def __init__(self, layers: range) -> None:
        """Create the layers with these numbers."""
        from transformers import GPT2Config
        from transformers.models.gpt2 import modeling_gpt2

        block: Any = modeling_gpt2.GPT2Block
        super().__init__()
        config = GPT2Config(n_embd=64, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        config._attn_implementation = "sdpa"
        self.wte = nn.Embedding(_VOCABULARY, 64) if layers[0] == 0 else None
        self.wpe = nn.Embedding(_TOKENS, 64) if layers[0] == 0 else None
        self.h = nn.ModuleDict({str(i): block(config, layer_idx=i) for i in layers})
        last = layers[-1] == _LAYERS - 1
        self.ln_f = nn.LayerNorm(64) if last else None
        self.lm_head = nn.Linear(64, _VOCABULARY, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, or the input of the next layers."""
        if self.wte is not None and self.wpe is not None:
            x = self.wte(x) + self.wpe(torch.arange(_TOKENS))
        for block in self.h.values():
            x = block(x)
        if self.ln_f is not None and self.lm_head is not None:
            x = self.lm_head(self.ln_f(x))
        return x


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Part(range(_LAYERS))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return _loss(self.model(ids), labels)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def pipeline_run(
    rank: int, size: int, stage: int, schedule: str, reduce_dtype: str | None = None
) -> PipelineCounted:
    """Return the counts of this process for a step with ZeRO `stage`, 2 or 3.

    With `reduce_dtype`, the model is in bfloat16 and its gradients are summed in that dtype.
    """
    assert size == STAGES * REPLICAS
    mesh = init_device_mesh("cpu", (STAGES, REPLICAS), mesh_dim_names=("pp", "dp"))
    position, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    layers_per_stage = _LAYERS // STAGES
    with seeded(0, _CPU):
        whole = Part(range(_LAYERS))
    module = Part(range(position * layers_per_stage, (position + 1) * layers_per_stage))
    module.load_state_dict({name: whole.state_dict()[name] for name in module.state_dict()})
    module = module.to(_dtype(reduce_dtype))
    reduced = MixedPrecisionPolicy(reduce_dtype=getattr(torch, reduce_dtype or "", None))
    sharded = partial(fully_shard, mesh=mesh["dp"], mp_policy=reduced)
    for block in module.h.values():
        sharded(block, reshard_after_forward=stage == 3)
    sharded(module, reshard_after_forward=False)
    generator = torch.Generator().manual_seed(1)
    shape = (REPLICAS, MICROBATCHES * _BATCH, _TOKENS)
    ids = torch.randint(0, _VOCABULARY, shape, generator=generator)[replica].clone()
    pipeline_stage = PipelineStage(module, position, STAGES, _CPU, group=mesh["pp"].get_group())
    engine = _SCHEDULES[schedule](pipeline_stage, MICROBATCHES, loss_fn=_loss)
    _step(engine, position, ids)
    module.zero_grad(set_to_none=True)
    gc.collect()
    observer = Observer(
        [list(module.parameters()), list(module.buffers()), ids, _buffers(pipeline_stage)]
    )
    with observer, resizing(observer):
        losses = _step(engine, position, ids)
    return PipelineCounted(observer.peak_bytes[0], Counter(observer.collectives), losses)


def _buffers(part: PipelineStage) -> list[Any]:
    """Return the receive buffers of a stage, which exist between steps too."""
    infos = [*part.args_recv_info.values(), *part.grad_recv_info.values()]
    return [getattr(info, "buffer", None) for group in infos for info in group]


def _step(engine: Any, position: int, ids: Tensor) -> tuple[float, ...]:  # noqa: ANN401
    losses: list[Tensor] = []
    inputs = (ids,) if position == 0 else ()
    if position == STAGES - 1:
        engine.step(*inputs, target=ids, losses=losses, return_outputs=False)
    else:
        engine.step(*inputs, return_outputs=False)
    return tuple(loss.item() for loss in losses)


def _dtype(reduce_dtype: str | None) -> torch.dtype:
    return torch.float32 if reduce_dtype is None else torch.bfloat16


def predicted_pipeline(
    stage: int, schedule: str, reduce_dtype: str | None = None
) -> tuple[PipelineCounted, ...]:
    """Return the predicted counts of the processes of each pipeline stage."""
    problem, cut, shards = _sharded_problem(stage, reduce_dtype)
    stages = engine_stages(problem, cut, shards)
    peaks = engine_peak_bytes(
        schedule,
        stages,
        MICROBATCHES,
        training=True,
        result_bytes=LOGITS_BYTES // 4 * _dtype(reduce_dtype).itemsize,
    )
    rows = ordered_actions(schedule, STAGES, 1, MICROBATCHES, training=True)
    counted = []
    for pipeline_stage, peak, row in zip(stages, peaks, rows, strict=True):
        assert pipeline_stage.shards is not None
        sent: Counter[tuple[str, int]] = Counter()
        for kind, size, _ in pipeline_stage.shards.collectives(action.kind for action in row):
            # The input of an all-gather is a part of its result.
            sent[kind, size // REPLICAS if kind == "all_gather" else size] += 1
        counted.append(PipelineCounted(peak, sent))
    return tuple(counted)


def planned_pipeline(stage: int, schedule: str) -> ScheduleResult:
    """Return the schedule as a run plans it, without the buffers of torch's engine."""
    problem, cut, shards = _sharded_problem(stage)
    graph = problem.graph
    parts = -(-graph.weight_bytes[graph.gradient_weights] // REPLICAS)
    sharded = with_state(graph, graph.gradient_weights, [parts])
    planned = make_problem(sharded, problem.topology, LatencyModel())
    return simulate_schedule(schedule, stage_costs(planned, cut, shards), MICROBATCHES)


@cache
def _sharded_problem(
    stage: int, reduce_dtype: str | None = None
) -> tuple[Problem, Assignment, WeightShards]:
    """Return the step of one microbatch, the stage of each operator, and the sharded weights."""
    with torch.device("meta"):
        ids = torch.zeros((_BATCH, _TOKENS), dtype=torch.int64)
        graph = joint_graph(_WithLoss().to(_dtype(reduce_dtype)), (ids, ids))
    spec = DeviceSpec("large", 2**40, {"float32": 1e12, "bfloat16": 1e12}, 1e12)
    topology = uniform_topology((spec,) * STAGES, Link(1e9))
    problem = make_problem(graph, topology, LatencyModel())
    gradients = tuple(range(len(graph.gradient_values)))
    links = (Link(1e9),) * STAGES
    shards = WeightShards(REPLICAS, gradients, stage == 3, links, reduce_dtype=reduce_dtype)
    return problem, _halves(graph), shards


def _halves(graph: OpGraph) -> Assignment:
    """Return the assignment of the first half of the layers to device 0, the rest to 1."""
    begin = graph.modules.index(f"model.h.{_LAYERS // STAGES}.ln_1")
    forward = (np.arange(graph.n_ops) >= begin).astype(np.int64)
    return partition_by_device(graph, forward[graph.forward_of])

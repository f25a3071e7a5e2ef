"""Memory that each of eight B200s allocates in a step of Megatron-LM, compared with its plan.

    python -m benchmarks.truth --data FOLDER --set megatron_b200 megatron_b200_time

The steps are planned by the functions of the command: a transformers Llama of a case's size,
``engine=megatron``, one sequence per microbatch. The memory is that allocated by torch's allocator:
tensors, the gradients that Transformer Engine keeps, and cuBLAS's workspaces. Nothing is fitted.
Cases of models whose sizes are not listed here are left out and printed.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.truth.megatron_steps import parallel_overrides, planned_step
from benchmarks.truth.row import Row
from runner.experiment.result import Result

__all__ = ["NAME", "SOURCE", "Case", "cases", "planned_cases", "rows"]

NAME = "megatron_b200"
SOURCE = "MooreThreads/SimuMax docs/b200 (Apache-2.0), Megatron-LM on eight B200, bytes allocated"
FILE = "megatron_b200.json"
_ALLOCATED = (
    "tensors",
    "unread weights",
    "kept gradients",
    "kernel workspaces",
    "library workspaces",
)
_MIB = 2**20
_DEVICES = 8
_SEQUENCE = 4096
"""Length of a sequence unless the name of the case states another."""
_SIZES: Mapping[str, tuple[str, ...]] = {
    "llama3-8b": (
        "model.config.hidden_size=4096",
        "model.config.intermediate_size=14336",
        "model.config.num_attention_heads=32",
    ),
    "llama3-70b": (),
    "llama3-405b": (
        "model.config.hidden_size=16384",
        "model.config.intermediate_size=53248",
        "model.config.num_attention_heads=128",
    ),
    "deepseekv2": (
        "model.config.vocab_size=102400",
        "model.config.hidden_size=5120",
        "model.config.intermediate_size=12288",
        "model.config.moe_intermediate_size=1536",
        "model.config.n_shared_experts=2",
        "model.config.n_routed_experts=160",
        "model.config.num_experts_per_tok=6",
        "model.config.first_k_dense_replace=1",
    ),
    "deepseekv3": ("model.config.first_k_dense_replace=1",),
    "mixtral-8x7b": (),
    "mixtral-8x22b": (
        "model.config.hidden_size=6144",
        "model.config.intermediate_size=16384",
        "model.config.num_attention_heads=48",
        "model.config.vocab_size=32768",
    ),
}
"""Changes of a model's published configuration relative to its preset.

One of a DeepSeek's four layers is assumed to be dense, as the first of DeepSeek-V2 is."""
_PRESETS = {"llama3": "llama3_70b", "mixtral": "mixtral_8x7b", "deepseek": "deepseek_v3"}
"""Presets by the prefix of a model's name."""


@dataclass(frozen=True, slots=True)
class Case:
    """One measured run."""

    name: str
    model: str
    layers: int
    microbatches: int
    sequence: int
    degrees: Mapping[str, int]
    """By ``tp``, ``pp``, ``ep``, ``cp``; a missing one is 1."""
    chunks: int
    """Model chunks per device of an interleaved pipeline."""
    step_ms: float
    allocated_mib: tuple[float, ...]
    """Peak of each rank."""

    @property
    def data_parallel(self) -> int:
        """Return the number of replicas."""
        return _DEVICES // self._of("tp") // self._of("pp") // self._of("cp")

    @property
    def kept(self) -> str:
        """Return a label of all settings that the memory of a run depends on."""
        in_flight = min(self.microbatches, self._of("pp"))
        degrees = " ".join(f"{kind}{self._of(kind)}" for kind in ("tp", "pp", "ep", "cp"))
        shape = f"l{self.layers} seq{self.sequence} {degrees} chunks{self.chunks}"
        return f"{self.model} {shape}, {in_flight} in flight"

    @property
    def is_held_out(self) -> bool:
        """Return whether no time is fitted to the case.

        Held out are half of all combinations of model and degrees, by their names, and all cases
        with expert or context parallelism.
        """
        if self._of("ep") > 1 or self._of("cp") > 1:
            return True
        name = f"{self.model} tp{self._of('tp')} pp{self._of('pp')}"
        return hashlib.sha256(name.encode()).digest()[0] % 2 == 1

    @property
    def left_out(self) -> str:
        """Return why the case cannot be planned, or an empty string if it can."""
        return "" if self.model in _SIZES else f"no sizes of {self.model}"

    def _of(self, degree: str) -> int:
        return self.degrees.get(degree, 1)

    def overrides(self) -> tuple[str, ...]:
        """Return the overrides of the command that plan the case."""
        data = self.data_parallel
        preset = next(p for begin, p in _PRESETS.items() if self.model.startswith(begin))
        in_chunks = ("schedule=interleaved", f"mode.interleave={self.chunks}")
        return (
            f"model={preset}",
            *_SIZES[self.model],
            f"model.config.num_hidden_layers={self.layers}",
            f"model.seq_len={self.sequence}",
            f"model.batch_size={data}",
            f"microbatches={self.microbatches}",
            "transfer_rate=nvlink5",
            *parallel_overrides(
                self._of("tp"),
                self._of("pp"),
                data,
                "b200",
                context=self._of("cp"),
                experts=self._of("ep"),
            ),
            *(in_chunks if self.chunks > 1 else ()),
        )


def cases(data: Path) -> list[Case]:
    """Return the cases of the file.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    with (data / FILE).open(encoding="utf-8") as file:
        return [_case(point) for point in json.load(file)]


def _case(point: Mapping[str, object]) -> Case:
    name, plan = str(point["case"]), str(point["parallel"])
    sequence = re.search(r"seq(\d+)", name)
    by_rank = point["peak_memory_by_rank_mb"]
    assert isinstance(by_rank, Mapping)
    ranks = sorted(by_rank, key=int)
    return Case(
        name=name,
        model=str(point["model"]).replace("_", "-"),
        layers=int(str(point["layer_num"])),
        microbatches=int(str(point["mbc"])),
        sequence=int(sequence[1]) if sequence else _SEQUENCE,
        degrees={kind: int(n) for kind, n in re.findall(r"(tp|pp|ep|cp)(\d+)", plan)},
        chunks=int(str(point.get("vp_size") or 1)),
        step_ms=float(str(point["real_ms"])),
        allocated_mib=tuple(float(by_rank[rank]["max_allocated_mb"]) for rank in ranks),
    )


def planned_cases(data: Path) -> Iterator[tuple[Case, Result]]:
    """Yield the cases that can be planned with their plans; print those that cannot."""
    all_cases = cases(data)
    left_out = [case for case in all_cases if case.left_out]
    if left_out:
        names = "; ".join(f"{case.name} ({case.left_out})" for case in left_out)
        print(f"{len(left_out)} of {len(all_cases)} cases are left out: {names}")
    for case in sorted(all_cases, key=lambda case: (case.model, str(case.degrees), case.name)):
        if not case.left_out:
            yield case, planned_step(case.overrides())


def allocated_mib(result: Result) -> list[float]:
    """Return the memory that each device of a pipeline allocates, stage by stage."""
    return [
        sum(need.parts[part].expected for part in _ALLOCATED if part in need.parts) / _MIB
        for need in result.device_memory
    ]


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each stage of each model and degrees: its rank that allocates the most.

    Ranks of a stage allocate the same, and so do runs with equally many microbatches in flight.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    measured: dict[tuple[str, int], float] = {}
    predicted: dict[tuple[str, int], float] = {}
    for case, result in planned_cases(data):
        by_stage = allocated_mib(result)
        ranks = len(case.allocated_mib) // len(by_stage)
        for stage, size in enumerate(by_stage):
            key = (case.kept, stage)
            peak = max(case.allocated_mib[stage * ranks : (stage + 1) * ranks])
            measured[key] = max(peak, measured.get(key, 0.0))
            predicted[key] = max(size, predicted.get(key, 0.0))
    for (kept, stage), size in measured.items():
        label = f"{kept}, stage {stage}"
        yield Row(label, predicted[kept, stage], size, "MiB", held_out=True)

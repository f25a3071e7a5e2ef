"""Plan training steps of Megatron-LM as the command does, for sets that measured such steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.truth.planned_run import planned_run
from fxpart.schedule import ScheduleResult
from runner.config.device_schema import LinkConfig
from runner.experiment.result import Result

__all__ = [
    "Cluster",
    "gpt_overrides",
    "parallel_overrides",
    "planned_step",
    "schedule_of",
    "step_of_many_layers_s",
]

_MEGATRON = (
    "engine=megatron",
    "phase=training",
    "phase.train_mode=true",
    "optimizer=adamw",
    "schedule=1f1b",
    "mode=equal_layers",
    "latency=kernels",
)


_FAR_LATENCY_S = 5e-6  # conf/transfer_rate/infiniband_ndr.yaml
_NODE = 8
"""Devices per machine."""
_VOCABULARY = 51200
"""GPT-2's vocabulary, as Megatron rounds it up."""
_FEW_STAGES, _MORE_STAGES = 2, 4


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines of eight devices."""

    device: str
    bytes_per_s: float
    """Rate at which each device sends to other machines."""

    def overrides(self, devices: int) -> tuple[str, ...]:
        """Return the overrides for `devices` devices; append those of `parallel_overrides`."""
        machines = -(-devices // _NODE)
        if machines == 1:
            return (f"devices={devices}x{self.device}",)
        pools = "+".join([f"{_NODE}x{self.device}"] * machines)
        nodes = ",".join(map(str, range(machines)))
        return f"devices={pools}", f"devices.nodes=[{nodes}]"


def gpt_overrides(hidden: int, heads: int, layers: int, sequence: int) -> tuple[str, ...]:
    """Return the overrides for a float16 GPT with unfused attention, as in Megatron in 2022.

    It is a transformers Starcoder2, whose layers are the same: biases, LayerNorm, GELU, and as many
    key heads as query heads.
    """
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": sequence,
        "tie_word_embeddings": "false",
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
        "embedding_dropout": 0.1,
        "attn_implementation": "eager",
    }
    return (
        "model=transformers",
        "model.architecture=Starcoder2ForCausalLM",
        *(f"+model.config.{name}={value}" for name, value in sizes.items()),
        f"model.seq_len={sequence}",
        "model.dtype=float16",
    )


def step_of_many_layers_s(
    step_s: Callable[[int, int], float], stages: int, layers_each: float
) -> float:
    """Return the time of a step with alike layers, extrapolated from steps with fewer.

    For a fixed number of microbatches it is linear in the layers of a stage and in the stages. A
    single layer is not a repeated block that checkpointing recomputes: steps with one stage have
    two layers or more.

    Args:
        step_s: the time for a number of stages and of layers in each of their chunks.
        stages: stages of the pipeline.
        layers_each: layers of a stage, or of a chunk if the pipeline is interleaved.

    """

    def step_with_stages_s(n_stages: int) -> float:
        least = 2 if n_stages == 1 else 1
        few = step_s(n_stages, least)
        if layers_each == least:
            return few
        return few + (layers_each - least) * (step_s(n_stages, least + 1) - few)

    if stages <= _MORE_STAGES:
        return step_with_stages_s(stages)
    few, more = step_with_stages_s(_FEW_STAGES), step_with_stages_s(_MORE_STAGES)
    return few + (stages - _FEW_STAGES) * (more - few) / (_MORE_STAGES - _FEW_STAGES)


def planned_step(overrides: tuple[str, ...], far_bytes_per_s: float | None = None) -> Result:
    """Return the step that ``python -m runner`` plans with `overrides` and those of Megatron-LM.

    Args:
        overrides: overrides of the run.
        far_bytes_per_s: rate at which a device sends to other machines; None for one machine.

    Raises:
        FxpartError: if the step cannot be planned.

    """
    far = LinkConfig("infiniband", far_bytes_per_s, _FAR_LATENCY_S) if far_bytes_per_s else None
    return planned_run((*_MEGATRON, *overrides), far)


def schedule_of(result: Result) -> ScheduleResult:
    """Return the pipeline of a planned step."""
    assert result.schedule is not None, "every step here has microbatches"
    return result.schedule


def parallel_overrides(
    tensor: int,
    pipeline: int,
    data: int,
    device: str,
    *,
    has_pieces: bool = True,
    context: int = 1,
    experts: int = 1,
) -> Sequence[str]:
    """Return the overrides for these degrees in one machine; `has_pieces` splits sequences too."""
    replicas = data * context
    return (
        f"devices={tensor * pipeline * replicas}x{device}",
        f"tensor_parallel={tensor}",
        f"sequence_parallel={str(has_pieces and tensor > 1).lower()}",
        f"data_parallel={data}",
        f"context_parallel={context}",
        f"expert_parallel={experts}",
        f"zero={int(replicas > 1)}",
    )

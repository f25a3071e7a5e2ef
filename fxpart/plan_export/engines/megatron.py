"""Export a plan as arguments of Megatron-LM's ``pretrain_gpt.py``."""

from collections.abc import Mapping

from fxpart.errors import SpecError
from fxpart.plan_export.engines.plan import EnginePlan

__all__ = ["megatron_arguments"]

_SIZES: Mapping[str, str] = {
    "num-layers": "num_hidden_layers",
    "hidden-size": "hidden_size",
    "ffn-hidden-size": "intermediate_size",
    "num-attention-heads": "num_attention_heads",
    "max-position-embeddings": "max_position_embeddings",
    "vocab-size": "vocab_size",
}
"""Configuration field of each argument."""
_ARCHITECTURES = ("LlamaForCausalLM", "MixtralForCausalLM")
_EXPERTS: Mapping[str, str] = {
    "num-experts": "num_local_experts",
    "moe-router-topk": "num_experts_per_tok",
}
_TRANSLATED = frozenset((*_SIZES.values(), *_EXPERTS.values())) | {
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "attention_dropout",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
}
_WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "model_type",
        "pad_token_id",
        "pretraining_tp",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "experts_implementation",
    }
)
"""Fields that do not affect the shapes and kernels of a step; the dtype comes from the command."""
_ROPE_SCALING: Mapping[str, float] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Parameters fixed by Megatron-LM's ``--use-rope-scaling`` besides the factor."""


def megatron_arguments(plan: EnginePlan) -> str:
    """Return the arguments, one per line, for ``pretrain_gpt.py $(cat megatron_args.txt)``.

    Raises:
        SpecError: if Megatron-LM cannot run the plan.

    """
    if plan.zero > 1:
        raise SpecError("its distributed optimizer requires zero=1")
    if not plan.megatron:
        raise SpecError("its steps are planned with engine=megatron")
    if plan.schedule == "gpipe":
        raise SpecError("it supports only schedule=1f1b and interleaved")
    if plan.architecture not in _ARCHITECTURES:
        raise SpecError("only Llama and Mixtral can be written as its arguments")
    if plan.optimizer not in ("adam", "adamw"):
        raise SpecError("it supports only Adam")
    if plan.expert_parallel > 1 and plan.tensor_parallel > 1 and not plan.sequence_parallel:
        raise SpecError("its experts with tensor parallelism require sequence_parallel=true")
    if plan.checkpointing == "selective":
        raise SpecError("it supports only checkpointing=block, core_attention or none")
    stages_first = plan.device_order(stages_first=True) is None
    if not stages_first and plan.device_order():
        raise SpecError("its arguments cannot name devices, and use them in order")
    arguments: list[tuple[str, object]] = [
        *_model_arguments(plan),
        ("tensor-model-parallel-size", plan.tensor_parallel),
        ("pipeline-model-parallel-size", plan.stages.ranks),
        *_mesh(plan),
        ("micro-batch-size", plan.batch_size),
        ("global-batch-size", plan.batch_size * plan.data_parallel * plan.microbatches),
    ]
    if plan.stages.count > 1:
        arguments.append(("pipeline-model-parallel-layout", _layout(plan.stages.layers)))
    flags = {
        "use-tp-pp-dp-mapping": not stages_first,
        "sequence-parallel": plan.sequence_parallel,
        "use-distributed-optimizer": plan.zero == 1,
        "bf16": plan.dtype == "bfloat16",
        "fp16": plan.dtype == "float16",
        # As planned; with bf16 this is Megatron's default.
        "accumulate-allreduce-grads-in-fp32": plan.dtype == "float16",
        "cross-entropy-loss-fusion": True,
    }
    lines = [f"--{key} {value}".rstrip() for key, value in arguments]
    lines += [f"--{flag}" for flag, is_set in flags.items() if is_set]
    if plan.checkpointing == "block":
        lines += ["--recompute-granularity full", "--recompute-method uniform"]
        lines.append("--recompute-num-layers 1")
    if plan.checkpointing == "core_attention":
        lines += ["--recompute-granularity selective", "--recompute-modules core_attn"]
    return "\n".join(lines) + "\n"


def _mesh(plan: EnginePlan) -> list[tuple[str, object]]:
    """Return the arguments of expert and context parallelism."""
    arguments: list[tuple[str, object]] = []
    if plan.context_parallel > 1:
        arguments.append(("context-parallel-size", plan.context_parallel))
        arguments.append(("cp-comm-type", "all_gather"))
    if plan.expert_parallel > 1:
        arguments.append(("expert-model-parallel-size", plan.expert_parallel))
        if plan.tensor_parallel > 1:  # experts are not split, which is not its default
            arguments.append(("expert-tensor-parallel-size", 1))
    if plan.architecture == "MixtralForCausalLM":
        arguments += [("moe-token-dispatcher-type", "alltoall"), ("moe-grouped-gemm", "")]
    return arguments


def _layout(layers: tuple[int, ...]) -> str:
    """Return the stages as ``Ettt|tttt|ttL``: embedding, layers, loss."""
    return f"E{'|'.join('t' * count for count in layers)}L"


def _model_arguments(plan: EnginePlan) -> list[tuple[str, object]]:
    """Return the model's own arguments; flags are pairs with an empty value."""
    model = plan.model
    named = {**_SIZES, **(_EXPERTS if plan.architecture == "MixtralForCausalLM" else {})}
    missing = [key for key in named.values() if key not in model]
    if missing or not plan.tokens:
        raise SpecError("the model's configuration does not state all its sizes")
    _check_fields(model)
    arguments: list[tuple[str, object]] = [(name, model[key]) for name, key in named.items()]
    arguments.append(("seq-length", plan.tokens))
    heads = model["num_attention_heads"]
    groups = model.get("num_key_value_heads") or heads
    if groups != heads:
        arguments += [("group-query-attention", ""), ("num-query-groups", groups)]
    if head_dim := model.get("head_dim"):
        arguments.append(("kv-channels", head_dim))
    if not model.get("tie_word_embeddings", False):
        arguments.append(("untie-embeddings-and-output-weights", ""))
    arguments += [("normalization", "RMSNorm"), ("norm-epsilon", model.get("rms_norm_eps", 1e-6))]
    arguments += [("position-embedding-type", "rope"), *_rotary(model)]
    arguments += [("swiglu", ""), ("disable-bias-linear", "")]
    arguments.append(("attention-dropout", model.get("attention_dropout", 0.0)))
    arguments.append(("hidden-dropout", "0.0"))
    return arguments


def _check_fields(model: Mapping[str, object]) -> None:
    """Refuse configuration fields that the arguments cannot express."""
    for key in ("attention_bias", "mlp_bias"):
        if model.get(key):
            raise SpecError(f"{key}=true cannot be written as its arguments")
    if model.get("hidden_act", "silu") != "silu":
        raise SpecError("only hidden_act=silu can be written as its arguments")
    stated = {key for key, value in model.items() if value is not None}
    if unknown := sorted(stated - _TRANSLATED - _WITHOUT_EFFECT):
        raise SpecError(f"{', '.join(unknown)} of the model cannot be written as its arguments")


def _rotary(model: Mapping[str, object]) -> list[tuple[str, object]]:
    """Return the rotary base, and Llama 3's scaling if the model has one."""
    rope = dict(_section(model, "rope_scaling"))
    rope.update(_section(model, "rope_parameters"))
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    base = rope.pop("rope_theta", None) or model.get("rope_theta") or 10000.0
    if not isinstance(base, int | float) or base != int(base):
        raise SpecError(f"its --rotary-base is a whole number, not {base}")
    arguments: list[tuple[str, object]] = [("rotary-base", int(base))]
    if kind == "default" and not rope:
        return arguments
    factor = rope.pop("factor", None)
    if kind != "llama3" or factor is None or rope != _ROPE_SCALING:
        raise SpecError("only the rotary scaling of Llama 3 can be written as its arguments")
    return [*arguments, ("use-rope-scaling", ""), ("rope-scaling-factor", factor)]


def _section(model: Mapping[str, object], key: str) -> Mapping[str, object]:
    fields = model.get(key)
    return fields if isinstance(fields, Mapping) else {}

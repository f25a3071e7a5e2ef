"""A plan as arguments of Megatron-LM's ``pretrain_gpt.py``."""

from fxpart.errors import SpecError
from fxpart.plan_export.engines.plan import EnginePlan

__all__ = ["megatron_arguments"]


def megatron_arguments(plan: EnginePlan) -> str:
    """Return the arguments, one a line, for ``pretrain_gpt.py $(cat megatron_args.txt)``.

    Raises:
        SpecError: for what it cannot carry out.

    """
    if plan.zero > 1:
        raise SpecError("its distributed optimizer is zero=1")
    if not plan.megatron:
        raise SpecError("its step is planned with engine=megatron")
    if plan.schedule == "gpipe":
        raise SpecError("its schedules are 1f1b and interleaved")
    if plan.architecture != "LlamaForCausalLM":
        raise SpecError("only Llama is put into its arguments")
    if plan.optimizer not in ("adam", "adamw"):
        raise SpecError("its optimizer is Adam")
    if plan.checkpointing == "selective":
        raise SpecError("its checkpointing is block or none")
    stages_first = plan.device_order(stages_first=True) is None
    if not stages_first and plan.device_order():
        raise SpecError("its arguments name no devices, and take them in turn")
    arguments: list[tuple[str, object]] = [
        *_model_arguments(plan),
        ("tensor-model-parallel-size", plan.tensor_parallel),
        ("pipeline-model-parallel-size", plan.stages.ranks),
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
    }
    lines = [f"--{key} {value}".rstrip() for key, value in arguments]
    lines += [f"--{flag}" for flag, is_set in flags.items() if is_set]
    if plan.checkpointing == "block":
        lines += ["--recompute-granularity full", "--recompute-method uniform"]
        lines.append("--recompute-num-layers 1")
    return "\n".join(lines) + "\n"


def _layout(layers: tuple[int, ...]) -> str:
    """Return the stages as ``Ettt|tttt|ttL``: embedding, layers, loss."""
    return f"E{'|'.join('t' * count for count in layers)}L"


def _model_arguments(plan: EnginePlan) -> list[tuple[str, object]]:
    """Return the model's own arguments; flags are pairs with an empty value."""
    model = plan.model
    names = {
        "num-layers": "num_hidden_layers",
        "hidden-size": "hidden_size",
        "ffn-hidden-size": "intermediate_size",
        "num-attention-heads": "num_attention_heads",
        "max-position-embeddings": "max_position_embeddings",
        "vocab-size": "vocab_size",
    }
    missing = [key for key in names.values() if key not in model]
    if missing or not plan.tokens:
        raise SpecError("the model's configuration does not state all its sizes")
    for key in ("attention_bias", "mlp_bias"):
        if model.get(key):
            raise SpecError(f"{key}=true is not put into its arguments")
    if model.get("hidden_act", "silu") != "silu":
        raise SpecError("only hidden_act=silu is put into its arguments")
    heads, size = model["num_attention_heads"], model.get("head_dim")
    if isinstance(size, int) and isinstance(heads, int) and size * heads != model["hidden_size"]:
        raise SpecError("only a head_dim of hidden_size over heads is put into its arguments")
    found: list[tuple[str, object]] = [(name, model[key]) for name, key in names.items()]
    found.append(("seq-length", plan.tokens))
    groups = model.get("num_key_value_heads", heads)
    if groups != heads:
        found += [("group-query-attention", ""), ("num-query-groups", groups)]
    if not model.get("tie_word_embeddings", False):
        found.append(("untie-embeddings-and-output-weights", ""))
    found += [("normalization", "RMSNorm"), ("position-embedding-type", "rope")]
    if "rms_norm_eps" in model:
        found.append(("norm-epsilon", model["rms_norm_eps"]))
    if isinstance(theta := model.get("rope_theta"), int | float):
        found.append(("rotary-base", int(theta)))
    found += [("swiglu", ""), ("disable-bias-linear", "")]
    found += [("attention-dropout", "0.0"), ("hidden-dropout", "0.0")]
    return found

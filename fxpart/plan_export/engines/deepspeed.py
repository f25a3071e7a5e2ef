"""Export a plan as a DeepSpeed JSON configuration."""

import json

from fxpart.errors import SpecError
from fxpart.plan_export.engines.plan import EnginePlan

__all__ = ["deepspeed_json"]


def deepspeed_json(plan: EnginePlan) -> str:
    """Return the file for ``deepspeed.initialize(config=...)``, or transformers' ``--deepspeed``.

    Raises:
        SpecError: if DeepSpeed cannot run the plan.

    """
    if plan.tensor_parallel > 1:
        raise SpecError("it leaves tensor parallelism to the model")
    if plan.expert_parallel > 1:
        raise SpecError("it leaves expert parallelism to the model")
    if plan.context_parallel > 1:
        raise SpecError("it splits sequences by heads and does not gather keys")
    if plan.zero == 2:
        raise SpecError("its stage 2 does not shard weights; use zero=1 or 3")
    if plan.dtype == "bfloat16" and plan.same_dtype and not plan.zero:
        raise SpecError("its stage 0 also keeps 16-bit weights in float32")
    if plan.device_order():
        raise SpecError("its file cannot name devices, and uses them in order")
    values: dict[str, object] = {
        "train_batch_size": plan.batch_size * plan.data_parallel * plan.microbatches,
        "train_micro_batch_size_per_gpu": plan.batch_size,
        "gradient_accumulation_steps": plan.microbatches,
        "zero_optimization": {"stage": plan.zero},
    }
    if plan.dtype == "bfloat16":
        values["bf16"] = {
            "enabled": True,
            "bf16_master_weights_and_grads": plan.same_dtype,
            "bf16_optimizer_states": plan.same_dtype,
        }
    if plan.dtype == "float16":
        values["fp16"] = {"enabled": True, "fp16_master_weights_and_grads": plan.same_dtype}
    return json.dumps(values, indent=2) + "\n"

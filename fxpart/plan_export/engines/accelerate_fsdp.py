"""Export a plan as a configuration of ``accelerate launch``: replicas, or FSDP2."""

from fxpart.errors import SpecError
from fxpart.plan_export.engines.plan import EnginePlan

__all__ = ["accelerate_yaml"]


def accelerate_yaml(plan: EnginePlan) -> str:
    """Return the file for ``accelerate launch --config_file``.

    Raises:
        SpecError: if accelerate cannot run the plan.

    """
    if plan.zero == 1:
        raise SpecError("it has ZeRO-1 only through DeepSpeed")
    if plan.sequence_parallel:
        raise SpecError("its tensor parallelism does not split the sequence")
    if plan.expert_parallel > 1:
        raise SpecError("it has no setting for expert_parallel")
    if plan.tensor_parallel > 1 and not plan.zero:
        raise SpecError("its tensor parallelism requires zero=2 or 3")
    if plan.context_parallel > 1 and not plan.zero:
        raise SpecError("its context parallelism requires zero=2 or 3")
    if plan.checkpointing not in ("none", "block"):
        raise SpecError("it supports only checkpointing=block or none")
    if plan.microbatches > 1:
        raise SpecError("its file has no setting for microbatches")
    values: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if plan.zero else "MULTI_GPU",
        "mixed_precision": "no",  # weights keep the dtype in which they are loaded
        "num_machines": plan.machines,
        "num_processes": plan.devices,
    }
    if order := plan.visible_devices():
        values["gpu_ids"] = order
    lines = [f"{key}: {_yaml(value)}" for key, value in values.items()]
    if plan.zero:
        # Without a class, accelerate wraps the model's `_no_split_modules`.
        lines += _section(
            "fsdp_config",
            {
                "fsdp_version": 2,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_reshard_after_forward": plan.zero > 2,
                "fsdp_activation_checkpointing": plan.checkpointing == "block",
                "fsdp_offload_params": False,
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            },
        )
    if plan.tensor_parallel > 1 or plan.context_parallel > 1:
        sizes: dict[str, object] = {"dp_shard_size": plan.data_parallel}
        if plan.tensor_parallel > 1:
            sizes["tp_size"] = plan.tensor_parallel
        if plan.context_parallel > 1:
            sizes |= {"cp_size": plan.context_parallel, "cp_comm_strategy": "allgather"}
        prefixed = {f"parallelism_config_{key}": size for key, size in sizes.items()}
        lines += _section("parallelism_config", prefixed)
    return "\n".join(lines) + "\n"


def _section(title: str, values: dict[str, object]) -> list[str]:
    return [f"{title}:", *(f"  {key}: {_yaml(value)}" for key, value in values.items())]


def _yaml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    # YAML reads a bare no as false, and some readers take 0,2 for a number.
    return f"'{value}'" if value == "no" or "," in str(value) else str(value)

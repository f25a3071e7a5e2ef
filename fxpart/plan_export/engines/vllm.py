"""Export a plan as a vLLM command."""

from math import ceil, floor

from fxpart.errors import SpecError
from fxpart.plan_export.engines.architectures import VLLM_WITHOUT_BITSANDBYTES
from fxpart.plan_export.engines.plan import EnginePlan

__all__ = ["vllm_command"]

_ON_LOADING = {"fp8": ("fp8", 0), "nf4": ("bitsandbytes", 64)}
"""Quantizations that vLLM applies on loading, and the size of their groups, 0 without groups;
others must be in the checkpoint."""
_RAY_PORT, _RPC_PORT = 6379, 13345
"""Ports of a Ray cluster, and of vLLM's messages between replicas, as in their documentation."""
_USUAL_SHARE = 0.9
"""Share of a device's memory that vLLM takes if the plan does not need more."""


def vllm_command(plan: EnginePlan) -> str:
    """Return a shell script that serves the model in its argument.

    Raises:
        SpecError: if vLLM cannot run the plan.

    """
    _refuse_unsupported(plan)
    order, layers = plan.visible_devices(), plan.stages.layers
    environment = [f"CUDA_VISIBLE_DEVICES={order}"] if order else []
    if plan.stages.count > 1:
        environment.append(f"VLLM_PP_LAYER_PARTITION={','.join(map(str, layers))}")
    lines = ["#!/bin/sh", *_usage(plan)]
    if plan.weights != "none" and plan.weights not in _ON_LOADING:
        weights = plan.format_text or plan.weights
        lines.append(f"# planned with weights in {weights}: MODEL must be quantized in this way")
    if plan.weights == "fp8" and plan.activations is None:
        lines.append(
            "# planned with products in 16 bits, as on devices without 8 bits; on others vLLM casts"
            " their inputs too: weights.activations=fp8"
        )
    if plan.weights == "nf4":
        lines.append("# vLLM 0.28 and later also need: pip install vllm-bnb-plugin")
    arguments = {**_arguments(plan), **_arguments_of_machines(plan)}
    if _memory_share(plan) > _USUAL_SHARE:
        lines.append(
            f"# planned to fill {plan.needed_share / plan.free_share:.1%} of a device:"
            " add --enforce-eager if it has no room for CUDA graphs"
        )
    command = " ".join([*environment, 'exec vllm serve "${1:?the model}"'])
    options = [f"--{k} {v}".rstrip() for k, v in arguments.items()]
    if _local_replicas(plan):
        options.append("$others")  # empty on the first machine
    lines.append(" \\\n    ".join([command, *options]))
    return "\n".join(lines) + "\n"


def _local_replicas(plan: EnginePlan) -> int:
    """Return the replicas on each of several machines; 0 if there is one, or replicas span them."""
    devices = plan.devices // plan.machines
    of_replica = plan.devices // plan.data_parallel
    return devices // of_replica if plan.machines > 1 and devices % of_replica == 0 else 0


def _usage(plan: EnginePlan) -> list[str]:
    if not (replicas := _local_replicas(plan)):
        usage = ["# sh vllm.sh MODEL: a folder, or a name on the hub"]
        if plan.machines > 1:
            usage += [
                f"# on the first of {plan.machines} machines of one Ray cluster: ray start --head"
                f" --port={_RAY_PORT}",
                f"# there, and ray start --address=FIRST:{_RAY_PORT} on the others",
            ]
        return usage
    # Replicas are numbered machine by machine.
    others = f"--headless --data-parallel-start-rank $(( $3 * {replicas} ))"
    return [
        f"# sh vllm.sh MODEL FIRST NUMBER, on each of {plan.machines} machines: a folder, or a name"
        " on the hub;",
        "# the address of the first machine; the number of this one, from 0",
        "others=",
        f'[ "${{3:?the number of this machine}}" -eq 0 ] || others="{others}"',
    ]


def _arguments_of_machines(plan: EnginePlan) -> dict[str, object]:
    """Return the arguments of a plan on several machines."""
    if plan.machines == 1:
        return {}
    if replicas := _local_replicas(plan):
        return {
            "data-parallel-size-local": replicas,
            "data-parallel-address": '"${2:?the address of the first machine}"',
            "data-parallel-rpc-port": _RPC_PORT,
        }
    over_replicas = {"data-parallel-backend": "ray"} if plan.data_parallel > 1 else {}
    return {"distributed-executor-backend": "ray", **over_replicas}


def _refuse_unsupported(plan: EnginePlan) -> None:
    if plan.sequence_parallel:
        raise SpecError("its sequence parallelism is a compiler pass")
    if plan.context_parallel > 1:
        raise SpecError("its context parallelism splits a cache, not a pass")
    if plan.cache == "int8":
        raise SpecError("it has no KV cache in int8 with one scale per tensor; use kv_cache=fp8")
    if plan.expert_parallel > 1:
        all_devices = plan.tensor_parallel * plan.data_parallel
        if plan.expert_parallel != all_devices:
            raise SpecError(f"it spreads experts over all of its replicas, {all_devices} devices")
    if plan.weights == "nf4" and plan.architecture in VLLM_WITHOUT_BITSANDBYTES:
        raise SpecError(
            f"its loader for bitsandbytes, which nf4 needs, does not support {plan.architecture}"
        )
    if plan.weights in _ON_LOADING and not plan.has_shipped_format:
        raise SpecError(f"it quantizes to {plan.weights} on loading, all modules in the same way")
    _, group_size = _ON_LOADING.get(plan.weights, ("", plan.group_size))
    if plan.group_size != group_size:
        groups = f"in groups of {group_size}" if group_size else "without groups"
        raise SpecError(f"it quantizes to {plan.weights} on loading, {groups}")


def _memory_share(plan: EnginePlan) -> float:
    """Return the share of each device's memory that vLLM is to use.

    vLLM does not start if this is more than is free once its process has a context, or if weights,
    activations and the cache of one text need more.

    Raises:
        SpecError: if the plan needs more than vLLM can be given.

    """
    most = floor(plan.free_share * 1e4) / 1e4
    if plan.needed_share > most:
        raise SpecError(
            f"the plan needs {plan.needed_share:.2%} of a device's memory besides the context, and"
            f" it can be given {most:.2%}"
        )
    return min(most, max(_USUAL_SHARE, ceil(plan.needed_share * 100) / 100))


def _arguments(plan: EnginePlan) -> dict[str, object]:
    arguments: dict[str, object] = {
        "tensor-parallel-size": plan.tensor_parallel,
        "pipeline-parallel-size": plan.stages.count,
        "dtype": plan.dtype,
        "max-num-seqs": plan.batch_size,
        "gpu-memory-utilization": _memory_share(plan),
    }
    if plan.data_parallel > 1:
        arguments["data-parallel-size"] = plan.data_parallel
    if plan.expert_parallel > 1:
        arguments["enable-expert-parallel"] = ""
    if plan.tokens:
        arguments["max-model-len"] = plan.tokens
    if plan.prefill_tokens:
        # At least a token of each text, as vLLM demands.
        arguments["max-num-batched-tokens"] = max(plan.prefill_tokens, plan.batch_size)
    if plan.weights in _ON_LOADING:
        arguments["quantization"], _ = _ON_LOADING[plan.weights]
    if plan.cache == "fp8":
        arguments["kv-cache-dtype"] = "fp8"
    return arguments

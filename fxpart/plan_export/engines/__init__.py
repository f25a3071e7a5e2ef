"""Export plans as configuration files of engines: degrees, stages, batches, checkpointing.

Each engine has a function from `EnginePlan` to text, which refuses plans that the engine cannot
run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fxpart.errors import SpecError
from fxpart.plan_export.engines.accelerate_fsdp import accelerate_yaml
from fxpart.plan_export.engines.architectures import LLAMA_CPP, VLLM
from fxpart.plan_export.engines.deepspeed import deepspeed_json
from fxpart.plan_export.engines.llama_cpp import llama_cpp_command
from fxpart.plan_export.engines.megatron import megatron_arguments
from fxpart.plan_export.engines.plan import EnginePlan, Stages, hosted_stages_of, stages_of
from fxpart.plan_export.engines.torchtitan import torchtitan_toml
from fxpart.plan_export.engines.vllm import vllm_command

__all__ = [
    "ENGINES",
    "HOSTING",
    "Engine",
    "EngineFiles",
    "EnginePlan",
    "Stages",
    "engine_files",
    "hosted_stages_of",
    "serves",
    "stages_of",
]


@dataclass(frozen=True, slots=True)
class Engine:
    """A tool that runs a plan from its own configuration file."""

    name: str
    file: str
    trains: bool
    """Whether it is for training rather than serving."""
    texts_only: bool
    """Whether it supports only causal language models."""
    pipelines: bool
    """Whether it supports pipeline parallelism."""
    write: Callable[[EnginePlan], str]
    """Returns the file's text. Raises `SpecError` with a short reason."""
    hosts: bool = False
    """Whether the host can compute some layers."""
    models: frozenset[str] | None = None
    """Architectures that it is known to have; None if `write` checks the model."""


HOSTING = Engine(
    "llama.cpp", "llama_cpp.sh", False, True, True, llama_cpp_command, hosts=True, models=LLAMA_CPP
)
ENGINES = (
    Engine("torchtitan", "torchtitan.toml", True, True, True, torchtitan_toml),
    Engine("accelerate", "accelerate.yaml", True, False, False, accelerate_yaml),
    Engine("DeepSpeed", "deepspeed.json", True, False, False, deepspeed_json),
    Engine("Megatron-LM", "megatron_args.txt", True, True, True, megatron_arguments),
    Engine("vLLM", "vllm.sh", False, True, True, vllm_command, models=VLLM),
    HOSTING,
)


_SERVED = ("GPT2LMHeadModel",)
"""Causal language models by other names, which the engines for serving know."""


@dataclass(frozen=True, slots=True)
class EngineFiles:
    """The files of a plan."""

    texts: Mapping[Engine, str]
    refusals: Mapping[Engine, str]
    """Short reasons why other engines have none."""


def serves(architecture: str | None) -> bool:
    """Return whether a transformers class is a causal language model."""
    name = architecture or ""
    return name.endswith("ForCausalLM") or name in _SERVED


def engine_files(plan: EnginePlan) -> EngineFiles:
    """Return the files of all suitable engines; training on one device needs none."""
    candidates = [engine for engine in ENGINES if engine.trains == plan.training]
    if plan.megatron:
        candidates = [engine for engine in candidates if engine.write is megatron_arguments]
    if plan.stages.hosted or plan.stages.hosts_output:
        candidates = [engine for engine in candidates if engine.hosts]
    name = plan.architecture or ""
    is_text = name.endswith("ForCausalLM") if plan.training else serves(name)
    texts, refusals = dict[Engine, str](), dict[Engine, str]()
    for engine in candidates:
        suits = engine.pipelines or plan.stages.count == 1
        if (engine.texts_only and not is_text) or not suits:
            continue
        if plan.training and plan.devices == 1:
            continue
        if engine.models is not None and name not in engine.models:
            refusals[engine] = f"{name} is not in fxpart's list of its models"
            continue
        if not plan.training and plan.stages.ranks < plan.stages.count:
            refusals[engine] = "it gives each stage a device of its own"
            continue
        if plan.recomputes_some:
            refusals[engine] = "its recomputed layers are chosen in code"
            continue
        if engine.write is not torchtitan_toml and (reason := _needs_torchtitan(plan)):
            refusals[engine] = reason
            continue
        try:
            texts[engine] = engine.write(plan)
        except SpecError as error:
            refusals[engine] = str(error)
    return EngineFiles(texts, refusals)


def _needs_torchtitan(plan: EnginePlan) -> str:
    """Return why no file but torchtitan's can express the plan; empty if others may."""
    if plan.float8 != "none":
        return "its file has no float8 layers of torchao"
    if plan.async_tensor_parallel:
        return "its file has no asynchronous tensor parallelism of torch"
    if plan.loss_parallel:
        return "its file has no loss_parallel of torch"
    if plan.reduce_dtype not in (None, plan.dtype):
        return "fxpart writes no dtype for summing gradients into its file"
    return ""

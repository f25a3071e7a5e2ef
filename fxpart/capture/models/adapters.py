"""Add peft's adapters to a model for fine-tuning that trains only them."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpart.errors import SpecError, nearest_names, one_line

__all__ = ["add_adapters"]

_OF_TENSOR = "ParamWrapper"
"""peft's class for an adapter of a tensor that is not the weight of a layer."""


def add_adapters(module: nn.Module, lora: Mapping[str, Any]) -> None:
    """Add peft's low-rank adapters to linear layers of `module`, and freeze all other weights.

    Uses `peft.inject_adapter_in_model`, so modules keep their paths.

    Args:
        module: the model, changed in place.
        lora: ``rank``, ``alpha``, ``dropout``, and ``targets``, names of layers: empty for peft's
            defaults for the architecture, or ``all-linear``. Unless ``autocast_adapter_dtype`` is
            False, adapters of a 16-bit model are in float32, as with `peft.get_peft_model`.

    Raises:
        SpecError: if peft is not installed, the rank exceeds the width of every layer, a layer does
            not exist or takes no adapter, or a weight belongs to no layer, such as one tensor with
            the weights of all experts.

    """
    try:
        import peft
    except ImportError as error:
        raise SpecError(
            "finetune=lora takes the adapters of peft, which is not installed;"
            " pip install 'fxpart[peft]', or set finetune=none"
        ) from error
    targets = lora["targets"] or None
    named = f"[{','.join(targets)}]" if targets else "those that peft knows"
    setting = f"finetune=lora with finetune.targets={named} and finetune.rank={lora['rank']}"
    widest = max((max(p.shape) for p in module.parameters() if p.dim() > 1), default=0)
    if lora["rank"] > widest:  # peft would allocate weights of any size on the host
        raise SpecError(
            f"{setting}: no layer of {type(module).__name__} is wider than {widest}; set a lower"
            " rank"
        )
    if targets and targets != ["all-linear"]:
        _check_targets(module, targets)
    try:
        # peft corrects what it warns of (gpt2's transposed layers), or it is refused below.
        with warnings.catch_warnings(action="ignore"):
            config = peft.LoraConfig(
                r=lora["rank"],
                lora_alpha=lora["alpha"],
                lora_dropout=lora["dropout"],
                target_modules="all-linear" if targets == ["all-linear"] else targets,
            )
            peft.inject_adapter_in_model(config, module)
    except (ValueError, TypeError) as error:
        why, advice = one_line(error), _advice(module)
        if targets is None and "target_modules" in why:
            why = f"peft knows no layers of {type(module).__name__}; {advice}"
        elif "is not supported" in why:
            why = f"peft has no adapters for modules of such a kind; {advice}"
        raise SpecError(f"{setting}: {why}") from error
    _check_layers(module, setting)
    if lora.get("autocast_adapter_dtype", True):
        _in_float32(module)


def _advice(module: nn.Module) -> str:
    """Return the advice to name layers, with the names of two that the module has most often."""
    names = Counter(
        path.rpartition(".")[2]
        for path, child in module.named_modules()
        if type(child) is nn.Linear
    )
    shown = [name for name, _ in names.most_common() if not name.isdigit()][:2]
    return f"name layers, such as finetune.targets=[{','.join(shown) or 'all-linear'}]"


def _check_targets(module: nn.Module, targets: Sequence[str]) -> None:
    """Refuse a name of no layer, which peft ignores among other names."""
    paths = [path for path, _ in module.named_modules() if path]
    linear = {
        path.rpartition(".")[2]
        for path, child in module.named_modules()
        if not isinstance(child, nn.Embedding)
        and isinstance(weight := getattr(child, "weight", None), Tensor)
        and weight.dim() > 1
    }
    for target in targets:
        if not any(path == target or path.endswith(f".{target}") for path in paths):
            raise SpecError(
                f"finetune.targets has {target}, which is no layer of {type(module).__name__};"
                f" {nearest_names(target, linear)}"
            )


def _check_layers(module: nn.Module, setting: str) -> None:
    """Refuse adapters of experts' tensors, which cannot be exported in a training step."""
    for name, child in module.named_modules():
        if type(child).__name__ == _OF_TENSOR:
            raise SpecError(
                f"{setting}: weights of {name} belong to experts or their router, not to a linear "
                f"layer, and adapters for them are not supported; {_advice(module)}"
            )


def _in_float32(module: nn.Module) -> None:
    """Cast trainable 16-bit weights to float32; peft omits this when it only injects adapters."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()

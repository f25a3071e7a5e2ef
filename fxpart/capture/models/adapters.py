"""Adapters of peft in a model that is fine-tuned: only they are trained."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fxpart.errors import SpecError, one_line

__all__ = ["add_adapters"]

_NAME_LAYERS = "name layers, such as finetune.targets=[q_proj,v_proj]"
_OF_TENSOR = "ParamWrapper"
"""What peft calls an adapter beside a tensor that belongs to no layer of its own."""


def add_adapters(module: nn.Module, lora: Mapping[str, Any]) -> None:
    """Put peft's low-rank adapters beside linear layers of `module`, and freeze all else.

    That is `peft.inject_adapter_in_model`: modules keep their paths. Adapters of a model of 16 bits
    are in float32, as `peft.get_peft_model` makes them.

    Args:
        module: changed in place.
        lora: ``rank``, ``alpha``, ``dropout``, and ``targets``, names of layers: none for those
            that peft knows of the architecture, or ``all-linear``.

    Raises:
        SpecError: without peft, for a rank above the width of every layer, for layers that are not
            there or take no adapter, and for weights that are no layer's, such as those of all
            experts in one tensor.

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
    asked = f"finetune=lora with finetune.targets={named} and finetune.rank={lora['rank']}"
    widest = max((max(p.shape) for p in module.parameters() if p.dim() > 1), default=0)
    if lora["rank"] > widest:  # peft would make weights of any size, in the host's memory
        raise SpecError(
            f"{asked}: no layer of {type(module).__name__} is wider than {widest}; set a lower rank"
        )
    try:
        # What peft warns of, it sets right (gpt2's transposed layers), or it is refused below.
        with warnings.catch_warnings(action="ignore"):
            config = peft.LoraConfig(
                r=lora["rank"],
                lora_alpha=lora["alpha"],
                lora_dropout=lora["dropout"],
                target_modules="all-linear" if targets == ["all-linear"] else targets,
            )
            peft.inject_adapter_in_model(config, module)
    except (ValueError, TypeError) as error:
        why = one_line(error)
        if targets is None and "target_modules" in why:
            why = f"peft knows no layers of {type(module).__name__}; {_NAME_LAYERS}"
        raise SpecError(f"{asked}: {why}") from error
    _check_layers(module, asked)
    _in_float32(module)


def _check_layers(module: nn.Module, asked: str) -> None:
    """Refuse adapters beside tensors of experts, which an export of the step does not take."""
    for name, child in module.named_modules():
        if type(child).__name__ == _OF_TENSOR:
            raise SpecError(
                f"{asked}: weights of {name} belong to experts or their router, not to a linear "
                f"layer, and adapters for them are not supported; {_NAME_LAYERS}"
            )


def _in_float32(module: nn.Module) -> None:
    """Cast what is trained of 16 bits, as peft does but where adapters are merely injected."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()

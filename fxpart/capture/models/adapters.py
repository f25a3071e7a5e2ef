"""Adapters of peft in a model that is fine-tuned: only they are trained."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fxpart.errors import SpecError, one_line

__all__ = ["add_adapters"]


def add_adapters(module: nn.Module, lora: Mapping[str, Any]) -> None:
    """Put peft's low-rank adapters beside linear layers of `module`, and freeze all else.

    That is `peft.inject_adapter_in_model`: modules keep their paths. Adapters of a model of 16 bits
    are in float32, as `peft.get_peft_model` makes them.

    Args:
        module: changed in place.
        lora: ``rank``, ``alpha``, ``dropout``, and ``targets``, names of layers: none for those
            that peft knows of the architecture, or ``all-linear``.

    Raises:
        SpecError: without peft, and for layers that are not there or take no adapter.

    """
    try:
        import peft
    except ImportError as error:
        raise SpecError(
            "finetune=lora takes the adapters of peft, which is not installed;"
            " pip install 'fxpart[peft]', or set finetune=none"
        ) from error
    targets = lora["targets"] or None
    try:
        config = peft.LoraConfig(
            r=lora["rank"],
            lora_alpha=lora["alpha"],
            lora_dropout=lora["dropout"],
            target_modules="all-linear" if targets == ["all-linear"] else targets,
        )
        peft.inject_adapter_in_model(config, module)
        _in_float32(module)
    except (ValueError, TypeError) as error:
        raise SpecError(
            f"finetune=lora with finetune.targets={targets or 'those that peft knows'} and"
            f" finetune.rank={lora['rank']}: {one_line(error)}"
        ) from error


def _in_float32(module: nn.Module) -> None:
    """Cast what is trained of 16 bits, as peft does but where adapters are merely injected."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()

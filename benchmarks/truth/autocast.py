"""GPT-2 as `torch.autocast` of CUDA runs it: weights in float32, casts where autocast has them.

Where there is no GPU, `torch.autocast("cuda")` does nothing, and that of the CPU keeps other
operators in float32. What CUDA's does is here for the operators of GPT-2 (torch's page "Automatic
Mixed Precision package", CUDA Ops that can autocast): products in bfloat16; softmax, norms, powers
and losses in float32. All others take the wider of what they read.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

__all__ = ["gpt2"]

_IN_16_BITS = ("addmm", "bmm", "linear", "matmul", "mm", "scaled_dot_product_attention")
_IN_FLOAT32 = ("cross_entropy", "layer_norm", "log_softmax", "nll_loss", "pow", "softmax", "sum")


class _Autocast(TorchFunctionMode):
    """Casts what functions of torch read, by their names."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what a function returns is anything
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name in (*_IN_16_BITS, *_IN_FLOAT32):
            dtype = torch.bfloat16 if name in _IN_16_BITS else torch.float32
            args, kwargs = tree_map(lambda leaf: _cast(leaf, dtype), (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)


def _cast(leaf: object, dtype: torch.dtype) -> object:
    is_number = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(dtype) if isinstance(leaf, Tensor) and is_number else leaf


class _Step(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        with _Autocast():
            loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


def gpt2(
    batch_size: int, dtype: torch.dtype, seq_len: int, **_: object
) -> tuple[nn.Module, tuple[Tensor]]:
    """Return GPT-2 of 124M parameters that computes its loss under autocast, and its tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings: dict[str, Any] = {"attn_implementation": "eager"}
    settings.update((f"{kind}_pdrop", 0.0) for kind in ("resid", "embd", "attn"))
    config = GPT2Config(**settings)
    tokens = torch.zeros(batch_size, seq_len, dtype=torch.int64)
    model: nn.Module = GPT2LMHeadModel(config)
    return _Step(model.to(dtype)), (tokens,)

"""On meta, results of attention have the layout that they have in a run."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpart.capture.calls import storage_key
from fxpart.capture.inference.export import export_program


def _by_tokens(x: Tensor) -> Tensor:
    return x.view(2, 8, 4, 16).transpose(1, 2)


def _by_heads(x: Tensor) -> Tensor:
    return x.view(2, 4, 8, 16)


def _matrices(x: Tensor) -> Tensor:
    return x.view(2, 64, 8).transpose(1, 2)


class _Attention(nn.Module):
    """Returns attention with heads and tokens swapped, contiguous and as rows of tokens."""

    def __init__(
        self, heads: Callable[[Tensor], Tensor], dropout: float = 0.0, *, masked: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.masked = heads, dropout, masked

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query = self.heads(x)
        mask = x.new_zeros(8, 8) if self.masked else None
        result = functional.scaled_dot_product_attention(
            query, query, query, mask, dropout_p=self.dropout
        )
        swapped = result.transpose(1, 2)
        return swapped, swapped.contiguous(), (swapped * 2).reshape(2, -1)


_CASES = {
    "by tokens": (_Attention(_by_tokens), True),
    "masked": (_Attention(_by_tokens, masked=True), True),
    "by heads": (_Attention(_by_heads), False),
    # Computed by its definition.
    "matrices": (_Attention(_matrices), False),
    "dropout": (_Attention(_by_tokens, 0.5), False),
}


@pytest.mark.parametrize("name", _CASES)
def test_contiguous_copies_as_in_a_run(name: str) -> None:
    module, shares = _CASES[name]
    swapped, contiguous, rows = module(torch.randn(2, 8, 64))
    assert (storage_key(swapped) == storage_key(contiguous)) is shares
    program = export_program(module, (torch.randn(2, 8, 64, device="meta"),))
    results = [node.meta["val"] for node in program.graph.output_node().args[0]]
    assert [r.stride() for r in results] == [r.stride() for r in (swapped, contiguous, rows)]
    assert (storage_key(results[0]) == storage_key(results[1])) is shares


def test_calls_on_a_changed_layout_are_changed_too() -> None:
    class Doubled(_Attention):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            doubled = super().forward(x)[0] * 2
            return doubled, doubled.flatten(1)

    program = export_program(Doubled(_by_tokens), (torch.randn(2, 8, 64, device="meta"),))
    doubled, rows = (node.meta["val"] for node in program.graph.output_node().args[0])
    assert doubled.is_contiguous()
    assert storage_key(doubled) == storage_key(rows)

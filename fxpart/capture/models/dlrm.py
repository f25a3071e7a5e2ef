"""DLRM, the recommendation model of MLPerf: large embedding tables and small dense layers.

Naumov et al.: Deep Learning Recommendation Model for Personalization and Recommendation Systems,
2019, arXiv:1906.00091. Sizes are those of MLPerf Training v0.7 to v2.1 and MLPerf Inference, for
the Criteo Terabyte Click Logs.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from fxpart.errors import SpecError

__all__ = ["CRITEO_ROWS", "DLRM", "dlrm"]

CRITEO_ROWS = (
    39_884_406, 39_043, 17_289, 7_420, 20_263, 3, 7_120, 1_543, 63, 38_532_951, 2_953_546,
    403_346, 10, 2_208, 11_938, 155, 4, 976, 14, 39_979_771, 25_641_295, 39_664_984, 585_935,
    12_972, 108, 36,
)  # fmt: skip
"""Rows of each categorical feature's table, indices taken modulo 40 million (MLPerf's
``--max-ind-range=40000000``)."""

_DENSE_FEATURES = 13


def _mlp(widths: Sequence[int], last: nn.Module) -> nn.Sequential:
    """Return linear layers of these widths, with ReLU between them and `last` at the end."""
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1], last)


class DLRM(nn.Module):
    """Bottom MLP over dense features, a bag of embeddings for each table, dot products, top MLP.

    With T tables of width `dim`, the first layer of the top MLP takes ``dim + T(T+1)/2`` numbers:
    the bottom MLP's output and the dot product of every pair among it and the T embeddings.
    """

    interaction_rows: Tensor
    interaction_columns: Tensor

    def __init__(
        self, rows: Sequence[int], dim: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        self.bottom = _mlp([_DENSE_FEATURES, *bottom, dim], nn.ReLU())
        self.tables = nn.ModuleList([nn.EmbeddingBag(count, dim, mode="sum") for count in rows])
        vectors = len(rows) + 1
        pairs = vectors * (vectors - 1) // 2
        self.top = _mlp([dim + pairs, *top, 1], nn.Sigmoid())
        below = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("interaction_rows", below[0].clone(), persistent=False)
        self.register_buffer("interaction_columns", below[1].clone(), persistent=False)

    def forward(self, dense: Tensor, indices: list[Tensor]) -> Tensor:
        """Return click probabilities (B, 1).

        `dense` is (B, 13); `indices` has one int64 tensor (B, P) per table: the P rows to sum for
        each example.
        """
        bottom = self.bottom(dense)
        vectors = [bottom]
        for number, table in enumerate(self.tables):
            vectors.append(table(indices[number]))
        stacked = torch.stack(vectors, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        pairs = products[:, self.interaction_rows, self.interaction_columns]
        top: Tensor = self.top(torch.cat([bottom, pairs], dim=1))
        return top


def dlrm(
    batch_size: int,
    dtype: torch.dtype,
    *,
    embedding_dim: int = 128,
    pooling: int = 1,
    rows: Sequence[int] = CRITEO_ROWS,
    max_rows: int = 40_000_000,
    bottom: Sequence[int] = (512, 256),
    top: Sequence[int] = (1024, 1024, 512, 256),
) -> tuple[DLRM, tuple[Tensor, list[Tensor]]]:
    """Return the model in `dtype` and its inputs ``(dense, indices)``, on the default device.

    `rows` has one entry per table, capped at `max_rows`; the defaults are MLPerf's: 26 tables,
    24.0e9 parameters. `bottom` and `top` are the widths of the hidden layers. The inputs are dense
    (B, 13) in `dtype`, normally distributed, and for each table indices (B, `pooling`) int64,
    uniformly distributed over its rows.

    Raises:
        SpecError: if a size is below 1 or there are no tables.

    """
    sizes = [embedding_dim, pooling, max_rows, *rows, *bottom, *top]
    if not rows or min(sizes) < 1:
        raise SpecError(
            f"dlrm: every size must be 1 or more and rows not empty, got {len(rows)} tables and"
            f" a smallest size of {min(sizes)}"
        )
    capped = [min(count, max_rows) for count in rows]
    model = DLRM(capped, embedding_dim, bottom, top).to(dtype)
    dense = torch.randn(batch_size, _DENSE_FEATURES, dtype=dtype)
    indices = [torch.randint(count, (batch_size, pooling)) for count in capped]
    return model, (dense, indices)

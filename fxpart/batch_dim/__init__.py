"""Which dimension of each value is the batch, and where it can be shared over processes."""

from fxpart.batch_dim.analyze import analyze_batch_dims, input_batch_dims
from fxpart.batch_dim.analyzer import BatchDimAnalyzer
from fxpart.batch_dim.error import BatchDimError
from fxpart.batch_dim.layout import Layout
from fxpart.batch_dim.report import BatchDimReport, NodeBatchDim, value_batch_dims

__all__ = [
    "BatchDimAnalyzer",
    "BatchDimError",
    "BatchDimReport",
    "Layout",
    "NodeBatchDim",
    "analyze_batch_dims",
    "input_batch_dims",
    "value_batch_dims",
]

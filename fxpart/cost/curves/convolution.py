"""Convolutions as products of matrices, with the layout changes around them: `ConvolutionCurve`."""

from dataclasses import dataclass

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.curves.gemm import GemmCurve, Products, Rates

__all__ = ["ConvolutionCurve"]


@dataclass(frozen=True, slots=True)
class ConvolutionCurve(GemmCurve):
    """Performance of a library of convolutions on one family of devices.

    Rows of the product are positions of the result, columns are its channels (implicit GEMM:
    Chetlur et al., cuDNN: efficient primitives for deep learning, 2014, arXiv:1410.0759). Kernels
    read channels last, so torch's layout, channels first, is changed before and after, except for
    kernels of one pixel, which are plain products.
    """

    layout_share: float
    """Share of the memory bandwidth that changes of layout reach."""
    gradient_work: float
    """Time of the gradient of the input or of the weight, relative to the forward."""

    def convolution_seconds(
        self, products: Products, layout_bytes: IntArray, rates: Rates
    ) -> FloatArray:
        """Return the time of each forward; `layout_bytes` are moved to change layouts."""
        seconds = self.seconds(products, rates)
        launches_s = np.where(layout_bytes > 0, 2 * self.launch_s, 0.0)
        layout_s: FloatArray = launches_s + layout_bytes / (rates.bytes_per_s * self.layout_share)
        return seconds + layout_s

"""Convolutions as products of matrices, with the layout changes around them: `ConvolutionCurve`."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray
from fxpart.cost.curves.gemm import GemmCurve, Products, Rates

__all__ = ["ConvolutionCurve", "Convolutions", "layout_elements"]

_NEAR = 0.01
"""Relative tolerance of equal sizes: those in bytes are exact, those of storages are not."""


class Convolutions(NamedTuple):
    """Convolutions as products; all arrays have the same length."""

    products: Products
    """Rows are positions of the result, columns are its channels (implicit GEMM: Chetlur et al.,
    cuDNN: efficient primitives for deep learning, 2014, arXiv:1410.0759)."""
    layout_bytes: FloatArray
    """Bytes read and written to change the layouts of input and result."""
    reads_input: npt.NDArray[np.bool_]
    """Whether it reads the model's input, such as a picture, which has few channels."""


@dataclass(frozen=True, slots=True)
class ConvolutionCurve(GemmCurve):
    """Performance of a library of convolutions on one family of devices.

    Kernels read channels last, so torch's layout, channels first, is changed before and after,
    except where a convolution is a plain product (`layout_elements`).
    """

    layout_share: float
    """Share of the memory bandwidth that changes of layout reach."""
    input_share: float
    """Share of the peak in float32 that convolutions of the model's input reach, in any dtype."""
    gradient_work: float
    """Time of the gradient of the input or of the weight, relative to the forward."""

    def forward_seconds(
        self, calls: Convolutions, rates: Rates, float32_flops_per_s: float
    ) -> FloatArray:
        """Return the time of each forward; `rates` are of the dtype of the computation."""
        products = calls.products
        launches_s = np.where(calls.layout_bytes > 0, 2 * self.launch_s, 0.0)
        layout_s = launches_s + calls.layout_bytes / (rates.bytes_per_s * self.layout_share)
        seconds: FloatArray = self.seconds(products, rates) + layout_s
        flops = 2 * products.batch * products.m * products.n * products.k
        of_input_s = flops / (self.input_share * float32_flops_per_s)
        return np.where(calls.reads_input, np.maximum(seconds, of_input_s), seconds)


def layout_elements(m: float, n: float, k: float, inputs: float, *, reads_input: bool) -> float:
    """Return the elements read and written to change the layouts of input and result.

    None if each element of the input is in one row, as with kernels of one pixel; so it is with
    patches, but they read the model's input, whose layout is changed.
    """
    if not inputs or (not reads_input and abs(m * k - inputs) <= _NEAR * inputs):
        return 0.0
    return 2 * (inputs + m * n)

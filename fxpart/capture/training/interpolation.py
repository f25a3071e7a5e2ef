"""Calls of `torch.nn.functional.interpolate` in a training step with symbolic sizes.

torch takes sizes as numbers in two places, which would fix symbolic ones: the call with factors is
composed in C++ of the one with sizes, and most backwards compute their result's shape in C++.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import SymInt, Tensor
from torch._decomp import meta_table
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch.library import Library

__all__ = ["CALLS", "resized", "symbolic_interpolation"]

_WITH_FACTORS = re.compile(r"aten\._?upsample_\w+\.vec")
CALLS = (
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
"""The operators of `interpolate`, each with a backward of its name and ``_backward``."""
_CONTIGUOUS = re.compile(r"bicubic|nearest(_exact)?3d")
"""Those whose backward returns a contiguous gradient; others keep the layout that they are given
(aten/src/ATen/native/UpSample*.cpp)."""


def resized(target: object, args: Sequence[Any]) -> tuple[OpOverload, tuple[Any, ...]] | None:
    """Return the call with sizes, and its arguments, for one with factors; None for any other."""
    if not isinstance(target, OpOverload) or not _WITH_FACTORS.fullmatch(str(target)):
        return None
    int_of: Any = torch.sym_int
    images, sizes, *corners, factors = args
    if sizes is None:
        spatial = images.shape[2:]
        sizes = [int_of(n * factor) for n, factor in zip(spatial, factors, strict=True)]
    scales = factors or [None] * len(sizes)
    return target.overloadpacket.default, (images, sizes, *corners, *scales)


@contextmanager
def symbolic_interpolation() -> Iterator[None]:
    """Meanwhile, compute the shapes of results in Python where torch does it in C++."""
    results: dict[OpOverload, Callable[..., Tensor]] = {}
    for name in CALLS:
        backward = _contiguous_gradient if _CONTIGUOUS.search(name) else _gradient
        results[getattr(torch.ops.aten, name).default] = _images
        results[getattr(torch.ops.aten, f"{name}_backward").default] = backward
    results = {call: result for call, result in results.items() if call not in meta_table}
    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for call, result in results.items():
            library.impl(call, result, "Meta")
        with patch.dict(meta_table, results):
            yield
    finally:
        library._destroy()


def _images(images: Tensor, sizes: Sequence[int | SymInt], *_: Any) -> Tensor:  # noqa: ANN401
    return _empty(images, (*images.shape[:2], *sizes), suggest_memory_format(images))


def _gradient(
    gradient: Tensor,
    _sizes: Sequence[int | SymInt],
    input_sizes: Sequence[int | SymInt],
    *_: Any,  # noqa: ANN401
) -> Tensor:
    return _empty(gradient, input_sizes, suggest_memory_format(gradient))


def _contiguous_gradient(
    gradient: Tensor,
    _sizes: Sequence[int | SymInt],
    input_sizes: Sequence[int | SymInt],
    *_: Any,  # noqa: ANN401
) -> Tensor:
    return _empty(gradient, input_sizes, torch.contiguous_format)


def _empty(like: Tensor, shape: Sequence[int | SymInt], layout: torch.memory_format) -> Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=layout)

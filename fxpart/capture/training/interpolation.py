"""Calls of `torch.nn.functional.interpolate` in a training step with symbolic sizes.

torch takes sizes as numbers in two places, which would fix symbolic ones: the call with factors is
composed in C++ of the one with sizes, and most backwards compute their result's shape in C++.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._decomp import meta_table
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch.library import Library

__all__ = ["allow_symbolic_sizes", "resized"]

_WITH_FACTORS = re.compile(r"aten\._?upsample_\w+\.vec")
_CALLS = (
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
_libraries: list[Library] = []
"""Kept, since registrations end with their library."""


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


@cache
def allow_symbolic_sizes() -> None:
    """Give torch the shapes of results that it computes in C++, as it does for other calls."""
    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    forwards = dict.fromkeys(_CALLS, _like_result)
    backwards = {f"{name}_backward": _like_input for name in _CALLS}
    for name, result in (forwards | backwards).items():
        call = getattr(torch.ops.aten, name).default
        if call not in meta_table:
            library.impl(call, result, "Meta")
            meta_table[call] = result


def _like_result(images: Tensor, sizes: Sequence[int | SymInt], *_: Any) -> Tensor:  # noqa: ANN401
    return _empty(images, (*images.shape[:2], *sizes))


def _like_input(
    gradient: Tensor,
    _sizes: Sequence[int | SymInt],
    input_sizes: Sequence[int | SymInt],
    *_: Any,  # noqa: ANN401
) -> Tensor:
    return _empty(gradient, input_sizes)


def _empty(like: Tensor, shape: Sequence[int | SymInt]) -> Tensor:
    return torch.empty(
        tuple(shape),
        dtype=like.dtype,
        device=like.device,
        memory_format=suggest_memory_format(like),
    )

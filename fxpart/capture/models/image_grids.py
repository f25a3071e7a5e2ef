"""Images given as rows of patches with a grid of their numbers: ``grid_thw``, ``spatial_shapes``.

The vision models of Qwen-VL, GLM-V and others take the patches of all images in one tensor, and
their time, height and width in patches in another, whose values determine shapes. SigLIP 2 has one
row of patches for each image, and their height and width. These grids are bound to the model before
the capture and become part of it, like the configuration.
"""

import inspect
import math
from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from fxpart.capture.models.shape_request import PLACEHOLDERS, documented_shape

__all__ = [
    "GRIDS",
    "given_grids",
    "grid_values",
    "has_grid",
    "has_row_per_image",
    "patch_sizes",
    "with_grids",
]

_SPATIAL_SHAPES = "spatial_shapes"
GRIDS = ("grid_thw", "image_grid_thw", _SPATIAL_SHAPES)
"""Names of inputs with the numbers of patches of images."""
_GIVEN = "fxpart_grids"
"""Attribute of a `forward` created by `with_grids`."""
_SIDE = 448
"""Side of an image in pixels, if the configuration states none."""


def has_grid(model: nn.Module) -> bool:
    """Return whether `model` needs a grid to read its images."""
    parameters = inspect.signature(model.forward).parameters
    required = (n in parameters and parameters[n].default is inspect.Parameter.empty for n in GRIDS)
    return any(required) or has_row_per_image(model)


def has_row_per_image(model: nn.Module) -> bool:
    """Return whether each image has a row of patches of its own (SigLIP 2), not all share one.

    A model that inserts images into its text, such as LFM2-VL, runs without them.
    """
    config, parameters = model.config, inspect.signature(model.forward).parameters
    return _SPATIAL_SHAPES in parameters and not any(hasattr(config, name) for name in PLACEHOLDERS)


def _setting(model: Any, names: tuple[str, ...], otherwise: int) -> int:  # noqa: ANN401 - untyped
    config = getattr(model.config, "vision_config", model.config)
    values = [getattr(config, name, None) for name in names]
    return next((value for value in values if type(value) is int), otherwise)


def _grid(model: Any) -> tuple[int, int, int]:  # noqa: ANN401
    """Return the patches of an image in time, height and width: multiples of the merged windows."""
    patch = _setting(model, ("patch_size",), 14)
    merged = _setting(model, ("spatial_merge_size", "merge_size"), 1)
    side = _setting(model, ("image_size",), _SIDE) // (patch * merged) * merged
    return 1, max(side, merged), max(side, merged)


def patch_sizes(model: nn.Module, batch_size: int) -> tuple[int, ...]:
    """Return the shape of the patches, with one image per sequence.

    It is (patches, values), the values being those that the first layer reads at once; (patches,
    channels, height, width) if that is a convolution and the model does not document rows; or
    (images, patches, values) for SigLIP 2.
    """
    if has_row_per_image(model):
        values = _setting(model, ("num_channels",), 3) * _setting(model, ("patch_size",), 16) ** 2
        return batch_size, _patches_on_a_side(model) ** 2, values
    time, height, width = _grid(model)
    first = next(m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.Conv3d))
    patch = first.weight[0]
    are_rows = len(documented_shape("pixel_values", model)) == 2
    is_picture = isinstance(first, nn.Conv2d) and not are_rows
    sizes = patch.shape if is_picture else (patch.numel(),)
    return batch_size * time * height * width, *sizes


def grid_values(model: nn.Module, batch_size: int) -> dict[str, list[list[int]]]:
    """Return the grids that `model` requires, by name, with a row for each image."""
    if not has_grid(model):
        return {}
    if has_row_per_image(model):
        return {_SPATIAL_SHAPES: [[_patches_on_a_side(model)] * 2] * batch_size}
    parameters = inspect.signature(model.forward).parameters
    return {name: [list(_grid(model))] * batch_size for name in GRIDS if name in parameters}


def _patches_on_a_side(model: nn.Module) -> int:
    return math.isqrt(_setting(model, ("num_patches",), 256))


def given_grids(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the grids bound to `model` by `with_grids`."""
    names: tuple[str, ...] = getattr(model.forward, _GIVEN, ())
    return names


def with_grids(model: nn.Module, grids: Mapping[str, list[list[int]]]) -> None:
    """Bind `grids` to all later calls of `model`, on the device of its parameters."""
    forward = model.forward
    place = next(model.parameters()).device

    @wraps(forward)
    def forward_with_grids(*args: object, **kwargs: object) -> object:
        tensors: dict[str, Tensor] = {
            name: torch.tensor(rows, device=place) for name, rows in grids.items()
        }
        return forward(*args, **{**tensors, **kwargs})

    vars(forward_with_grids)[_GIVEN] = tuple(grids)
    # The signature then no longer shows the grids as inputs.
    signature = inspect.signature(forward)
    remaining = [p for name, p in signature.parameters.items() if name not in grids]
    vars(forward_with_grids)["__signature__"] = signature.replace(parameters=remaining)
    model.forward = forward_with_grids

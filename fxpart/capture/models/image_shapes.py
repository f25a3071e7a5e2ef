"""Shapes of images and videos, whole or cut into patches."""

import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpart.capture.models.shape_request import (
    IMAGE,
    Request,
    Shape,
    documented_shape,
    is_one_of,
    listed,
    part_setting,
    unknown,
)

__all__ = [
    "flattened_shape",
    "hidden_patches",
    "hidden_patches_shape",
    "high_res_shape",
    "pixel_shape",
    "pixels",
]

_DEFAULT_IMAGE_SIZE = 224
_DEFAULT_FRAMES = 16
_HIDDEN_SHARE = 0.9
"""Share of the patches of a video that pre-training hides (VideoMAE, arXiv:2203.12602)."""
_LINE_HEIGHT = 48
"""Pixels of an image of one line of text, which PaddleOCR's recognition models reduce to a row."""
_IMAGE_SIZES = ("image_size", "img_size", "input_size", "crop_size", "max_img_size")


def pixels(request: Request) -> tuple[int, ...]:
    """Return the channels, height and width of the images that the model is made for."""
    config = request.model.config
    channels = part_setting(config, ("num_channels", "in_channels", "in_chans"), IMAGE)
    size = part_setting(config, _IMAGE_SIZES, IMAGE)
    match size:
        case Mapping():
            height, width = size.get("height", 0), size.get("width", 0)
        case [height, width, *_]:
            pass
        case [side]:
            height = width = side
        case int():
            height = width = size
        case _:
            height = width = 0
    channels = channels if type(channels) is int else 3
    window = _window(config)
    if type(request.model).__name__.endswith("ForTextRecognition") and not height:
        height = _LINE_HEIGHT
    if "prompt_pixel_values" in inspect.signature(request.model.forward).parameters:
        height //= 2  # SegGPT puts the prompt above the image
    if least := _least_side(config):
        height, width = (max(side, least) for side in (height, width))
    sides = (int(side or _DEFAULT_IMAGE_SIZE) for side in (height, width))
    height, width = (max(side // window, 1) * window for side in sides)
    return channels, height, width


def _window(config: Any) -> int:  # noqa: ANN401
    """Return the number of pixels that image sides must be a multiple of; 1 without windows."""
    windows = part_setting(config, ("num_windows",), IMAGE)
    patch = part_setting(config, ("patch_size",), IMAGE)
    return windows * patch if type(windows) is int and type(patch) is int else 1


def _least_side(config: Any) -> int:  # noqa: ANN401
    """Return the side of the smallest image that the model accepts, 0 if it states none."""
    patch: Any = part_setting(config, ("patch_size",), IMAGE)
    ratios: Any = part_setting(config, ("scaled_images_ratios",), IMAGE)
    if ratios:  # DepthPro: the smallest of its scaled copies has one patch
        least: int = math.ceil(config.patch_size / min(ratios))
        return least
    queries = part_setting(config, ("projector_patch_to_query_dict",), IMAGE)
    # Aria: the possible numbers of patches, as keys.
    return int(patch * math.isqrt(min(map(int, queries)))) if queries else 0


def _frames(request: Request, otherwise: int) -> int:
    """Return the configured number of frames of a video, else `otherwise`."""
    names = ("num_frames", "frames_per_clip", "n_frames")
    frames = part_setting(request.model.config, names, IMAGE)
    return frames if type(frames) is int else otherwise


def pixel_shape(name: str, request: Request) -> Shape:
    """Return the shape of images, of several for each sequence, or of a video."""
    modalities = getattr(request.model, "input_modalities", ())
    has_images = "image" in modalities and "text" in modalities
    is_video = name.endswith("_videos") or ("video" in modalities and "image" not in modalities)
    if (rows := _patch_rows(request)) is not None:
        return rows
    # X-CLIP's classifies videos by text, and has layers that join their frames.
    joins_frames = part_setting(request.model.config, ("mit_hidden_size",), IMAGE)
    has_frames = joins_frames is not None or not has_images
    frames = _frames(request, _DEFAULT_FRAMES if is_video else 0) if has_frames else 0
    name_of_task = type(request.model).__name__.removesuffix("Model") + "ForKeypointMatching"
    if name_of_task in listed("KEYPOINT_MATCHING") or is_one_of(request, "KEYPOINT_MATCHING"):
        # compares two images
        frames = 2
    images = (frames,) if frames else (1,) * (len(documented_shape(name, request.model)) - 4)
    return Shape((request.batch_size, *images, *pixels(request)))


def _patch_rows(request: Request) -> Shape | None:
    """Return the shape of images that were cut into rows of patches, or None for whole images.

    The layer that reads such images is linear, as large as a patch, and nothing cuts before it.
    """
    channels, height, width = pixels(request)
    patch = part_setting(request.model.config, ("patch_size",), IMAGE)
    modules = dict(request.model.named_modules())
    if type(patch) is not int or any(isinstance(m, nn.Unfold) for m in modules.values()):
        return None
    values = channels * patch**2
    for path, module in modules.items():
        if (
            isinstance(module, nn.Linear)
            and module.in_features == values
            and re.search(r"patch_embed|vision_embed", path)
        ):
            patches = (height // patch) * (width // patch)
            words = documented_shape("pixel_values", request.model.base_model)
            if words[:1] == ["num_patches"]:
                return Shape((request.batch_size * patches, values))
            return Shape((request.batch_size, patches, values))
    return None


def high_res_shape(name: str, request: Request) -> Shape:
    """Return the shape of the larger of two images, from the part of the configuration for it."""
    config = part_setting(
        request.model.config, (name.replace("pixel_values", "vision_config"),), ()
    )
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    if type(size) is not int:
        raise unknown(name, request)
    return Shape((request.batch_size, channels, size, size))


def flattened_shape(name: str, request: Request) -> Shape:
    """Return the shape of Pix2Struct's patches, each of them after its row and its column."""
    config = request.model.config
    patches = part_setting(config, ("seq_len",), IMAGE)
    values = part_setting(config, ("patch_embed_hidden_size",), IMAGE)
    if type(patches) is not int or type(values) is not int:
        raise unknown(name, request)
    return Shape((request.batch_size, patches, 2 + values))


def hidden_patches_shape(name: str, request: Request) -> Shape:
    """Return the shape of the mask of a video's patches, which are cut in space and in time."""
    config = request.model.config
    patch = part_setting(config, ("patch_size",), IMAGE)
    tubelet = part_setting(config, ("tubelet_size",), IMAGE)
    if type(patch) is not int or type(tubelet) is not int:
        raise unknown(name, request)
    _, height, width = pixels(request)
    frames = _frames(request, _DEFAULT_FRAMES)
    patches = (frames // tubelet) * (height // patch) * (width // patch)
    return Shape((request.batch_size, patches), is_real=False, is_mask=True)


def hidden_patches(like: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Return a mask shaped like `like` that hides the same number of patches in every row.

    Their number determines sizes inside the model, and all captures and runs have the same.
    """
    rows, patches = like.shape
    is_hidden = torch.arange(patches, device=device) < round(_HIDDEN_SHARE * patches)
    return is_hidden.expand(rows, patches).clone()

"""Denoisers of diffusers by their classes."""

from typing import Any

import pytest
import torch

from fxpart.capture.api import capture_graph
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec, library_spec
from fxpart.errors import SpecError
from runner.experiment.model_spec import model_spec
from tests.capture.models.test_presets import DENOISERS
from tests.runner.composed import read

pytest.importorskip("diffusers")

_SMALL_FLUX = {
    "num_layers": 1,
    "num_single_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "axes_dims_rope": [4, 6, 6],
    "joint_attention_dim": 24,
    "pooled_projection_dim": 20,
    "guidance_embeds": True,
    "image_size": 64,
}


def _spec(
    architecture: str, config: dict[str, object], batch_size: int = 1, seq_len: int | None = None
) -> ModelSpec:
    source = library_spec("diffusers", architecture, config)
    return ModelSpec("m", batch_size=batch_size, seq_len=seq_len, **source)


@pytest.mark.parametrize("name", DENOISERS)
def test_a_preset_has_the_published_number_of_parameters_on_meta(name: str) -> None:
    built = build_model(model_spec(read(f"model={name}")))
    parameters = list(built.module.parameters())
    assert sum(parameter.numel() for parameter in parameters) == DENOISERS[name]
    assert {(p.dtype, p.device.type) for p in parameters} == {(torch.bfloat16, "meta")}


def test_a_small_model_gets_what_its_pipeline_passes_and_is_captured() -> None:
    built = build_model(_spec("FluxTransformer2DModel", _SMALL_FLUX, batch_size=3, seq_len=7))
    shapes = {name: tuple(v.shape) for name, v in built.kwargs.items() if torch.is_tensor(v)}
    # 8 x 8 latents, of which a token has 2 x 2.
    assert shapes == {
        "hidden_states": (3, 16, 64),
        "encoder_hidden_states": (3, 7, 24),
        "pooled_projections": (3, 20),
        "timestep": (3,),
        "img_ids": (16, 3),
        "txt_ids": (7, 3),
        "guidance": (3,),
    }
    graph = capture_graph(built.module, built.args, built.kwargs)
    attention = ["scaled_dot_product" in target for target in graph.targets]
    # Two products of every head, in each of two layers, over the tokens of text and image.
    assert graph.flops[attention].tolist() == [2 * 3 * 2 * 2 * (16 + 7) ** 2 * 16] * 2


def test_a_unet_gets_the_sizes_of_sdxl() -> None:
    config: dict[str, object] = {
        "block_out_channels": [32, 64],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        "attention_head_dim": 8,
        "cross_attention_dim": 24,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 68,
        "image_size": 64,
    }
    built = build_model(_spec("UNet2DConditionModel", config, batch_size=2, seq_len=5))
    added: Any = built.kwargs["added_cond_kwargs"]
    assert {name: tuple(value.shape) for name, value in added.items()} == {
        "text_embeds": (2, 68 - 6 * 8),
        "time_ids": (2, 6),
    }
    assert built.module(*built.args, **built.kwargs)[0].shape == (2, 4, 8, 8)


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("PixArtTransformer2DModel", {}, "inputs of diffusers' PixArtTransformer2DModel are not"),
        ("FluxTransformer2DModel", {"colour": 1}, r"config\.colour is not a setting of Flux"),
        ("FluxTransformer2DModel", {"image_size": 100}, "image_size=100 must be a positive"),
        ("FluxTransformer2DModel", {"num_layers": "many"}, "diffusers cannot make FluxTransf"),
    ],
)
def test_what_is_not_known_is_refused(
    architecture: str, config: dict[str, object], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        build_model(_spec(architecture, config))

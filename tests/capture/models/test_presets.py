"""The models of ``conf/model``: published sizes, known names, and graphs that can be captured."""

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from fxpart.capture.inference.export import export_program
from fxpart.capture.models.build import BuiltModel, build_model
from fxpart.capture.models.spec import ModelSpec
from tests.execution.small_presets import SMALL_PRESETS

FOLDER = Path(__file__).parents[3] / "conf" / "model"

# Weights of the published checkpoints, tied ones once. DLRM: 187,767,399 rows of 128, and 2,368,897
# in the two multilayer perceptrons.
PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama3_70b": 70_553_706_496,
    "mixtral_8x7b": 46_702_792_704,
    "gpt2": 124_439_808,
    "gpt2_xl": 1_557_611_200,
    "bert_large": 335_174_458,
    "t5_large": 737_668_096,
    "vit_large": 304_326_632,
    "resnet50": 25_557_032,
    "whisper_small": 241_734_912,
    "dlrm": 187_767_399 * 128 + 171_392 + 2_197_505,
}
# Served models, of architectures that tests/capture/models/test_cached_step.py captures or
# other presets have. gemma3_27b without its vision tower; deepseek_v3 without the head for a
# second token, and without the 58 x 256 biases of its routers, which are buffers.
SERVED = {
    "llama3_1_8b": 8_030_261_248,
    "qwen3_8b": 8_190_735_360,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "gemma3_27b": 27_009_346_304,
    "mistral_small": 23_572_403_200,
    "deepseek_v3": 671_026_419_200 - 58 * 256,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "phi4": 14_659_507_200,
    "whisper_large": 1_543_490_560,
}
# Denoisers of image generators. sd3_5_large without its table of positions, which is a buffer.
DENOISERS = {"flux_dev": 11_901_408_320, "sd3_5_large": 8_056_627_520}
TEMPLATES = {
    "custom": "factory",
    "diffusers": "architecture",
    "timm": "architecture",
    "transformers": "architecture",
}
FIELDS = ["name", "library", "architecture", "config", "factory", "factory_args"]
FIELDS += ["batch_size", "seq_len", "dtype"]

# Settings that make each model shallow; widths and inputs stay.
SHALLOW: dict[str, dict[str, Any]] = {
    "llama2_7b": {"num_hidden_layers": 1},
    "llama2_13b": {"num_hidden_layers": 1},
    "llama3_70b": {"num_hidden_layers": 1},
    "mixtral_8x7b": {"num_hidden_layers": 1},
    "gpt2": {"n_layer": 1},
    "gpt2_xl": {"n_layer": 1},
    "bert_large": {"num_hidden_layers": 1},
    "t5_large": {"num_layers": 1},
    "vit_large": {"num_hidden_layers": 1},
    "resnet50": {"depths": [1, 1, 1, 1]},
    "whisper_small": {"encoder_layers": 1, "decoder_layers": 1},
    "dlrm": {},
}


def preset(name: str) -> dict[str, Any]:
    fields = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"))
    assert isinstance(fields, dict)
    return {str(key): value for key, value in fields.items()}


def built(name: str, **config: object) -> BuiltModel:
    fields = preset(name)
    return build_model(ModelSpec(**{**fields, "config": {**fields.get("config", {}), **config}}))


def test_every_preset_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {
        *PARAMETERS,
        *SERVED,
        *DENOISERS,
        *TEMPLATES,
        "workload",
    }, "name it in PARAMETERS and SHALLOW and in small_presets.py, or in SERVED: CONTRIBUTING.md"
    assert PARAMETERS.keys() == SHALLOW.keys() == SMALL_PRESETS.keys()


@pytest.mark.parametrize("name", [*PARAMETERS, *SERVED, *DENOISERS, *TEMPLATES])
def test_presets_have_the_same_keys_and_state_their_source(name: str) -> None:
    # In the same order; values equal to the schema's default are omitted.
    assert list(preset(name)) == [field for field in FIELDS if field in preset(name)]
    assert {"name", "batch_size", "dtype"} <= preset(name).keys()
    text = (FOLDER / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    assert name in TEMPLATES or "as published in" in " ".join(text.replace("#", " ").split())


@pytest.mark.parametrize("name", [*PARAMETERS, *SERVED])
def test_a_preset_has_the_published_number_of_parameters_and_no_memory(name: str) -> None:
    model = built(name)
    parameters = list(model.module.parameters())
    assert sum(parameter.numel() for parameter in parameters) == {**PARAMETERS, **SERVED}[name]
    assert {parameter.dtype for parameter in parameters} == {getattr(torch, preset(name)["dtype"])}
    tensors = [*parameters, *model.module.buffers(), *torch.utils._pytree.tree_leaves(model.args)]
    assert all(tensor.is_meta for tensor in [*tensors, *model.kwargs.values()])
    assert not model.module.training


@pytest.mark.parametrize("name", SHALLOW)
def test_a_shallow_preset_can_be_captured(name: str) -> None:
    model = built(name, **SHALLOW[name])
    program = export_program(model.module, model.args, model.kwargs)
    assert any(node.op == "call_function" for node in program.graph.nodes)


@pytest.mark.parametrize(("name", "missing"), TEMPLATES.items())
def test_a_template_lacks_one_setting_and_is_named_after_it(name: str, missing: str) -> None:
    template = OmegaConf.load(FOLDER / f"{name}.yaml")
    assert isinstance(template, DictConfig)
    assert OmegaConf.missing_keys(template) == {missing}
    assert template.name == name
    template[missing] = "given"
    assert template.name == "given"

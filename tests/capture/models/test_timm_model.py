"""Image models of timm by name."""

import pytest
import torch

from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec, library_spec
from fxpart.errors import SpecError
from runner.experiment.model_spec import model_spec
from tests.runner.composed import read


def test_the_command_names_a_model_of_timm() -> None:
    config = read("model=timm", "model.architecture=resnet18", "model.config.num_classes=10")
    spec = model_spec(config)
    assert spec.name == "resnet18"
    assert spec.factory == "fxpart.capture.models.timm_model:timm_model"
    assert spec.factory_args == {"architecture": "resnet18", "config": {"num_classes": 10}}
    with pytest.raises(SpecError, match=r"model\.library=tim is not known"):
        model_spec(read("model=timm", "model.architecture=resnet18", "model.library=tim"))


def test_a_model_has_images_of_its_size_on_meta() -> None:
    pytest.importorskip("timm")
    spec = library_spec("timm", "resnet18", {"num_classes": 10})
    built = build_model(ModelSpec("m", batch_size=3, dtype="bfloat16", **spec))
    assert built.args[0].shape == (3, 3, 224, 224)
    assert {p.dtype for p in built.module.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in built.module.parameters()} == {"meta"}
    assert built.module(*built.args).shape == (3, 10)


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("resnet5", {}, "timm has no model resnet5"),
        ("resnet18", {"colour": 1}, "timm cannot make resnet18 with {'colour': 1}"),
    ],
)
def test_unknown_models_and_settings_of_timm_are_refused(
    architecture: str, config: dict[str, object], message: str
) -> None:
    pytest.importorskip("timm")
    with pytest.raises(SpecError, match=message):
        build_model(ModelSpec("m", **library_spec("timm", architecture, config)))

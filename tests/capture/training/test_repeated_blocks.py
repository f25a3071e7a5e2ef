"""The repeated blocks of a model."""

import pytest
from torch import Tensor, nn

from fxpart.capture.models.build import build_model
from fxpart.capture.training.joint import repeated_blocks
from fxpart.errors import SpecError
from tests.execution.small_presets import SMALL_PRESETS


class _Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.ReLU())


class _Other(_Block):
    pass


class _Stage(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class _Own(nn.Module):
    """A layer without submodules, of a class of the model's own."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class _Dense(nn.ModuleDict):
    """A container that can be called, like a block of torchvision's DenseNet."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.values():
            x = layer(x)
        return x


_OF_LISTS = ("0.0", "0.1", "1.0", "1.1")


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Sequential(nn.Linear(2, 2), _Block(), _Block(), nn.Linear(2, 2)), ("1", "2")),
        (nn.ModuleList([_Block(), _Other(), _Block(), _Other()]), ("0", "1", "2", "3")),
        (nn.Sequential(_Own(), nn.ReLU(), _Own()), ("0", "2")),
        # The outermost are chosen.
        (nn.ModuleList([nn.Sequential(nn.ReLU(), _Block(), _Block()) for _ in range(2)]), "01"),
        # Stages are replaced by the blocks in them, also if a stage has only one block.
        (
            nn.ModuleList([_Stage(_Block()), _Stage(_Block(), _Block())]),
            ("0.layers.0", "1.layers.0", "1.layers.1"),
        ),
        # Lists of blocks cannot be called, so the blocks in them count.
        (nn.ModuleList([nn.ModuleList([_Block(), _Block()]) for _ in range(2)]), _OF_LISTS),
        (nn.Sequential(*(_Dense({"a": _Block(), "b": _Block()}) for _ in range(2))), "01"),
        # Two lists, one of them deep in a module that is no list.
        (
            nn.ModuleDict({"a": _Stage(_Block(), _Block()), "b": nn.Sequential(_Own(), _Own())}),
            ("a.layers.0", "a.layers.1", "b.0", "b.1"),
        ),
    ],
)
def test_small_trees_by_hand(module: nn.Module, expected: tuple[str, ...]) -> None:
    assert repeated_blocks(module) == tuple(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", ["transformer.h.0", "transformer.h.1"]),
        ("vit_large", ["vit.layers.0", "vit.layers.1"]),
        (
            "whisper_small",
            [f"model.{part}.layers.{i}" for part in ("encoder", "decoder") for i in range(2)],
        ),
        ("t5_large", [f"{part}.block.{i}" for part in ("encoder", "decoder") for i in range(2)]),
        ("resnet50", [f"resnet.encoder.stages.{i}.layers.0" for i in range(4)]),
    ],
)
def test_blocks_of_published_models(name: str, expected: list[str]) -> None:
    assert list(repeated_blocks(build_model(SMALL_PRESETS[name]).module)) == expected


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU()),
        nn.Sequential(_Block(), _Other()),
        nn.ModuleList([nn.ModuleDict({"a": _Block(), "b": _Other()}) for _ in range(2)]),
    ],
    ids=["one", "layers of torch", "unlike", "not called"],
)
def test_a_model_without_blocks_is_refused(module: nn.Module) -> None:
    with pytest.raises(SpecError, match=r"no repeated blocks in \w+: .*; set checkpointing=none"):
        repeated_blocks(module)

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from fxpart.errors import CacheError, CaptureError, SpecError
from fxpart.execution.stages.chain import Chain, chain_stages, tied_parameters
from fxpart.execution.stages.stage_files import (
    STAGES_FILE,
    TensorShape,
    load_stage,
    read_stages,
    save_stages,
)
from fxpart.torch_compat.split_module import split_module
from tests.execution.pipeline_scene import cut_chain, skips, skips_inputs


class Twice(nn.Module):
    """One weight three times: twice in the first stage, once in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.b.weight = self.a.weight
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(torch.tanh(self.b(self.a(x))))
        return y


@pytest.fixture(scope="module")
def chain() -> Chain:
    return skips()


@pytest.fixture(scope="module")
def saved(chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "stages"
    save_stages(chain, folder, skips_inputs(1)[0])
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of the saved stages that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "stages"))


def _copies(values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(value.clone() for value in values)


def test_loaded_stages_compute_the_same_bits(chain: Chain, saved: Path) -> None:
    of_loaded = of_stage = skips_inputs(3)[2]
    for stage in chain.stages:
        loaded = load_stage(saved, stage.index)
        assert (loaded.index, loaded.n_stages) == (stage.index, 3)
        assert tuple(shape.name for shape in loaded.inputs) == stage.inputs
        assert tuple(shape.name for shape in loaded.outputs) == stage.outputs
        of_loaded, of_stage = loaded.module(*_copies(of_loaded)), stage.module(*_copies(of_stage))
        assert len(of_loaded) == len(loaded.outputs)
        for a, b, shape in zip(of_loaded, of_stage, loaded.outputs, strict=True):
            assert torch.equal(a, b)
            assert (tuple(a.shape), str(a.dtype)) == (shape.shape, f"torch.{shape.dtype}")


def test_a_loaded_stage_runs_and_accepts_real_weights(chain: Chain, saved: Path) -> None:
    weights = {}
    for stage in chain.stages:
        for name, value in stage.module.state_dict().items():
            weights[name] = torch.full_like(value, 0.25)
    values = of_chain = skips_inputs(3)[2]
    for index, stage in enumerate(chain.stages):
        loaded = load_stage(saved, index).load_weights(weights)
        other = copy.deepcopy(stage.module)
        other.load_state_dict({name: weights[name] for name in other.state_dict()})
        values, of_chain = loaded(*_copies(values)), other(*_copies(of_chain))
        assert all(torch.equal(a, b) for a, b in zip(values, of_chain, strict=True))


def test_other_inputs_and_weights_are_refused_in_one_line(saved: Path) -> None:
    stage = load_stage(saved, 0)
    with pytest.raises(SpecError, match=r"stage 0 takes ids \(2, 5\), .* got shapes \(3, 5\);"):
        stage(torch.zeros(3, 5, dtype=torch.int64))
    with pytest.raises(SpecError, match=r"has embed.weight, which is not among the weights"):
        stage.load_weights({})
    before = stage.module.get_parameter("embed.weight").clone()
    other = {name: torch.zeros(1) for name in stage.module.state_dict()}
    with pytest.raises(SpecError, match=r"embed.weight of shape .* the weights have \(1,\)"):
        stage.load_weights(other)
    assert torch.equal(before, stage.module.get_parameter("embed.weight"))


def test_the_description_has_shapes_and_ties(saved: Path) -> None:
    stages = read_stages(saved)
    assert stages.stages[0].inputs == (
        TensorShape("ids", (2, 5), "int64", requires_grad=False),
        TensorShape("mask", (2, 5), "bool", requires_grad=False),
        TensorShape("scale", (), "float32", requires_grad=False),
    )
    # The first stage passes on its results, and the two inputs that others need.
    needs = {shape.name: shape.requires_grad for shape in stages.stages[1].inputs}
    computed = {"embed": True, "transpose": True, "flip": False}
    assert needs == {**computed, "mask": False, "scale": False}
    assert stages.tied == (((0, "embed.weight"), (2, "third.weight")),)
    assert load_stage(saved, 1).tied == load_stage(saved, 2).tied == stages.tied


def test_a_weight_tied_within_a_stage_is_tied_again_and_trains(tmp_path: Path) -> None:
    torch.manual_seed(0)
    chain = cut_chain(Twice(), ("tanh",))
    x = torch.randn(3, 4)
    save_stages(chain, tmp_path / "stages", (x,))
    names = (((0, "a.weight"), (0, "b.weight"), (1, "c.weight")),)
    assert tied_parameters(chain) == read_stages(tmp_path / "stages").tied == names
    loaded = load_stage(tmp_path / "stages", 0).module
    assert loaded.get_parameter("a.weight") is loaded.get_parameter("b.weight")
    assert len(list(loaded.parameters())) == 3
    original = chain.stages[0].module
    for module in (loaded, original):
        module(x)[0].sum().backward()
    for name, parameter in loaded.named_parameters():
        expected = original.get_parameter(name).grad
        assert parameter.grad is not None
        assert expected is not None
        assert torch.equal(parameter.grad, expected)


def test_frozen_weights_stay_frozen_and_buffers_buffers(saved: Path) -> None:
    module = load_stage(saved, 1).module
    frozen = {name: not p.requires_grad for name, p in module.named_parameters()}
    assert frozen == {"second.weight": False, "second.bias": True}
    assert [name for name, _ in load_stage(saved, 2).module.named_buffers()] == ["shift"]


def test_nothing_is_unpickled(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    for owner, name in ((torch, "load"), (pickle, "loads"), (pickle, "load")):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    assert load_stage(saved, 0).index == 0


def test_each_stage_is_read_alone(folder: Path) -> None:
    (folder / "stage_0.pt2").unlink()
    assert load_stage(folder, 1).index == 1


def test_stages_are_replaced_atomically(folder: Path) -> None:
    (folder / "stage_7.pt2").write_text("of another run")
    save_stages(skips(), folder, skips_inputs(1, batch=3)[0])
    assert sorted(path.name for path in folder.iterdir()) == [
        "stage_0.pt2",
        "stage_1.pt2",
        "stage_2.pt2",
        STAGES_FILE,
    ]
    assert read_stages(folder).stages[0].inputs[0].shape == (3, 5)
    assert [path.name for path in folder.parent.iterdir()] == ["stages"]


def test_a_failed_save_keeps_the_old_files(folder: Path) -> None:
    before = (folder / STAGES_FILE).read_bytes()
    with pytest.raises(SpecError, match=r"takes 3 tensors \(ids, mask, scale\), got 1"):
        save_stages(skips(), folder, skips_inputs(1)[0][:1])
    wrong = (torch.ones(2, 5), *skips_inputs(1)[0][1:])
    with pytest.raises(CaptureError, match="stage 0 cannot be written as a file"):
        save_stages(skips(), folder, wrong)
    assert (folder / STAGES_FILE).read_bytes() == before
    assert [path.name for path in folder.parent.iterdir()] == ["stages"]


def test_a_folder_with_other_files_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SpecError, match="holds something else"):
        save_stages(skips(), tmp_path, skips_inputs(1)[0])
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot write"):
        save_stages(skips(), tmp_path / "file" / "stages", skips_inputs(1)[0])


@pytest.mark.parametrize("index", [-1, 3])
def test_a_missing_stage_is_refused(saved: Path, index: int) -> None:
    with pytest.raises(SpecError, match=rf"no stage {index} in .*stages 0 to 2"):
        load_stage(saved, index)


def _missing_description(folder: Path) -> None:
    (folder / STAGES_FILE).unlink()


def _missing_archive(folder: Path) -> None:
    (folder / "stage_1.pt2").unlink()


def _cut_short(folder: Path) -> None:
    path = folder / "stage_1.pt2"
    path.write_bytes(path.read_bytes()[:-100])


def _one_bit(folder: Path) -> None:
    path = folder / "stage_1.pt2"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _changed(folder: Path, **fields: object) -> None:
    path = folder / STAGES_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_missing_description, "there is no file .*stages.json"),
        (_missing_archive, "there is no file .*stage_1.pt2; save the stages again"),
        (_cut_short, "stage_1.pt2 is damaged"),
        (_one_bit, "stage_1.pt2 is damaged"),
        (lambda folder: _changed(folder, version=2), "version 2, this fxpart reads up to 1"),
        (lambda folder: _changed(folder, schema="other"), "is not a fxpart.stages file"),
        (lambda folder: _changed(folder, stages=[{}]), r"is damaged \(no file\)"),
        (lambda folder: _changed(folder, stages=[]), "it has no stages"),
        (lambda folder: _changed(folder, tied=[[[9, "w"]]]), "a tied parameter in stage 9 of 3"),
    ],
)
def test_damaged_files_are_refused(
    folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)
    with pytest.raises(SpecError, match=message) as raised:
        load_stage(folder, 1)
    assert "\n" not in str(raised.value)


def test_a_file_elsewhere_is_not_read(folder: Path) -> None:
    entries = json.loads((folder / STAGES_FILE).read_text())["stages"]
    entries[1]["file"] = "../stage_1.pt2"
    _changed(folder, stages=entries)
    with pytest.raises(SpecError, match="is not in the folder"):
        load_stage(folder, 1)


def test_a_stage_that_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.sum()) > 0 else -x

    class Leafy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.branches = nn.Linear(4, 4), nn.ModuleList([Branches()])

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.branches[0](self.linear(x))
            return y

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Branches) or super().is_leaf_module(m, module_qualified_name)

    model = Leafy()
    traced = fx.GraphModule(model, Tracer().trace(model))
    chain = chain_stages(
        split_module(traced, model, lambda node: int("branches" in str(node.target)))
    )
    with pytest.raises(CaptureError, match="stage 1 cannot be written as a file") as raised:
        save_stages(chain, tmp_path / "stages", (torch.ones(2, 4),))
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []

import pytest
import torch
from torch import Tensor, nn

from fxpart.errors import CaptureError, SpecError
from fxpart.execution.stages.chain import chain_stages
from fxpart.torch_compat.pipeline.cut_points import generate_pipeline_partition
from tests.execution.stages.small_models import (
    WIDTH,
    Block,
    assert_same,
    assert_same_gradients,
    encoder_decoder,
)


def _stages(cut_after: list[str], layers: int = 2) -> list[list[str]]:
    """Return the modules called by each stage of the encoder and decoder."""
    model, inputs = encoder_decoder(layers)
    split = generate_pipeline_partition(model, cut_after)
    assert_same(split(*inputs), model(*inputs))
    return [
        [str(n.target) for n in child.graph.nodes if n.op == "call_module"]
        for _, child in split.named_children()
        if isinstance(child, torch.fx.GraphModule)
    ]


def test_cuts_at_blocks_and_stacks_give_four_stages() -> None:
    assert _stages(["enc.block.0", "enc", "dec.block.0"]) == [
        ["shared", "enc.block.0"],
        ["enc.block.1", "enc.norm"],
        ["dec.embed", "dec.block.0"],
        ["dec.block.1", "head"],
    ]


def test_without_the_cut_at_the_stack_the_second_stage_spans_both() -> None:
    assert _stages(["enc.block.0", "dec.block.0"]) == [
        ["shared", "enc.block.0"],
        ["enc.block.1", "enc.norm", "dec.embed", "dec.block.0"],
        ["dec.block.1", "head"],
    ]


def test_the_documented_examples_with_blocks_cut_in_half() -> None:
    both, three = (
        _stages(cuts, 24)
        for cuts in (["enc.block.11", "enc", "dec.block.11"], ["enc.block.11", "dec.block.11"])
    )
    assert [len(stage) for stage in both] == [13, 13, 13, 13]
    assert [len(stage) for stage in three] == [13, 26, 13]


def test_the_order_of_the_list_does_not_matter() -> None:
    assert _stages(["dec.block.0", "enc"]) == _stages(["enc", "dec.block.0"])


def test_modules_without_a_cut_stay_whole() -> None:
    assert _stages(["enc"]) == [["enc"], ["dec", "head"]]


def test_weights_stay_the_same_objects_under_their_own_paths() -> None:
    model, _ = encoder_decoder()
    split = generate_pipeline_partition(model, ["enc.block.0", "dec.block.0"])
    original = dict(model.named_parameters(remove_duplicate=False))
    paths: dict[str, str] = split.meta["qualname_map"]
    assert paths["submod_0.enc.block.0"] == "enc.block.0"
    named = list(split.named_parameters(remove_duplicate=False))
    assert {id(p) for _, p in named} == {id(p) for p in model.parameters()}
    for name, parameter in named:
        stage, _, path = name.partition(".")
        assert stage.startswith("submod_")
        assert original[path] is parameter


class Mixer(nn.Module):
    """Uses weights directly, a tuple, a shape, a default and a value from two stages before."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.register_buffer("shift", torch.arange(float(WIDTH)))
        self.first = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, power: int = 2) -> tuple[Tensor, dict[str, Tensor], None, Tensor]:
        out, last = self.first(x * self.scale)
        half = self.second(out + self.shift)
        full = self.third(half.reshape(x.size(0), -1, WIDTH)) ** power
        return full * self.scale, {"last": last, "again": full}, None, full


def test_weights_tuples_shapes_and_defaults_cross_cuts() -> None:
    torch.manual_seed(0)
    model, x = Mixer(), torch.randn(2, 3, WIDTH)
    split = generate_pipeline_partition(model, ["first", "second"])
    assert_same(split(x), model(x))
    assert_same(split(x, power=3), model(x, power=3))
    stages = [dict(child.named_parameters()) for child in split.children()]
    assert "scale" in stages[0]
    assert "scale" in stages[2]
    assert stages[0]["scale"] is model.scale
    assert dict(split.named_children())["submod_1"].shift is model.shift
    assert_same_gradients(model, split(x), model(x))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH)
        self.once = nn.Linear(WIDTH, WIDTH)
        self.never = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.again(self.once(self.again(x)))
        return out


@pytest.mark.parametrize(
    ("cut_after", "message"),
    [
        ([""], "is Twice itself"),
        (["Twice"], "is Twice itself"),
        ([], "at least one path"),
        (["onse"], "Twice has no module 'onse' to cut after; nearest: once"),
        (["once", "once"], "names once twice"),
        (["again"], "calls again 2 times"),
        (["never"], r"never calls never \(ModuleList\); cut after never.0"),
        (["never.0"], r"never calls never.0 \(Linear\); name a module that it calls"),
    ],
)
def test_invalid_cuts_are_refused(cut_after: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        generate_pipeline_partition(Twice(), cut_after)
    with pytest.raises(ValueError, match=message):
        generate_pipeline_partition(Twice(), cut_after)


def test_a_string_is_not_a_list_of_paths() -> None:
    with pytest.raises(SpecError, match=r"names no list of modules"):
        generate_pipeline_partition(Twice(), "once")


def test_a_stage_without_operators_is_refused() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    with pytest.raises(SpecError, match=r"2 cuts make 3 stages.*nothing after 1; leave out"):
        generate_pipeline_partition(model, ["0.0", "1"])
    with pytest.raises(SpecError, match=r"nothing between the ends of 0.1 and 0; leave out"):
        generate_pipeline_partition(model, ["0.1", "0"])


def test_a_module_that_cannot_be_traced_is_named() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError, match=r"1 \(Block\) cannot be traced.*such as after 1") as got:
        generate_pipeline_partition(model, ["1.linear"])
    assert "\n" not in str(got.value)
    x = torch.randn(2, WIDTH)
    assert_same(generate_pipeline_partition(model, ["1"])(x), model(x))


def test_an_untraceable_model_is_named_by_its_class() -> None:
    with pytest.raises(CaptureError, match=r"^Block cannot be traced, which a cut inside it needs"):
        generate_pipeline_partition(Block(), ["linear"])


def test_a_cut_in_a_module_of_two_names() -> None:
    shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    model = nn.ModuleDict({"a": shared, "b": shared})

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.parts["b"](x)
            return out

    outer, x = Outer(), torch.randn(2, WIDTH)
    split = generate_pipeline_partition(outer, ["parts.b.0"])
    assert len(chain_stages(split).stages) == 2
    assert_same(split(x), outer(x))

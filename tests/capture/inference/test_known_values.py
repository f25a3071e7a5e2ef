"""Models whose shapes depend on values: exported with the known values, as they run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from fxpart.capture.api import capture_graph
from fxpart.capture.inference.export import export_program
from fxpart.capture.inference.known_values import KnownValues
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.errors import CaptureError


class Windows(nn.Module):
    """Iterates over images as models of Qwen-VL do: their sizes are values of a small tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        grid = torch.tensor([[1, 4, 6], [1, 2, 2]])
        lengths = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0]).cumsum(0)
        columns = [torch.arange(h).unsqueeze(1).expand(-1, int(w)).flatten() for _, h, w in grid]
        position = torch.cat(columns)
        y = self.layer(x)
        if (position == 3).any():
            y = y * 2
        kept = torch.ones(28, dtype=torch.bool)
        kept[3:5] = False
        pieces = torch.split(y, grid.prod(-1).tolist())
        again = torch.repeat_interleave(y, position, dim=0)
        return y[position > 0], [piece.sum() for piece in pieces], y[kept], lengths, again


class Selecting(nn.Module):
    """Keeps the rows that its layer makes positive, by a mask that is known at first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.zeros(4, dtype=torch.bool)
        view = mask[:2]
        mask.copy_(self.layer(x).sum(1) > 0)
        return x[mask], x[:2][view]


def _sizes(program: torch.export.ExportedProgram) -> list[tuple[object, ...]]:
    results = program.graph.output_node().args[0]
    return [tuple(node.meta["val"].shape) for node in tree_leaves(results)]


class CopyingMany(nn.Module):
    """Writes the result of its layer to two known masks at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        masks = [torch.zeros(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)]
        positive = self.layer(x) > 0
        torch._foreach_copy_(masks, [positive[0], positive[1]])
        return x[masks[1]]


@pytest.mark.parametrize(("side", "times"), [(16, 2), (2**11, 1)])
def test_a_large_tensor_is_not_computed_during_the_export(side: int, times: int) -> None:
    created = []

    def ones(*sizes: int) -> Tensor:
        result = torch.ones(*sizes)
        created.append(isinstance(result, FakeTensor))
        return result

    KnownValues().__torch_function__(ones, (), (side, side))
    assert created.count(False) == times


def test_tensors_written_by_one_call_become_unknown() -> None:
    with pytest.raises(CaptureError, match="whose size depends on them"):
        capture_graph(CopyingMany(), (torch.zeros(4, 4),))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_sizes_from_known_values_are_numbers_and_results_equal_a_run(device: str) -> None:
    with torch.device(device):
        module, x = Windows(), torch.randn(28, 8)
    program = export_program(module, (x,))
    assert _sizes(program) == [(20, 8), (), (), (26, 8), (2,), (38, 8)]
    assert "forward" not in vars(module)
    if device == "cpu":
        exported, real = (tree_leaves(run(x)) for run in (program.module(), module))
        assert all(map(torch.equal, exported, real))


def test_results_of_a_layer_are_unknown() -> None:
    """The mask, and its view, no longer have the values of their creation."""
    program = export_program(Selecting(nn.Linear(8, 8)), (torch.randn(4, 8),))
    rows = [sizes[0] for sizes in _sizes(program)]
    assert [isinstance(count, torch.SymInt) for count in rows] == [True, True]
    with pytest.raises(CaptureError, match="whose size depends on them") as refused:
        capture_graph(Selecting(nn.Linear(8, 8)), (torch.randn(4, 8),))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        (
            "PLBartForSequenceClassification",
            {
                "encoder_layers": 1,
                "decoder_layers": 1,
                "d_model": 16,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "encoder_ffn_dim": 16,
                "decoder_ffn_dim": 16,
                "vocab_size": 2000,
            },
        ),
        (
            "Qwen3VLVisionModel",
            {
                "depth": 1,
                "hidden_size": 16,
                "num_heads": 2,
                "intermediate_size": 16,
                "out_hidden_size": 16,
                "patch_size": 112,
                "deepstack_visual_indexes": [0],
            },
        ),
    ],
)
def test_models_of_transformers_export_as_they_run(
    architecture: str, config: dict[str, Any]
) -> None:
    """Ends and separators of texts, and grids of patches, are the inputs of the model."""
    is_text = architecture != "Qwen3VLVisionModel"
    spec = ModelSpec(architecture, architecture, config=config, seq_len=16 if is_text else None)
    meta = build_model(spec)
    torch.manual_seed(0)
    real = build_model(spec, torch.device("cpu"))
    graph, program = (export_program(b.module, b.args, b.kwargs) for b in (meta, real))
    assert _sizes(graph) == _sizes(program)
    with torch.no_grad():
        expected = tree_leaves(dict(real.module(**real.kwargs)))
        exported = tree_leaves(dict(program.module()(**real.kwargs)))
    pairs = zip(exported, expected, strict=True)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs if isinstance(a, Tensor))


class _Counting(nn.Module):
    """Counts in place, and returns as many columns."""

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        return x[:, : int(count.item())]


def test_inputs_that_the_model_writes_stay_as_they_are() -> None:
    count = torch.tensor(2)
    program = export_program(_Counting(), (), {"x": torch.zeros(2, 5), "count": count})
    assert (2, 3) in _sizes(program)
    assert count.item() == 2

"""One capture with symbolic sizes against captures with static ones, number by number."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._decomp import meta_table
from torch.nn import functional

from fxpart.capture.api import capture_graph
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.models.symbolic_inputs import symbolic_inputs
from fxpart.capture.symbolic.api import symbolic_graph
from fxpart.capture.symbolic.dims import SymbolicDim
from fxpart.capture.training.interpolation import CALLS, symbolic_interpolation
from fxpart.capture.training.joint import joint_graph
from fxpart.core.graph import OpGraph
from fxpart.core.symbolic_graph import SymbolicGraph
from fxpart.cost.holding import live_bytes
from fxpart.cost.tables import memory_tables
from tests.execution.small_presets import SMALL_PRESETS

# One of each block.
_SHALLOW: dict[str, dict[str, object]] = {
    "gpt2": {"n_layer": 1},
    "resnet50": {"hidden_sizes": [8, 16], "depths": [1, 1]},
}


def _spec(name: str) -> ModelSpec:
    spec = SMALL_PRESETS[name]
    return replace(spec, config={**spec.config, **_SHALLOW.get(name, {})})


@cache
def _symbolic(name: str, phase: str, symbols: tuple[str, ...] = ("batch",)) -> SymbolicGraph:
    inputs = symbolic_inputs(_spec(name), symbols)
    built = inputs.built
    return symbolic_graph(
        built.module, built.args, built.kwargs, dims=inputs.dims, phase=phase, ranges=inputs.ranges
    )


def _static(spec: ModelSpec, phase: str) -> OpGraph:
    built = build_model(spec)
    if phase == "training":
        return joint_graph(built.module, built.args, built.kwargs)
    return capture_graph(built.module, built.args, built.kwargs)


def _peaks(graph: OpGraph, device_of_module: dict[str, int], devices: int) -> list[int]:
    """Return the peak bytes of inputs and live tensors on each device, by module."""
    tables = memory_tables(graph)
    device_of = np.array([device_of_module[path] for path in graph.modules], dtype=np.int64)
    return [int(live_bytes(tables, device_of, device).max()) for device in range(devices)]


def _assert_equal(ours: OpGraph, fresh: OpGraph) -> None:
    """Compare costs, storages, and peaks on one device and on three random ones by module."""
    for field in ("flops", "moved_bytes"):
        assert int(getattr(ours, field).sum()) == int(getattr(fresh, field).sum()), field
    storages = [np.sort(g.value_alloc_bytes[g.value_alloc_bytes > 0]) for g in (ours, fresh)]
    assert storages[0].tolist() == storages[1].tolist()
    assert ours.weight_names == fresh.weight_names
    paths = sorted({*ours.modules, *fresh.modules})
    placed = np.random.default_rng(0).integers(0, 3, len(paths)).tolist()
    for device_of in (dict.fromkeys(paths, 0), dict(zip(paths, placed, strict=True))):
        assert _peaks(ours, device_of, 3) == _peaks(fresh, device_of, 3)


@pytest.mark.parametrize(
    ("name", "batch"), [("gpt2", 1), ("gpt2", 64), ("llama3_70b", 3), ("resnet50", 3), ("dlrm", 1)]
)
def test_inference_equals_a_fresh_capture(name: str, batch: int) -> None:
    fresh = _static(replace(_spec(name), batch_size=batch), "inference")
    _assert_equal(_symbolic(name, "inference").at(batch=batch), fresh)


@pytest.mark.parametrize(("name", "batch"), [("gpt2", 2), ("resnet50", 64), ("dlrm", 1)])
def test_a_training_step_equals_a_fresh_capture(name: str, batch: int) -> None:
    fresh = _static(replace(_spec(name), batch_size=batch), "training")
    symbolic = _symbolic(name, "training")
    assert batch >= symbolic.exact_from[0]
    ours = symbolic.at(batch=batch)
    _assert_equal(ours, fresh)
    assert _partners(ours) == _partners(fresh)
    assert len(ours.gradient_values) == len(fresh.gradient_values) > 0


_INTERPOLATIONS = [
    ("nearest", 2, {}),
    ("nearest-exact", 3, {}),
    ("linear", 1, {"align_corners": True}),
    ("bilinear", 2, {}),
    ("bilinear", 2, {"antialias": True}),
    ("bicubic", 2, {}),
    ("trilinear", 3, {}),
]


@pytest.mark.parametrize(("mode", "dims", "options"), _INTERPOLATIONS)
@pytest.mark.parametrize("size", [{"scale_factor": 2.5}, {"size": 7}])
def test_interpolation_does_not_fix_the_batch(
    mode: str, dims: int, options: dict[str, bool], size: dict[str, Any]
) -> None:
    convolution = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1]
    resize = _Resize(mode=mode, **size, **options)
    module = nn.Sequential(convolution(3, 4, 1), resize, convolution(4, 2, 1))
    batch_4, batch_6 = (torch.randn(batch, 3, *[5] * dims) for batch in (4, 6))
    batch = SymbolicDim(0, 0, "batch")
    symbolic = symbolic_graph(module, (batch_4,), dims=[batch], phase="training")
    _assert_equal(symbolic.at(batch=6), joint_graph(module, (batch_6,)))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_shapes_and_layouts_of_interpolation_are_those_of_torch(
    name: str, layout: torch.memory_format
) -> None:
    dims = int(name.removesuffix("_aa")[-2])
    if layout is torch.channels_last and dims > 1:
        layout = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
    else:
        layout = torch.contiguous_format

    def layouts() -> list[object]:
        images, gradient = (
            torch.empty((2, 3, *[size] * dims), device="meta").to(memory_format=layout)
            for size in (4, 6)
        )
        corners = [] if "nearest" in name else [False]
        forward = getattr(torch.ops.aten, name)(images, [6] * dims, *corners)
        backward = getattr(torch.ops.aten, f"{name}_backward")
        back = backward(gradient, [6] * dims, list(images.shape), *corners)
        return [(result.shape, result.stride()) for result in (forward, back)]

    of_torch = layouts()
    with symbolic_interpolation():
        assert layouts() == of_torch
    assert torch.ops.aten.upsample_bilinear2d_backward.default not in meta_table


class _Resize(nn.Module):
    def __init__(self, **how: Any) -> None:  # noqa: ANN401
        super().__init__()
        self._how = how

    def forward(self, x: Tensor) -> Tensor:
        return functional.interpolate(x, **self._how)


def _partners(graph: OpGraph) -> list[tuple[str, str]]:
    """Return the target of each operator, and that of its forward operator."""
    called = [target.removesuffix(".default") for target in graph.targets]
    # A full-size view may be missing.
    return [
        (called[op], called[of])
        for op, of in enumerate(graph.forward_of.tolist())
        if called[op] != "aten.alias"
    ]


def test_sequences_grow_too() -> None:
    symbolic = _symbolic("gpt2", "inference", ("batch", "seq_len"))
    assert [1, 2] in symbolic.exponents.tolist()  # scores of all pairs of positions
    # Heads are swapped by views, which are the same for one position.
    assert symbolic.exact_from == (1, 1)
    for batch, length in ((1, 7), (64, 32), (3, 1)):
        spec = replace(_spec("gpt2"), batch_size=batch, seq_len=length)
        _assert_equal(symbolic.at(batch=batch, seq_len=length), _static(spec, "inference"))


def test_a_size_of_one_needs_no_sum_of_gradients() -> None:
    symbolic = _symbolic("gpt2", "training")
    assert symbolic.exact_from == (2,)
    fresh = _static(replace(_spec("gpt2"), batch_size=1), "training")
    ours = symbolic.at(batch=1)
    assert int(ours.flops.sum()) == int(fresh.flops.sum())
    everywhere = dict.fromkeys({*ours.modules, *fresh.modules}, 0)
    assert _peaks(ours, everywhere, 1) == _peaks(fresh, everywhere, 1)
    positions = SMALL_PRESETS["gpt2"].seq_len
    assert positions is not None
    # The gradient of the table of positions, summed over the one example.
    more = int(ours.value_alloc_bytes.sum()) - int(fresh.value_alloc_bytes.sum())
    assert more == positions * 32 * 4

"""Curves over shapes: known answers by hand, and scaling to other devices."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fxpart.capture.inference.export import export_program
from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.training.joint import joint_capture
from fxpart.core.graph import OpGraph
from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from fxpart.cost.curves.attention import AttentionCurve, Attentions, DecodeCurve
from fxpart.cost.curves.bandwidth import kind_of
from fxpart.cost.curves.convolution import ConvolutionCurve, Convolutions
from fxpart.cost.curves.family import family_from
from fxpart.cost.curves.gemm import GemmCurve, Products, Rates
from fxpart.cost.curves.model import KernelModel
from fxpart.cost.curves.shapes import shapes_of
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import SpecError
from tests.sketch import Sketch

GEMM = GemmCurve(
    launch_s=1.0,
    tile_s=0.0,
    compute_share=0.5,
    tile_area=1e-9,
    memory_share=0.5,
    tail=1.0,
    sharpness=200.0,
    reader_share=1e9,
    cache_share=1e9,
    split_s=0.0,
)
ATTENTION = AttentionCurve(
    launch_s=1.0,
    cache_launch_s=0.25,
    block_s=0.0,
    compute_share=0.5,
    half_size=1e-9,
    large_size=1e9,
    memory_share=1e-3,
    cache_share=1.0,
    sharpness=200.0,
    longest=1e-9,
    packs_groups=0.0,
)
DECODE = DecodeCurve(
    launch_s=1.0,
    cache_launch_s=0.25,
    memory_share=0.5,
    reader_share=1e9,
    sharpness=200.0,
    split_s=0.0,
    compute_share=1e9,
    head_s=0.0,
    group_s=0.0,
    copy_s=0.0,
    packs_groups=1.0,
)
RATES = Rates(flops_per_s=1e6, bytes_per_s=1e15, multiprocessors=4)


def _gemm_s(curve: GemmCurve, rates: Rates, m: int, n: int, k: int, **others: int) -> float:
    sizes = [np.array([float(size)]) for size in (others.get("batch", 1), m, n, k, 2, 2)]
    return float(curve.seconds(Products(*sizes), rates)[0])


def _call(**changed: float) -> Attentions:
    whole = Attentions(*(np.ones(1) for _ in Attentions._fields))
    sizes = {name: np.array([float(size)]) for name, size in changed.items()}
    return whole._replace(window=np.zeros(1), cache_bytes=np.zeros(1), **sizes)


def test_full_waves_compute_at_the_share_of_the_peak() -> None:
    # 4 multiprocessors, 4 tiles of 128 x 128, no split: 2 m n k at half of 10^6 per second.
    flops = 2 * 256 * 256 * 64
    assert _gemm_s(GEMM, RATES, 256, 256, 64) == pytest.approx(1 + flops / 5e5)
    assert _gemm_s(GEMM, RATES, 128, 128, 64, batch=4) == pytest.approx(1 + flops / 5e5)


def test_a_partial_wave_takes_as_long_as_a_full_one() -> None:
    # A fifth product starts a second wave of smaller tiles: 5 x 64 of 16 x 16 fill it.
    full = _gemm_s(GEMM, RATES, 128, 128, 64, batch=4) - 1
    more = _gemm_s(GEMM, RATES, 128, 128, 64, batch=5) - 1
    assert more == pytest.approx(full * 5 / 4)
    coarse = replace(GEMM, tile_area=1e9)  # only the largest tiles are efficient
    largest = _gemm_s(coarse, RATES, 256, 128, 64, batch=4) - 1
    assert _gemm_s(coarse, RATES, 256, 128, 64, batch=5) - 1 == pytest.approx(2 * largest, rel=1e-3)


def test_few_rows_are_bound_by_reading_the_weights() -> None:
    rates = Rates(flops_per_s=1e30, bytes_per_s=100.0, multiprocessors=4)
    moved = 2 * (64 + 64 * 32 + 32)
    assert _gemm_s(GEMM, rates, 1, 32, 64) == pytest.approx(1 + moved / 50)


def test_causal_attention_of_a_prompt_does_half_the_work() -> None:
    call = _call(queries=1280, keys=1280, heads=4, key_heads=4, head_size=64, element_bytes=2)
    # 40 blocks of 128 rows over 10 blocks of keys, at half of the peak; one launch less.
    work = 4 * 4 * 1280 * 64
    whole = ATTENTION.seconds(call._replace(causal=np.zeros(1)), RATES)[0]
    assert whole == pytest.approx(0.75 + work * (1280 + 64) / 5e5)
    causal = ATTENTION.seconds(call, RATES)[0]
    assert causal == pytest.approx(0.75 + work * (640 + 64 + 64) / 5e5)
    window = ATTENTION.seconds(call._replace(window=np.array([128.0])), RATES)[0]
    assert window == pytest.approx(0.75 + work * (128 * 0.95 + 64 + 64) / 5e5)


def test_a_token_reads_its_cache_once() -> None:
    rates = Rates(flops_per_s=1e6, bytes_per_s=100.0, multiprocessors=4)
    call = _call(keys=1024, heads=8, key_heads=2, head_size=64, element_bytes=2)
    cache_bytes, passed = 2 * 2 * 1024 * 64 * 2, 2 * 8 * 64 * 2
    assert DECODE.seconds(call, rates)[0] == pytest.approx(
        0.75 + (cache_bytes + passed) / 50, rel=1e-3
    )
    few_bits = call._replace(cache_bytes=np.ones(1))
    assert DECODE.seconds(few_bits, rates)[0] == pytest.approx(1 + (cache_bytes / 2 + passed) / 50)


@given(
    st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000), st.floats(0.1, 10), st.data()
)
def test_a_uniformly_faster_device_is_faster_by_the_same_factor(
    m: int, n: int, k: int, factor: float, data: st.DataObject
) -> None:
    share = data.draw(st.floats(0.3, 1.0))
    curve = replace(GEMM, launch_s=1e-6, tile_s=1e-7, compute_share=share, tile_area=900.0)
    rates = Rates(flops_per_s=1e14, bytes_per_s=1e12, multiprocessors=100)
    faster = Rates(factor * 1e14, factor * 1e12, 100)
    same = replace(curve, launch_s=1e-6 / factor, tile_s=1e-7 / factor)
    assert _gemm_s(same, faster, m, n, k) == pytest.approx(_gemm_s(curve, rates, m, n, k) / factor)


def _device(curves: str) -> DeviceSpec:
    return DeviceSpec("d", 10**9, {"float32": 1e6}, 1e6, multiprocessors=4, curves=curves)


def graph_of_a_product(dtype: str = "float32") -> OpGraph:
    """Return a product of 16 x 8 with 8 x 4, and an operator that only moves data."""
    element = 4 if dtype == "float32" else 2
    sketch = Sketch()
    x = sketch.input(128 * element)
    y = sketch.op([x], 64 * element, [sketch.weight(32 * element)], 2 * 16 * 4 * 8)
    graph = sketch.graph(sketch.op([y], 64 * element))
    return replace(graph, moved_bytes=np.array([896, 512]), dtypes=(dtype, dtype))


def test_devices_with_curves_use_them_and_others_the_roofline() -> None:
    roofline = LatencyModel(0.5, 0.5, 0.25)
    family = family_from("f", settings())
    graph = graph_of_a_product()
    topology = uniform_topology((_device("f"), _device(""), _device("f")), Link(1e9))
    times = KernelModel({"f": family}, roofline).op_time_s(graph, topology)
    plain = roofline.op_time_s(graph, topology)
    assert times[:, 1].tolist() == plain[:, 1].tolist()
    assert times[1].tolist() == plain[1].tolist()
    sizes = [np.array([float(size)]) for size in (1, 16, 4, 8, 4, 4)]
    expected = GEMM.seconds(Products(*sizes), Rates(1e6, 1e6, 4))[0]
    assert times[0, [0, 2]].tolist() == [expected, expected]
    assert expected != plain[0, 0]


def test_a_long_run_sustains_a_share_of_the_rate_of_a_single_product() -> None:
    topology = uniform_topology((_device("f"),), Link(1e9))
    times = [
        KernelModel(
            {"f": family_from("f", {**settings(), "float32_share": share})}, LatencyModel()
        ).op_time_s(graph_of_a_product(), topology)
        for share in (1.0, 0.5)
    ]
    sizes = [np.array([float(size)]) for size in (1, 16, 4, 8, 4, 4)]
    # Half of the compute rate; memory and non-products are as fast as before.
    assert times[1][0, 0] == GEMM.seconds(Products(*sizes), Rates(0.5e6, 1e6, 4))[0]
    assert times[1][0, 0] > times[0][0, 0]
    assert times[1][1, 0] == times[0][1, 0]
    # The same for a power limit, of which a product reaches its share.
    limit = {"float32": 0.5e6 * GEMM.compute_share}
    limited = replace(_device("f"), sustained_flops_per_s=limit)
    model = KernelModel({"f": family_from("f", settings())}, LatencyModel())
    both = uniform_topology((_device("f"), limited), Link(1e9))
    by_limit = model.op_time_s(graph_of_a_product(), both)
    assert by_limit[0].tolist() == [times[0][0, 0], times[1][0, 0]]
    plain = LatencyModel().op_time_s(graph_of_a_product(), both)
    assert plain[0, 1] == 2 * 16 * 4 * 8 / limit["float32"] > plain[0, 0]
    with pytest.raises(
        SpecError, match=r"latency\.curves\.f\.sustained_share must be at most 1, is 2"
    ):
        family_from("f", {**settings(), "sustained_share": 2})


def test_a_power_limit_is_for_tensor_cores_alone() -> None:
    topology = uniform_topology((_device("f"),), Link(1e9))
    limited = {**settings(), "sustained_share": 0.5}
    models = [
        KernelModel({"f": family_from("f", s)}, LatencyModel()) for s in (settings(), limited)
    ]
    for dtype, slower in (("float32", False), ("bfloat16", True)):
        free, held = (m.op_time_s(graph_of_a_product(dtype), topology)[0, 0] for m in models)
        assert (held > free) == slower


@pytest.mark.parametrize(("columns", "alignment"), [(7, 1), (10, 2), (12, 4), (16, 8), (24, 8)])
def test_products_with_unaligned_rows_are_slow(columns: int, alignment: int) -> None:
    """16 x 8 with 8 x `columns`; of the weight and the result, rows have `columns` elements."""
    sketch = Sketch()
    x = sketch.input(16 * 8 * 2)
    y = sketch.op([x], 16 * columns * 2, [sketch.weight(8 * columns * 2)], 2 * 16 * columns * 8)
    graph = replace(sketch.graph(y), dtypes=("bfloat16",))
    assert shapes_of(graph).product_alignment.tolist() == [alignment]
    topology = uniform_topology((_device("f"),), Link(1e9))
    slow = {**settings(), "unaligned_shares": {"odd": 1e-4, "twice_odd": 2e-4}}
    models = [KernelModel({"f": family_from("f", s)}, LatencyModel()) for s in (settings(), slow)]
    aligned, unaligned = (model.op_time_s(graph, topology)[0, 0] for model in models)
    share = {1: 1e-4, 2: 2e-4}.get(alignment)
    # A bfloat16 product of this device has the rate of float32.
    assert unaligned == (aligned if share is None else 2 * 16 * columns * 8 / (1e6 * share))
    padded = replace(models[1], is_compiled=True)
    assert padded.op_time_s(graph, topology)[0, 0] == aligned
    in_float32 = replace(graph, dtypes=("float32",))
    of_float32 = [model.op_time_s(in_float32, topology)[0, 0] for model in models]
    assert of_float32[0] == of_float32[1]


class _Head(nn.Module):
    """A linear layer of `width` results on `tokens` tokens of 64 numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(64, width, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.linear(x)
        return scores.float()


@pytest.mark.parametrize(("tokens", "width", "alignment"), [(591, 32, 8), (16, 33, 1), (16, 34, 2)])
def test_rows_are_as_long_as_layers_are_wide_not_as_many_as_tokens(
    tokens: int, width: int, alignment: int
) -> None:
    """Forward, and gradients of input and weight, the latter two through transposed operands."""
    module, x = (
        _Head(width).to("meta"),
        torch.zeros(tokens, 64, dtype=torch.bfloat16, device="meta"),
    )
    forward = op_graph(export_program(module, (x,), {}))
    step = joint_capture(module, (x.requires_grad_(),)).graph
    for graph in (forward, step):
        shapes = shapes_of(graph)
        assert len(shapes.product_ops) >= 1
        assert set(shapes.product_alignment.tolist()) == {alignment}


def test_scores_of_an_odd_number_of_tokens_are_unaligned() -> None:
    class Scores(nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return query @ key.transpose(-1, -2)

    query = torch.zeros(2, 197, 64, dtype=torch.bfloat16, device="meta")
    graph = op_graph(export_program(Scores(), (query, query.clone()), {}))
    assert shapes_of(graph).product_alignment.tolist() == [1]


@pytest.mark.parametrize(
    ("target", "is_convolution"),
    [
        ("aten.convolution.default", True),
        ("aten.convolution_backward.default", True),
        ("aten.conv2d.default", True),
        ("aten.conv_transpose1d.default", True),
        ("Conv2d", True),
        ("Conv1D", False),  # a linear layer of transformers
        ("aten.mm.default", False),
        ("prims.convert_element_type.default", False),
    ],
)
def test_convolutions_in_float32_take_the_rate_of_tf32(
    target: str, *, is_convolution: bool
) -> None:
    graph = replace(graph_of_a_product(), targets=(target, "aten.relu.default"))
    plain = replace(_device(""), flops_per_s={"float32": 1e3})
    fast = replace(plain, flops_per_s={"float32": 1e3, "tfloat32": 4e3})
    seconds = LatencyModel().op_time_s(graph, uniform_topology((fast, plain), Link(1e9)))
    flops = 2 * 16 * 4 * 8
    assert seconds[0].tolist() == [flops / (4e3 if is_convolution else 1e3), flops / 1e3]


def test_a_power_limit_slows_tf32_but_not_convolutions_of_devices_without_it() -> None:
    graph = replace(graph_of_a_product(), targets=("aten.convolution.default", "aten.relu.default"))
    limited = {**settings(), "sustained_share": 0.5}
    models = [
        KernelModel({"f": family_from("f", s)}, LatencyModel()) for s in (settings(), limited)
    ]
    plain = _device("f")
    fast = replace(plain, flops_per_s={"float32": 1e6, "tfloat32": 4e6})
    for device, is_slower in ((plain, False), (fast, True)):
        topology = uniform_topology((device,), Link(1e9))
        free, held = (model.op_time_s(graph, topology)[0, 0] for model in models)
        assert (held > free) == is_slower


@pytest.mark.parametrize("stated", [{"odd": 0.5}, {"odd": 0.5, "twice_odd": 2}, 0.5, {8: 0.5}])
def test_wrong_shares_of_unaligned_products_are_refused(stated: object) -> None:
    with pytest.raises(SpecError, match=r"latency\.curves\.f\.unaligned_shares"):
        family_from("f", {**settings(), "unaligned_shares": stated})


def test_operators_that_move_data_reach_the_share_of_their_kind() -> None:
    shares = {"pointwise": [0.5, 0.25], "batch_norm_training": [0.8, 0.4]}
    family = family_from("f", {**settings(), "bandwidth_shares": shares})
    model = KernelModel({"f": family}, LatencyModel(op_overhead_s=1.0))
    topology = uniform_topology((_device("f"),), Link(1e9))
    for dtype, share in (("float32", 0.5), ("bfloat16", 0.25)):
        times = model.op_time_s(graph_of_a_product(dtype), topology)
        assert times[1, 0] == pytest.approx(1 + 512 / (share * 1e6))
    sketch = Sketch()
    y = sketch.op([sketch.input(256)], 256, [sketch.weight(512)])
    graph = replace(
        sketch.graph(y), moved_bytes=np.array([560]), targets=("aten.native_batch_norm.default",)
    )
    # Two channels of 24 bytes: two of four multiprocessors.
    assert model.op_time_s(graph, topology)[0, 0] == pytest.approx(1 + 560 / (0.8 / 2 * 1e6))
    compiled = replace(model, is_compiled=True)
    assert compiled.op_time_s(graph, topology)[0, 0] == pytest.approx(1 + 560 / (0.5 * 1e6))


@pytest.mark.parametrize(
    "stated", [0.5, {"softmax": [1, 1]}, {"pointwise": 0.5}, {"pointwise": [2, 1]}, {"other": 1}]
)
def test_wrong_shares_of_bandwidth_are_refused(stated: object) -> None:
    with pytest.raises(SpecError, match=r"latency\.curves\.f\.bandwidth_shares"):
        family_from("f", {**settings(), "bandwidth_shares": stated})


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("aten.add.Tensor", "pointwise"),
        ("aten.native_batch_norm_backward.default", "batch_norm_backward"),
        ("aten.native_batch_norm.default", "batch_norm_training"),
        ("aten.batch_norm.default", "batch_norm"),
        ("aten.native_layer_norm_backward.default", "layer_norm_backward"),
        ("aten._softmax_backward_data.default", "softmax_backward"),
        ("aten._log_softmax.default", "softmax"),
        ("aten.max_pool2d_with_indices_backward.default", "max_pool_backward"),
        ("aten.max_pool2d_with_indices.default", "max_pool"),
        ("aten.max_pool2d.default", "max_pool_inference"),
    ],
)
def test_operators_have_a_kind(target: str, kind: str) -> None:
    assert kind_of(target) == kind


def test_products_of_32_bits_have_a_curve_of_their_own_and_split_k_without_a_bias() -> None:
    curve = replace(GEMM, compute_share=0.25, split_s=1e-9)
    stated = {f.name: getattr(curve, f.name) for f in fields(curve)}
    family = family_from("f", {**settings(), "gemm_float32": stated})
    topology = uniform_topology((_device("f"),), Link(1e9))
    model = KernelModel({"f": family}, LatencyModel())
    sketch = Sketch()
    x, weight = sketch.input(16 * 512 * 4), sketch.weight(512 * 16 * 4)
    alone = sketch.op([x], 16 * 16 * 4, [weight], 2 * 16 * 16 * 512)
    added = sketch.op([x], 16 * 16 * 4, [weight, sketch.weight(16 * 4)], 2 * 16 * 16 * 512)
    targets = ("aten.mm.default", "aten.linear.default")
    graph = replace(sketch.graph(alone, added), dtypes=("float32",) * 2, targets=targets)
    # Without a bias, four parts of k of one tile each; with it, one tile on one of four processors.
    split_s, whole_s = model.op_time_s(graph, topology)[:, 0] - curve.launch_s
    assert whole_s == pytest.approx(4 * split_s, rel=0.01)
    of_16_bits = replace(graph, dtypes=("bfloat16",) * 2)
    times = model.op_time_s(of_16_bits, topology)[:, 0]
    assert times[0] == times[1]


def test_a_single_row_of_32_bits_is_limited_by_memory_as_one_of_16() -> None:
    slow = {f.name: getattr(GEMM, f.name) for f in fields(GEMM)} | {"compute_share": 1e-6}
    family = family_from("f", {**settings(), "gemm_float32": slow})
    topology = uniform_topology((_device("f"),), Link(1e9))
    for rows, is_slow in ((1, False), (16, True)):
        sketch = Sketch()
        y = sketch.op([sketch.input(rows * 32)], rows * 16, [sketch.weight(128)], 2 * rows * 32)
        graph = replace(sketch.graph(y), dtypes=("float32",), targets=("aten.addmm.default",))
        alone, other = (
            KernelModel({"f": f}, LatencyModel()).op_time_s(graph, topology)[0, 0]
            for f in (replace(family, gemm_float32=None), family)
        )
        assert (other > 100 * alone) == is_slow


def test_a_convolution_takes_the_time_of_a_product_and_of_its_layouts() -> None:
    curve = ConvolutionCurve(
        **{f.name: getattr(GEMM, f.name) for f in fields(GEMM)},
        layout_share=0.5,
        input_share=0.1,
        gradient_work=3.0,
    )
    products = Products(*(np.array([float(size)] * 3) for size in (1, 256, 256, 64, 2, 2)))
    calls = Convolutions(products, np.array([0, 1000, 0]), np.array([False, False, True]))
    plain_s, changed_s, input_s = curve.forward_seconds(calls, RATES, float32_flops_per_s=1e5)
    assert plain_s == _gemm_s(GEMM, RATES, 256, 256, 64)
    assert changed_s == pytest.approx(plain_s + 2 * curve.launch_s + 1000 / (0.5 * 1e15))
    assert input_s == pytest.approx(2 * 256 * 256 * 64 / (0.1 * 1e5))


def test_a_family_without_curves_is_named() -> None:
    model = KernelModel({"h100": family_from("h100", settings())}, LatencyModel())
    topology = uniform_topology((_device("h10"),), Link(1e9))
    with pytest.raises(SpecError, match=r"kernels of h10, which has no curves; nearest: h100"):
        model.op_time_s(graph_of_a_product(), topology)


def settings() -> dict[str, dict[str, float]]:
    """Return the curves above as stated in the configuration."""
    curves = {"gemm": GEMM, "attention": ATTENTION, "decode": DECODE}
    return {
        kind: {f.name: getattr(curve, f.name) for f in fields(curve)}  # type: ignore[arg-type]
        for kind, curve in curves.items()
    }


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("gemm", "tail", "much", r"curves\.f\.gemm\.tail must be a number from 0 .*, got .*much"),
        ("gemm", "tail", -1, r"curves\.f\.gemm\.tail must be a number"),
        ("gemm", "tail", 10**400, r"curves\.f\.gemm\.tail must be a number"),
        ("decode", "memory_share", 0, r"decode\.memory_share must be more than 0"),
        ("gemm", "tial", 1, r"gemm\.tial is not a setting; nearest: tail"),
    ],
)
def test_an_invalid_coefficient_is_refused(
    kind: str, name: str, value: object, message: str
) -> None:
    stated: dict[str, dict[str, object]] = {k: dict(v) for k, v in settings().items()}
    stated[kind][name] = value
    with pytest.raises(SpecError, match=message):
        family_from("f", stated)


def test_collectives_need_the_rate_of_their_links() -> None:
    curve = {"launch_s": 1e-6, "hop_s": 1e-6, "ramp_s": 1e-6, "share": 0.5}
    stated = {**settings(), "collectives": {"all_reduce": curve}}
    with pytest.raises(SpecError, match=r"such as latency\.curves\.f\.link_bytes_per_s=300e9"):
        family_from("f", stated)
    assert family_from("f", {**stated, "link_bytes_per_s": 300e9}).link_bytes_per_s == 300e9
    with pytest.raises(SpecError, match=r"f\.link_bytes_per_s must be more than 0"):
        family_from("f", {**stated, "link_bytes_per_s": 0})


def test_a_missing_curve_is_named() -> None:
    stated = settings()
    del stated["decode"]
    with pytest.raises(SpecError, match=r"latency\.curves\.f\.decode is missing; it states launch"):
        family_from("f", stated)

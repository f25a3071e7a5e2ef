"""Fitting the roofline to measured times: planted coefficients are recovered; refusals."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.cost.calibration import Calibration, read_calibration, write_calibration
from fxpart.cost.fit import calibrate
from fxpart.cost.profile import OperatorProfile
from fxpart.errors import CacheError, SpecError
from tests.cost.planted import PLANTED, graph_of, profile_of
from tests.sketch import Sketch, chain, devices


def _close(fitted: Calibration, planted: Calibration, tolerance: float) -> None:
    assert fitted.overhead_s == pytest.approx(planted.overhead_s, rel=tolerance)
    assert fitted.view_s == pytest.approx(planted.view_s, rel=tolerance)
    assert fitted.fresh_s_per_byte == pytest.approx(planted.fresh_s_per_byte, rel=tolerance)
    assert fitted.bytes_per_s == pytest.approx(planted.bytes_per_s, rel=tolerance)
    assert fitted.flops_per_s == pytest.approx(planted.flops_per_s, rel=tolerance)
    assert fitted.moves_per_s == pytest.approx(planted.moves_per_s, rel=tolerance)


def test_planted_coefficients_are_recovered() -> None:
    graphs = [graph_of(seed) for seed in range(3)]
    fitted = calibrate([(graph, profile_of(graph)) for graph in graphs])
    _close(fitted, PLANTED, 1e-6)
    assert fitted.total_errors == pytest.approx((0, 0, 0), abs=1e-6)
    assert fitted.op_error == pytest.approx(0, abs=1e-6)
    assert fitted.spearman == pytest.approx(1, abs=1e-3)
    assert fitted.device_name == "a device"
    assert list(fitted.flops_per_s) == sorted(PLANTED.flops_per_s)
    assert fitted.held_out_errors == pytest.approx((0, 0, 0), abs=1e-3)


def test_a_held_out_graph_is_predicted_from_the_others() -> None:
    graphs = [graph_of(seed) for seed in range(3)]
    samples = [(graph, profile_of(graph)) for graph in graphs]
    slow = replace(samples[2][1], seconds=4 * samples[2][1].seconds)
    fitted = calibrate([*samples[:2], (graphs[2], slow)])
    # The other two are as planted; the third takes four times the predicted time.
    assert fitted.held_out_errors[2] == pytest.approx(-0.75, abs=1e-3)
    assert fitted.held_out_errors[0] > 0.5
    assert abs(fitted.total_errors[2]) < 0.75


def test_the_operators_of_a_single_graph_are_held_out_by_parts() -> None:
    graph = graph_of(0, 200)
    profile = profile_of(graph)
    assert calibrate([(graph, profile)]).held_out_errors == pytest.approx((0,), abs=1e-3)
    # One product takes a thousand times as long as the others tell, and most of the whole time.
    seconds, products = profile.seconds.copy(), np.flatnonzero(graph.flops > 0)
    odd = int(products[seconds[products].argmax()])
    seconds[odd] *= 1000
    fitted = calibrate([(graph, replace(profile, seconds=seconds))])
    assert fitted.total_errors == pytest.approx((0,), abs=1e-6)
    assert fitted.held_out_errors[0] < -0.25
    # Operators of one size each: nothing tells how long another takes.
    assert calibrate([(chain(5), profile_of(chain(5)))]).held_out_errors == ()


def test_the_largest_share_of_other_work_is_kept(tmp_path: Path) -> None:
    graph = graph_of(1)
    shares = (0.25, 0.5)
    profiles = [replace(profile_of(graph), lost_share=share) for share in shares]
    fitted = calibrate([(graph, profile) for profile in profiles])
    assert fitted.lost_share == 0.5
    write_calibration(tmp_path / "a.json", fitted)
    assert read_calibration(tmp_path / "a.json") == fitted


@settings(max_examples=10, deadline=None)
@given(st.floats(1e-7, 1e-4), st.floats(1e-8, 1e-5), st.floats(1e9, 1e12), st.floats(1e10, 1e13))
def test_any_coefficients_are_recovered(
    overhead_s: float, view_s: float, bytes_per_s: float, flops_per_s: float
) -> None:
    rates = {
        key: flops_per_s * share
        for key, share in zip(PLANTED.flops_per_s, (0.3, 0.6, 1.0), strict=True)
    }
    planted = Calibration(overhead_s, view_s, bytes_per_s, rates, "a device")
    samples = [
        (graph, profile_of(graph, planted)) for graph in (graph_of(7, 200), graph_of(8, 200))
    ]
    fitted = calibrate(samples)
    # If nothing is limited by a rate, the rate is unknown; the times are right all the same.
    for graph, profile in samples:
        np.testing.assert_allclose(fitted.seconds(graph), profile.seconds, rtol=1e-3)


def test_noise_changes_the_fit_little_and_deterministically() -> None:
    rng = np.random.default_rng(0)
    samples = []
    for seed in range(4):
        graph = graph_of(seed, 200)
        profile = profile_of(graph)
        noisy = profile.seconds * np.exp(rng.normal(0, 0.2, graph.n_ops))
        samples.append((graph, replace(profile, seconds=noisy)))
    fitted = calibrate(samples)
    _close(fitted, PLANTED, 0.2)
    assert 0 < fitted.op_error < 0.3
    # With a noise of 0.2 in the logarithm.
    kinds = ["convolution float32", "function", "gemm float32", "move", "reduction"]
    assert set(kinds) < set(fitted.spread)
    assert all(1.1 < fitted.spread[kind] < 1.35 for kind in kinds)
    assert 0.9 < fitted.spearman < 1
    second = calibrate(samples)
    assert second == fitted


def test_the_common_factor_corrects_the_total_of_one_graph() -> None:
    graph = graph_of(1)
    skewed = profile_of(graph).seconds.copy()
    skewed[int(skewed.argmax())] *= 5
    fitted = calibrate([(graph, OperatorProfile(skewed, np.ones(60, dtype=np.int64), "a device"))])
    assert fitted.total_errors == pytest.approx((0,), abs=1e-9)
    assert fitted.seconds(graph).sum() == pytest.approx(skewed.sum())


def test_times_by_hand() -> None:
    graph = replace(
        chain(5),
        targets=(
            "aten.mm.default",
            "aten.mm.default",
            "aten.add.Tensor",
            "aten.t.default",
            "getitem",
        ),
        flops=np.array([300, 50, 0, 0, 0]),
        moved_bytes=np.array([10, 40, 20, 0, 0]),
    )
    model = Calibration(1.0, 0.5, 10.0, {"gemm float32": 100.0}, "a device")
    # 1 + 300 / 100 + 10 / 10, 1 + 50 / 100 + 40 / 10, 1 + 20 / 10, a view, a getitem
    assert model.seconds(graph).tolist() == [5.0, 5.5, 3.0, 0.5, 0.0]
    assert model.op_time_s(graph, devices(1, 1)).tolist() == [
        [t, t] for t in (5.0, 5.5, 3.0, 0.5, 0.0)
    ]


def test_large_results_pay_for_fresh_memory() -> None:
    sketch = Sketch()
    value = sketch.op([sketch.input(1)], 2**25, flops=100)
    graph = sketch.graph(sketch.op([value], 2**25 - 1, flops=100))
    model = Calibration(0.0, 0.0, 1.0, {"gemm float32": 100.0}, "d", fresh_s_per_byte=2.0**-25)
    assert model.seconds(graph).tolist() == [2.0, 1.0]
    assert calibrate([(graph, profile_of(graph, model))]).fresh_s_per_byte > 0
    small = replace(graph, value_alloc_bytes=np.ones(3, dtype=np.int64))
    assert calibrate([(small, profile_of(small, model))]).fresh_s_per_byte == 0


def test_a_class_without_a_rate_uses_another_of_its_dtype() -> None:
    graph = replace(chain(1), targets=("aten.convolution.default",), flops=np.array([100]))
    model = Calibration(0.0, 0.0, 1.0, {"attention float32": 5.0, "gemm float32": 10.0}, "d")
    assert model.seconds(graph).tolist() == [10.0]
    only = replace(model, flops_per_s={"attention float32": 5.0})
    assert only.seconds(graph).tolist() == [20.0]
    with pytest.raises(SpecError, match="no rate for convolution bfloat16"):
        model.seconds(replace(graph, dtypes=("bfloat16",)))


def test_narrow_convolutions_have_their_own_rate() -> None:
    graph = chain(2)
    graph = replace(graph, value_bytes=4 * graph.value_bytes)
    results = float(graph.value_bytes[1]) / 4
    graph = replace(
        graph,
        targets=("aten.convolution.default",) * 2,
        flops=np.array([2 * 9 * results, 2 * 576 * results]).astype(np.int64),
    )
    model = Calibration(0.0, 0.0, 1e30, {"convolution float32": 2.0 * results}, "d")
    assert model.seconds(graph).tolist() == [9.0, 576.0]
    narrow = {"narrow convolution float32": 1.0 * results, **model.flops_per_s}
    assert replace(model, flops_per_s=narrow).seconds(graph).tolist() == [18.0, 576.0]


def test_a_sample_without_work_is_refused() -> None:
    sketch = Sketch()
    graph = sketch.graph(sketch.op([sketch.input(1)], 1, view_of=0))
    profile = OperatorProfile(np.ones(1), np.ones(1, dtype=np.int64), "d")
    with pytest.raises(SpecError, match="no operator of the sample"):
        calibrate([(graph, profile)])
    with pytest.raises(SpecError, match="at least one graph"):
        calibrate([])


def test_a_profile_of_another_graph_or_device_is_refused() -> None:
    graph = graph_of(0)
    with pytest.raises(SpecError, match="60 operators and a profile of 61"):
        calibrate([(graph, profile_of(graph_of(0, 61)))])
    other = replace(profile_of(graph), device_name="b")
    with pytest.raises(SpecError, match="2 devices"):
        calibrate([(graph, profile_of(graph)), (graph, other)])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("overhead_s", -1.0),
        ("view_s", np.nan),
        ("bytes_per_s", 0.0),
        ("flops_per_s", {"gemm f": -1.0}),
    ],
)
def test_invalid_coefficients_are_refused(field: str, value: object) -> None:
    with pytest.raises(SpecError, match="calibration"):
        replace(PLANTED, **{field: value})  # type: ignore[arg-type]


def test_a_written_calibration_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "calibration.json"
    written = replace(PLANTED, total_errors=(0.1, -0.2), op_error=0.25, spearman=0.9)
    write_calibration(path, written)
    assert read_calibration(path) == written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged"),
        ('{"schema": "other"}', "not a fxpart-calibration"),
        ('{"schema": "fxpart-calibration", "version": 2}', "damaged"),
        ('{"schema": "fxpart-calibration", "version": 2, "flops_per_s": 3}', "damaged"),
        ('{"schema": "fxpart-calibration", "version": 1}', "older fxpart.*calibrate again"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        read_calibration(path)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("bytes_per_s", f"1{'0' * 400}"),
        ("bytes_per_s", "1e-320"),
        ("overhead_s", "1e300"),
        ("view_s", "NaN"),
        ("op_error", "NaN"),
        ("device_name", '"\\ud800"'),
    ],
)
def test_an_invalid_coefficient_in_a_file_is_refused(tmp_path: Path, field: str, text: str) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(path, PLANTED)
    document = json.loads(path.read_text())
    whole = json.dumps({**document, field: "HERE"}).replace('"HERE"', text)
    path.write_text(whole)
    with pytest.raises(SpecError):
        read_calibration(path)


def test_missing_files_and_unwritable_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no file"):
        read_calibration(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot write the calibration"):
        write_calibration(tmp_path / "file" / "calibration.json", PLANTED)


def test_a_rate_that_the_sample_does_not_determine_is_allowed() -> None:
    # Operators that take equally long for any size: any high bandwidth explains that.
    graph = graph_of(3)
    profile = profile_of(graph, replace(PLANTED, bytes_per_s=1e30, fresh_s_per_byte=0.0))
    moves = graph.moved_bytes > 0
    fastest = float((graph.moved_bytes[moves] / profile.seconds[moves]).max())
    assert fastest / 2 < calibrate([(graph, profile)]).bytes_per_s < 20 * fastest


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("lost_share", 5.0, "from 0 to 1"), ("held_out_errors", (-5.0,), "at least -1, got -5")],
)
def test_impossible_errors_are_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(PLANTED, **{field: value})  # type: ignore[arg-type]

"""Sources of operator times: assumed, measured, or fitted to measurements."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

from fxpart.capture.captured import CapturedGraph
from fxpart.capture.inference.export import export_program
from fxpart.capture.inference.from_export import op_graph
from fxpart.core.graph import FloatArray
from fxpart.cost.calibration import Calibration, write_calibration
from fxpart.cost.profile import OperatorProfile
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import FxpartError, SpecError
from runner.config.specs import accelerator_files
from runner.experiment import operator_times as operator_times_module
from runner.experiment.check import check_all
from runner.experiment.operator_times import check_latency, operator_times, source_note
from runner.experiment.subject import Subject
from runner.experiment.topology import build_topology
from tests.runner.composed import read
from tests.sketch import chain

MODEL = {"name": "two layers"}


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    return export_program(model, (torch.zeros(4, 32),), {})


def subject(program: ExportedProgram, *, known: bool = False) -> Subject:
    """Return the subject of a measurement; requesting the program of a `known` one is an error."""

    def needed() -> ExportedProgram:
        assert not known, "measured again"
        return program

    return Subject(CapturedGraph(op_graph(program), 0.0, from_cache=False), needed)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["latency=profiled", "latency.source=profild"],
            "latency.source=profild does not exist; nearest: profiled",
        ),
        (
            ["latency=profiled", "latency.repeats=0"],
            "latency.repeats=0 must be a number from 1",
        ),
        (
            ["latency.tables=/tables"],
            "latency.tables=/tables is read with latency=kernels, got latency=auto",
        ),
        (
            ["latency=profiled", "latency.file=host.json"],
            "latency.file=host.json is read with latency=calibrated or latency=trace, got",
        ),
        (
            ["latency=calibrated", "latency.threads=0"],
            "latency.threads=0 must be a number from 1",
        ),
        (
            ["latency=profiled", "capture.level=module"],
            "latency=profiled measures operators, got capture.level=module",
        ),
    ],
)
def test_unavailable_times_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        check_latency(read(*overrides))
    assert message in str(refused.value)


def test_the_roofline_takes_the_coefficients(program: ExportedProgram) -> None:
    config = read("latency.compute_efficiency=0.5", "latency.op_overhead_s=1e-6")
    check_latency(config)
    assert operator_times(config, subject(program, known=True), MODEL) == LatencyModel(
        compute_efficiency=0.5, bandwidth_efficiency=None, op_overhead_s=1e-6
    )


def test_a_second_time_measures_nothing(
    program: ExportedProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever else the machine does meanwhile.
    monkeypatch.setattr(operator_times_module, "_MOST_LOST", 1.0)
    config = read("latency=profiled", f"capture.cache_dir={tmp_path}", "latency.repeats=1")
    check_latency(config)
    first = operator_times(config, subject(program), MODEL)
    assert isinstance(first, OperatorProfile)
    assert first.executed > 0
    assert first.total_s > 0
    again = operator_times(config, subject(program, known=True), MODEL)
    assert isinstance(again, OperatorProfile)
    assert again.executed == 0
    assert np.array_equal(again.seconds, first.seconds)


@pytest.mark.parametrize("changed", [["latency.repeats=2"], ["phase=training"]])
def test_measurements_under_other_conditions_are_not_reused(
    program: ExportedProgram, tmp_path: Path, changed: list[str]
) -> None:
    overrides = ["latency=profiled", f"capture.cache_dir={tmp_path}", "latency.repeats=1"]
    operator_times(read(*overrides), subject(program), MODEL)
    with pytest.raises(AssertionError, match="measured again"):
        operator_times(read(*overrides, *changed), subject(program, known=True), MODEL)
    with pytest.raises(AssertionError, match="measured again"):
        operator_times(read(*overrides), subject(program, known=True), {"name": "another"})


def test_without_a_cache_nothing_is_written(program: ExportedProgram, tmp_path: Path) -> None:
    config = read(
        "latency=profiled",
        f"capture.cache_dir={tmp_path}",
        "capture.use_cache=false",
        "latency.repeats=1",
    )
    assert isinstance(operator_times(config, subject(program), MODEL), OperatorProfile)
    assert list(tmp_path.iterdir()) == []


def test_a_calibration_is_fitted_to_the_measurements(
    program: ExportedProgram, tmp_path: Path
) -> None:
    overrides = [f"capture.cache_dir={tmp_path}", "latency.repeats=1"]
    measured = operator_times(read("latency=profiled", *overrides), subject(program), MODEL)
    fitted = operator_times(
        read("latency=calibrated", *overrides), subject(program, known=True), MODEL
    )
    assert isinstance(measured, OperatorProfile)
    assert isinstance(fitted, Calibration)
    assert fitted.device_name == measured.device_name


def test_a_calibration_in_the_earlier_form_is_read(
    program: ExportedProgram, tmp_path: Path
) -> None:
    known = Calibration(1e-6, 2e-6, 1e9, {"gemm float32": 1e10}, "a CPU")
    path = tmp_path / "calibration.json"
    config = read("latency=calibrated", f"latency.file={path}")
    with pytest.raises(SpecError, match=r"calibration\.json"):
        operator_times(config, subject(program, known=True), MODEL)
    write_calibration(path, known)
    assert operator_times(config, subject(program, known=True), MODEL) == known


@pytest.mark.parametrize(
    ("override", "errors", "lost_share", "note"),
    [
        (
            "latency.file=null",
            (),
            0.0,
            "fitted to this model's operators, error on other operators unknown",
        ),
        (
            "latency.file=null",
            (-0.25,),
            0.5,
            "fitted to this model's operators, error on held-out operators -25.0% in total; other"
            " processes used the processor for 50% of the measurement; operators are charged for"
            " their own processor time",
        ),
        (
            "latency.file=a.json",
            (0.125, -0.25, 0.0),
            0.0,
            "of a.json, worst error of 3 held-out models -25.0%",
        ),
    ],
)
def test_a_calibration_says_how_far_it_is_off(
    override: str, errors: tuple[float, ...], lost_share: float, note: str
) -> None:
    times = Calibration(0.0, 0.0, 1.0, {}, "d", held_out_errors=errors, lost_share=lost_share)
    assert source_note(read("latency=calibrated", override), times, chain(2)) == note


def test_curves_are_those_of_the_settings(program: ExportedProgram) -> None:
    config = read(
        "latency=kernels", "latency.curves.h100.gemm_float32.launch_s=0.5", "devices=1xh100"
    )
    check_latency(config)
    times = operator_times(config, subject(program, known=True), MODEL)
    topology = build_topology(config.devices, config.transfer_rate)
    graph = op_graph(program)
    seconds = times.op_time_s(graph, topology)[:, 0]
    computes = graph.flops > 0
    assert computes.any()
    assert (seconds[computes] > 0.5).all()
    assert (seconds[computes] < 0.501).all()
    assert (seconds[~computes] < 1e-5).all()


def _seconds(program: ExportedProgram, *overrides: str) -> FloatArray:
    """Return the times of the operators with `overrides`, shape (n, devices)."""
    config = read(*overrides)
    check_latency(config)
    topology = build_topology(config.devices, config.transfer_rate)
    graph = op_graph(program)
    return operator_times(config, subject(program, known=True), MODEL).op_time_s(graph, topology)


def test_devices_with_curves_of_their_own_take_them_by_default(program: ExportedProgram) -> None:
    # Like latency=kernels on one device and latency=roofline on the other, also side by side:
    # a device is as fast whatever is beside it.
    mixed = _seconds(program, "devices=1xh100+1xt4+1xa100_40gb")
    for column, device in enumerate(("h100", "t4", "a100_40gb")):
        (alone,) = _seconds(program, f"devices=1x{device}").T
        assert mixed[:, column].tolist() == alone.tolist()
        kind = "roofline" if device == "t4" else "kernels"
        assert (
            alone.tolist()
            == _seconds(program, f"devices=1x{device}", f"latency={kind}")[:, 0].tolist()
        )
        other = "kernels" if device == "t4" else "roofline"
        assert (
            alone.tolist()
            != _seconds(program, f"devices=1x{device}", f"latency={other}")[:, 0].tolist()
        )


@pytest.mark.parametrize("accelerator", sorted(accelerator_files()))
def test_an_accelerator_has_curves_of_its_own_or_the_roofline(accelerator: str) -> None:
    latency = read(f"devices=1x{accelerator}").latency
    assert latency.name == "auto"
    measured = {"a100_40gb": "a100", "a100_80gb": "a100", "h100": "h100", "h200": "h100"}
    family = {**measured, "b200": "b200", "l40s": "l40s"}.get(accelerator, "")
    assert latency.source == ("kernels" if family else "roofline")
    # No other curves, which would be in the key of the job.
    assert set(latency.curves) == {family} - {""}


def test_an_unknown_family_is_refused_with_the_known_ones(
    program: ExportedProgram,
) -> None:
    with pytest.raises(SpecError, match=r"kernels of h10, which has no curves; nearest: h100"):
        _seconds(program, "devices=1xh100", "devices.pools.0.curves=h10")


@pytest.mark.parametrize("override", ["capture.symbolic=batch", "capture.level=module"])
def test_runs_without_curves_take_the_roofline_by_default(override: str) -> None:
    config = read("devices=1xh100", override)
    check_latency(config)
    assert config.latency.source == "roofline"
    note = source_note(config, LatencyModel(), chain(2))
    assert note == f"of a roofline of h100, since {override} uses no curves"
    assert not source_note(read("devices=1xt4", override), LatencyModel(), chain(2))
    with pytest.raises(SpecError, match=r"latency=(roofline|kernels)"):
        check_all(read("devices=1xh100", override, "latency=kernels"))


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (["devices=2xh100"], "of curves of h100"),
        (
            ["devices=1xh100+1xt4", "execute=local"],
            "of curves of h100, a roofline of t4, not of this machine, on which the plan is run;"
            " latency=profiled measures its operators here",
        ),
        (["devices=1xh100", "latency=kernels"], ""),
        (
            ["devices=1xh100", "weights=int8", "phase=decode"],
            "of curves of h100, a roofline for products of weights in int8, which no curve "
            "describes",
        ),
    ],
)
def test_a_line_names_the_devices_that_take_curves(
    program: ExportedProgram, overrides: list[str], note: str
) -> None:
    config = read(*overrides)
    times = operator_times(config, subject(program, known=True), MODEL)
    assert source_note(config, times, chain(2)) == note


class _Attention(nn.Module):
    def forward(self, query: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(query, query, query)


def test_attention_of_torch_is_measured_unless_it_is_said_to_be_made_for_ampere() -> None:
    query = torch.zeros(1, 32, 8192, 128, dtype=torch.bfloat16, device="meta")
    prompts = subject(export_program(_Attention(), (query,), {}))
    shares = {}
    older = "latency.curves.h100.torch_attention={family: a100, compute_share: 0.629}"
    for engine, device in (("torch", "h100"), ("megatron", "h100"), ("torch", "a100_80gb")):
        config = read(
            "latency=kernels",
            older,
            *(f"latency.curves.{family}.sustained_share=1" for family in ("a100", "h100")),
            f"engine={engine}",
            f"devices=1x{device}",
        )
        topology = build_topology(config.devices, config.transfer_rate)
        graph = prompts.captured.graph
        seconds = operator_times(config, prompts, MODEL).op_time_s(graph, topology)[:, 0]
        (op,) = np.flatnonzero(graph.flops)
        peak = topology.devices[0].rate_for("bfloat16")
        shares[engine, device] = graph.flops[op] / seconds[op] / peak
    # FlashAttention-2 reaches some 35 % of an H100, kernels for Hopper up to 75 % (Shah et al.:
    # FlashAttention-3, arXiv:2407.08608), FlashAttention-2 50 to 73 % of an A100.
    assert 0.33 < shares["torch", "h100"] < 0.40
    assert 0.55 < shares["megatron", "h100"] < 0.75
    assert 0.50 < shares["torch", "a100_80gb"] < 0.73
    config = read("latency=kernels", "latency.curves.h100.sustained_share=1", "devices=1xh100")
    topology = build_topology(config.devices, config.transfer_rate)
    seconds = operator_times(config, prompts, MODEL).op_time_s(graph, topology)[op, 0]
    assert graph.flops[op] / seconds / 989.5e12 == pytest.approx(shares["megatron", "h100"])
    # As measured on an H100 by python -m benchmarks.gpu.measure: "full 1x32x8192x128".
    assert seconds == pytest.approx(1.681536e-3, rel=0.05)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["latency.curves.h100.gemm.tail=-1"], "latency.curves.h100.gemm.tail must be a number"),
        (
            ["latency.curves.h100.torch_attention={family: a100, compute_share: 1.5}"],
            "h100.torch_attention.compute_share must be at most 1, is 1.5",
        ),
        (["capture.level=module"], "has curves of operators, got capture.level=module"),
        (
            ["capture.symbolic=batch"],
            "are not polynomials, but capture.symbolic=batch",
        ),
    ],
)
def test_runs_that_curves_cannot_cost_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        check_latency(read("latency=kernels", *overrides))
    assert message in str(refused.value)


def test_a_trace_must_be_named() -> None:
    with pytest.raises(SpecError, match=r"name it with latency\.file=trace\.json"):
        check_latency(read("latency=trace"))


def test_a_damaged_trace_is_refused_before_a_capture(tmp_path: Path) -> None:
    damaged = tmp_path / "trace.json"
    damaged.write_text('{"traceEvents": [')
    with pytest.raises(FxpartError, match=r"trace\.json"):
        check_latency(read("latency=trace", f"latency.file={damaged}"))


def test_times_of_a_trace_are_said_to_be_of_every_device(
    program: ExportedProgram, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    with torch.profiler.profile(record_shapes=True) as profiler:
        program.module()(torch.zeros(4, 32))
    profiler.export_chrome_trace(str(path))
    config, traced = read("latency=trace", f"latency.file={path}"), subject(program)
    note = source_note(config, operator_times(config, traced, MODEL), traced.captured.graph)
    assert note.startswith(f"of {path}, the same for every device: ")
    assert "3 of 3 operators" in note


def test_a_busy_profile_is_measured_again(
    program: ExportedProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read("latency=profiled", f"capture.cache_dir={tmp_path}", "latency.repeats=1")
    monkeypatch.setattr(operator_times_module, "_MOST_LOST", -0.01)  # as if more were lost
    operator_times(config, subject(program), MODEL)
    with pytest.raises(AssertionError, match="measured again"):
        operator_times(config, subject(program, known=True), MODEL)

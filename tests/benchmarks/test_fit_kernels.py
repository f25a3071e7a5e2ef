"""Curves fitted to planted tables recover them, and are written in the runner's format."""

from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf

from benchmarks.truth import fit_kernels
from benchmarks.truth.kernel_tables import DEVICES, FAMILIES, Kernels, is_held_out, read_kernels
from benchmarks.truth.nccl_tables import Messages
from fxpart.cost.collectives import COLLECTIVES, CollectiveCurve, wire_bytes
from fxpart.cost.curves.family import family_from
from fxpart.cost.curves.gemm import Rates
from runner.config.paths import conf_dir


def _planted(folder: Path) -> None:
    """Write products that take the time of the shipped curve to a table."""
    draw = np.random.default_rng(0)
    m, n, k = (2 ** draw.integers(4, 13, 160) for _ in range(3))
    table = pa.table(
        {"gemm_dtype": ["bfloat16"] * 160, "m": m, "n": n, "k": k, "latency": [1.0] * 160}
    )
    (folder / "kernels").mkdir()
    path = folder / "kernels" / "h100_sxm_gemm.parquet"
    pyarrow.parquet.write_table(table, path)
    kernels = read_kernels(folder, "h100_sxm", "gemm", "bfloat16")
    seconds = FAMILIES["h100"].gemm.seconds(kernels.calls, kernels.rates)
    pyarrow.parquet.write_table(table.set_column(4, "latency", pa.array(seconds * 1e3)), path)


def test_a_planted_curve_is_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _planted(tmp_path)
    shipped = FAMILIES["h100"]

    def family(data: Path, prefix: str) -> dict[str, fit_kernels.Fitted[Any]]:
        kernels = read_kernels(data, prefix, "gemm", "bfloat16")
        fitted = fit_kernels.fit_kernels(fit_kernels.GEMM, type(shipped.gemm), kernels)
        return {
            "gemm": fitted,
            "attention": fit_kernels.Fitted(shipped.attention, "as it was"),
            "decode": fit_kernels.Fitted(shipped.decode, "as it was"),
            "gemm_float32": fit_kernels.Fitted(shipped.gemm_float32, "as it was"),
            "convolution": fit_kernels.Fitted(shipped.convolution, "as it was"),
            "collectives.all_reduce": fit_kernels.Fitted(CollectiveCurve(1, 2, 3, 0.5), "by hand"),
        }

    monkeypatch.setattr(fit_kernels, "family", family)
    monkeypatch.setattr(fit_kernels, "DEVICES", {"h100_sxm": DEVICES["h100_sxm"]})
    monkeypatch.setattr(fit_kernels, "INSTALLED_FAMILIES", {})
    output = tmp_path / "kernels.yaml"
    before = (conf_dir() / "latency" / "kernels.yaml").read_text()
    output.write_text(before)
    fit_kernels.main(["--data", str(tmp_path), "--output", str(output)])
    assert "h100 gemm: " in capsys.readouterr().out
    written = OmegaConf.load(output)
    assert written.source == "kernels"
    # Families without measurements are kept, with their comments.
    others = before[before.index("  b200:\n") :]
    assert output.read_text().endswith(others)
    assert output.read_text().count("measured_on: ") == len(written.curves)
    assert written.curves.a100 == OmegaConf.create(before).curves.a100
    read = family_from("h100", written.curves.h100)
    kernels = read_kernels(tmp_path, "h100_sxm", "gemm", "bfloat16")
    error = read.gemm.seconds(kernels.calls, kernels.rates) / kernels.seconds - 1
    assert np.median(np.abs(error)) < 0.03
    assert read.collectives["all_reduce"] == CollectiveCurve(1, 2, 3, 0.5)
    assert replace(read, gemm=shipped.gemm, collectives={}) == replace(shipped, collectives={})


def test_families_of_the_package_take_its_collectives_if_a_curve_describes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def curves(read: object, device: str) -> dict[str, fit_kernels.Fitted[Any]]:
        return {"gemm": fit_kernels.Fitted(FAMILIES[device].gemm, f"fitted to {device}")}

    planted = CollectiveCurve(7e-6, 2e-6, 1e-5, 0.7)

    def messages(accelerator: str, kind: str) -> Messages:
        assert accelerator == "b200"
        size, ranks = (grid.ravel() for grid in np.meshgrid(2.0 ** np.arange(9, 30), [2, 4, 8]))
        wire = np.array([wire_bytes(kind, *m) for m in zip(size, ranks, strict=True)])
        seconds = planted.seconds(wire, ranks, 900e9)
        labels = [f"{kind} {row}" for row in range(len(size))]
        held_out = np.array([is_held_out(label) for label in labels])
        return Messages(wire, size, ranks, 900e9, seconds, labels, held_out)

    monkeypatch.setattr(fit_kernels, "_kernel_curves", curves)
    monkeypatch.setattr(fit_kernels, "read_installed_messages", messages)
    families = fit_kernels._installed_families()
    b200, l40s = families["b200"], families["l40s"]
    assert b200.curves["gemm"].note == "fitted to b200"
    for kind in COLLECTIVES:
        fitted = b200.curves[f"collectives.{kind}"]
        assert astuple(fitted.curve) == pytest.approx(astuple(planted), rel=0.02)
        assert "rows held out: median 0.0 %" in fitted.note
    assert list(l40s.curves) == ["gemm"]
    written = OmegaConf.create(fit_kernels._yaml(families)).curves
    assert written.b200.link_bytes_per_s == 900e9
    assert written.b200.sustained_share == 0.63
    assert "link_bytes_per_s" not in written.l40s


def test_half_of_the_rows_are_held_out_independently_of_the_others(tmp_path: Path) -> None:
    _planted(tmp_path)
    kernels = read_kernels(tmp_path, "h100_sxm", "gemm", "bfloat16")
    assert isinstance(kernels, Kernels)
    assert isinstance(kernels.rates, Rates)
    assert 50 < kernels.held_out.sum() < 110
    assert kernels.held_out.tolist() == [is_held_out(label) for label in kernels.labels]
    assert {f.name for f in fields(FAMILIES["h100"].gemm)} == set(fit_kernels.GEMM)

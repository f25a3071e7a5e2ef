"""Settings of a sweep: their values in order."""

import pytest

from runner.report.sweep_data import as_number, in_order, shared_settings, varied
from tests.runner.report.sweeps import row, sweep


@pytest.mark.parametrize(
    ("best", "order"),
    [
        ({"16": 1.0, "2": 3.0, "1e1": 2.0}, ["2", "1e1", "16"]),
        ({"16x16gb": 1.0, "2x80gb": 2.0, "2x16gb": 9.0}, ["2x16gb", "2x80gb", "16x16gb"]),
        ({"single": None, "kl_based": 2.0, "optimal": 1.0}, ["optimal", "kl_based", "single"]),
        ({"none": 1.0, "1f1b": 2.0}, ["none", "1f1b"]),
    ],
)
def test_the_order_of_values(best: dict[str, float | None], order: list[str]) -> None:
    assert in_order(best) == order


def test_numbers_as_text() -> None:
    texts = ("8", "1e3", "nan", "inf", "x", "")
    assert [as_number(text) for text in texts] == [8, 1e3, None, None, None, None]


def test_published_problems_are_named_once_and_have_their_own_devices() -> None:
    rows = [
        row(model=name, model__path=f"/far/away/{name}.json", mode=mode)
        for name in ("bert", "gnmt")
        for mode in ("a", "b")
    ]
    data = sweep(rows, "model.path", "mode")
    assert varied(data) == ("model", "mode")
    assert shared_settings(data, varied(data)) == {}
    # Files with the same name in two folders are told apart by these.
    alike = [row(model="bert", model__path=f"/{folder}/bert.json") for folder in ("x", "y")]
    assert varied(sweep(alike, "model.path")) == ("model.path",)
    assert "devices" in shared_settings(sweep([row(), *rows], "model"), ("model", "mode"))


def test_settings_of_the_command_that_all_jobs_share_are_in_the_title() -> None:
    rows = [
        row(mode=mode, phase="decode", context_len="4096", model__config__n_layer="2")
        for mode in ("a", "b")
    ]
    command = "python -m runner -m mode=a,b phase=decode +model.config.n_layer=2 where='mode != \"c"
    data = sweep(rows, "mode", command=command)
    assert shared_settings(data, varied(data)) == {
        "model": "gpt2",
        "devices": "2x80gb",
        "transfer_rate": "pcie4",
        "phase": "decode",
        "model.config.n_layer": "2",
    }
    # One that a job ran without is not shared.
    data = sweep([*rows, row(mode="d", model__config__n_layer="2")], "mode", command=command)
    assert "phase" not in shared_settings(data, varied(data))

"""The comparison page as a user sees it: a real browser on a real `mlflow ui`."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.browser import BROWSER, FLAGS, NAMES, served
from fxpart.errors import InfeasibleError
from runner.config.schema import TrackingConfig
from runner.tracking.open_tracker import open_tracker
from runner.tracking.tracker import ComparisonPage

if TYPE_CHECKING:
    from playwright.sync_api import Page

_PAGE_MS = 60_000

pytestmark = [
    pytest.mark.browser,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow"),
    # A real browser is no Python package: without one, the rest can still be tested.
    pytest.mark.skipif(BROWSER is None, reason=f"no browser on PATH: {', '.join(NAMES)}"),
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="playwright is not installed"
    ),
]

# mode, devices, latency_ms, peak_memory_gib, partitions; in order of latency.
_RUNS = [
    ("optimal", "4x24gb", 101.25, 6.5, 4),
    ("kl_based", "4x16gb", 123.5, 7.75, 7),
    ("cost_aware", "2x80gb", 150.75, 21.5, 2),
    ("size_based", "8x16gb", 311.25, 12.25, 8),
]
_INFEASIBLE = ("single", "1x16gb")
_SWEEP = "5ee9"
_MARKS = {"sweeps": f" 0ld {_SWEEP} "}
"""Runs may belong to several sweeps."""


def _fill(root: Path) -> ComparisonPage:
    tracker = open_tracker(TrackingConfig(uri=f"sqlite:///{root / 'runs.db'}"), root)
    about = {"sweep_id": _SWEEP, "swept": '["devices", "mode"]'}
    parent = tracker.start_sweep("sweep devices x mode", about)
    for mode, devices, latency, peak, partitions in reversed(_RUNS):
        params = {"model": "llama2_13b", "mode": mode, "devices": devices, "transfer_rate": "pcie4"}
        with tracker.start(f"{mode} · {devices}", params, _MARKS) as run:
            run.log(
                metrics={
                    "latency_ms": latency,
                    "examples_per_s": 1e3 / latency,
                    "peak_memory_gib": peak,
                    "partitions": partitions,
                    "devices_used": int(devices[0]),
                    "transfer_gib": partitions / 16,
                    "optimality_gap_pct": latency / 10 - 10,
                    "feasible": 1,
                    "lower_bound_ms": 90.0,
                    "capture_s": 1.5,
                },
                series={
                    "memory_gib": [(op, peak * (1 - (op - 50) ** 2 / 5e3)) for op in range(101)]
                },
                tables={"devices": {"device": [0, 1], "peak_gib": [peak, peak / 2]}},
            )
    mode, devices = _INFEASIBLE
    params = {"model": "llama2_13b", "mode": mode, "devices": devices, "transfer_rate": "pcie4"}
    with (
        pytest.raises(InfeasibleError),
        tracker.start(f"{mode} · {devices}", params, _MARKS, parent),
    ):
        raise InfeasibleError("llama2_13b needs 24.2 GiB, 1x16gb has 14.9 GiB")
    # Neither interrupted runs nor those of another sweep may be visible.
    for sweep in (_SWEEP, f"{_SWEEP}0"):
        with tracker.start("not here", params, {"sweeps": f" {sweep} "}, parent) as run:
            run.log(metrics={"latency_ms": 1.0})
        if sweep == _SWEEP:
            assert run.run_id is not None
            tracker.mark_cut_off(run.run_id, "its process died")
    tracker.finish_sweep(parent)
    page = tracker.comparison_page(parent)
    assert page is not None
    return page


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComparisonPage]:
    """The page of a sweep, on a server that runs during the tests of this file."""
    root = tmp_path_factory.mktemp("dashboard")
    printed = _fill(root)
    assert printed.command is not None
    command = f"{printed.command} --artifacts-destination {root}"
    with served(command, Path.cwd(), root) as server:
        ui = "http://127.0.0.1:5000"
        yield ComparisonPage(
            printed.url.replace(ui, server), printed.charts_url.replace(ui, server), None
        )


@pytest.fixture(scope="module")
def browser_page() -> Iterator["Page"]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": 1440, "height": 1600})
            page.set_default_timeout(_PAGE_MS)
            yield page
        finally:
            browser.close()


def _cells(page: "Page", row: int) -> dict[str, str]:
    cells = page.locator(f".ag-center-cols-container .ag-row[row-index='{row}'] .ag-cell")
    texts = cells.evaluate_all("es => es.map(e => [e.getAttribute('col-id'), e.innerText])")
    return dict(texts)


def test_table_shows_choices_and_costs_without_a_click(
    pages: ComparisonPage, browser_page: "Page", tmp_path: Path
) -> None:
    browser_page.goto(pages.url)
    browser_page.locator(".ag-cell", has_text="101.25").wait_for()
    browser_page.screenshot(path=tmp_path / "table.png")
    # Cells to the right of the table's edge are in the page too, but invisible.
    edge = browser_page.locator(".ag-center-cols-viewport").bounding_box()
    assert edge is not None
    columns = ["params.`devices`", "params.`mode`"]  # as it was swept
    columns += [f"metrics.`{name}`" for name in ("latency_ms", "peak_memory_gib", "partitions")]
    for column in columns:
        header = browser_page.locator(f'.ag-header-cell[col-id="{column}"]')
        assert header.inner_text() == column.split("`")[1]
        box = header.bounding_box()
        assert box is not None
        assert edge["x"] <= box["x"]
        assert box["x"] + box["width"] <= edge["x"] + edge["width"]
    for row, (mode, devices, *numbers) in enumerate(_RUNS):
        cells = _cells(browser_page, row)
        costs = [f"{number:g}" for number in numbers]
        assert [cells[column] for column in columns] == [devices, mode, *costs]
    failed = _cells(browser_page, len(_RUNS))
    assert [failed[column] for column in columns] == [*_INFEASIBLE[::-1], "-", "-", "-"]


def test_charts_show_all_runs(pages: ComparisonPage, browser_page: "Page", tmp_path: Path) -> None:
    browser_page.goto("about:blank")  # the two addresses differ only after the #
    browser_page.goto(pages.charts_url)
    cards = browser_page.get_by_test_id("experiment-view-compare-runs-card")
    latency, memory, trade, partitions = (cards.nth(index) for index in range(4))
    cards.filter(has_text="Differences").get_by_text("latency_ms").wait_for()
    trade.locator(".scatterlayer path.point").nth(len(_RUNS) - 1).wait_for(state="attached")
    partitions.locator(".bars .point").first.wait_for(state="attached")
    browser_page.screenshot(path=tmp_path / "charts.png")
    for card, title, column in ((latency, "latency_ms", 2), (memory, "peak_memory_gib", 3)):
        shown = card.inner_text().split()
        assert title in shown
        assert {f"{run[column]:.2f}" for run in _RUNS} <= set(shown)
        assert card.locator(".bars .point").count() == len(_RUNS)
    assert trade.locator(".scatterlayer path.point").count() == len(_RUNS)
    assert "partitions" in partitions.inner_text()


def test_runs_can_be_sent_to_a_server(pages: ComparisonPage, tmp_path: Path) -> None:
    server = pages.url.partition("/#")[0]
    tracker = open_tracker(TrackingConfig(uri=server, experiment="served"), tmp_path)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.svg").write_text("<svg/>")
    params = {f"p{index}": index for index in range(150)}
    with tracker.start("run", params, {"config_key": "k"}) as run:
        run.log(
            metrics={f"m{index}": float(index) for index in range(1100)},
            series={"memory_gib": [(step, 1.0) for step in range(400)]},
            tables={"devices": {"device": [0]}},
            artifacts_dir=tmp_path / "files",
        )
    assert tracker.settled("config_key", ["k"])["k"].run_id == run.run_id
    page = tracker.comparison_page()
    assert page is not None
    assert page.command is None
    assert page.url.startswith(f"{server}/#/experiments/")
    assert (tmp_path / "mlruns").exists() is False

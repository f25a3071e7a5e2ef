"""The report as a reader sees it: a real browser opens the file, with the network off."""

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.browser import BROWSER, FLAGS, NAMES
from runner.report.html import report_html
from tests.runner.report.sweeps import row, sweep, unfit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [
    pytest.mark.browser,
    # A real browser is no Python package: without one, the rest can still be tested.
    pytest.mark.skipif(BROWSER is None, reason=f"no browser on PATH: {', '.join(NAMES)}"),
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="playwright is not installed"
    ),
]
_JOBS = 40
_PLOT = "svg[aria-label*='against peak memory']"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        row(
            100.0 + job,
            mode=f"m{job % 4}",
            devices=f"{job // 4 + 1}x16gb",
            run_id=f"{job:032x}",
            metrics={"peak_memory_gib": 50.0 - job, "devices_used": float(job % 3)},
        )
        for job in range(_JOBS)
    ]
    rows.append(unfit("the model needs 24 GiB", mode="m0", devices="16x16gb"))
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(report_html(sweep(rows, "mode", "devices", title="A sweep", question="Why?")))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        try:
            yield opened
        finally:
            opened.close()


class Seen:
    """An opened page, with its requests and errors."""

    def __init__(self, browser: "Browser", report: Path, scheme: str, script: bool) -> None:
        context = browser.new_context(
            viewport={"width": 1440, "height": 900},
            color_scheme="dark" if scheme == "dark" else "light",
            offline=True,
            java_script_enabled=script,
        )
        self.page: Page = context.new_page()
        self.requests: list[str] = []
        self.said: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.goto(report.as_uri())

    def column(self, number: int) -> list[str]:
        """Return the cells of the visible rows in a column."""
        cells = self.page.locator(f"tbody tr:visible td:nth-child({number})")
        return cells.all_inner_texts()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_important_is_visible_at_once(
    browser: "Browser", report: Path, scheme: str, tmp_path: Path
) -> None:
    seen = Seen(browser, report, scheme, script=True)
    seen.page.screenshot(path=tmp_path / f"{scheme}.png")
    assert seen.requests == [report.as_uri()]
    assert seen.said == []
    # Without a click or a scroll: the verdict, the best rows, and the plot.
    for shown in (".verdict", "tr.best", _PLOT):
        box = seen.page.locator(shown).first.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 1440
        assert box["y"] < 900
    plot = seen.page.locator(_PLOT).bounding_box()
    assert plot is not None
    assert plot["y"] + plot["height"] < 900
    # The page follows the colour scheme, and so do its figures.
    colour = "getComputedStyle(document.querySelector(%r)).%s"
    paper = seen.page.evaluate(colour % ("section", "backgroundColor"))
    assert seen.page.evaluate(colour % ("figure svg rect", "fill")) == paper
    bright = sum(int(part) for part in paper[4:-1].split(",")) > 3 * 128
    assert bright is (scheme == "light")
    wide = seen.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 1440
    seen.page.close()


def test_a_click_sorts_and_another_reverses(browser: "Browser", report: Path) -> None:
    seen = Seen(browser, report, "light", script=True)
    shown = seen.column(4)
    assert shown == [f"{100 + job:.3f}" for job in range(len(shown))]
    assert 10 <= len(shown) < _JOBS
    seen.page.get_by_role("button", name="peak").click()
    peaks = seen.column(6)
    assert (len(peaks), peaks[0], peaks[-1]) == (len(shown), "11.000", f"{10 + len(shown)}.000")
    seen.page.get_by_role("button", name="peak").click()
    assert seen.column(6)[0] == "50.000"
    assert seen.page.locator("th[aria-sort]").count() == 1
    seen.page.get_by_role("button", name="devices", exact=True).click()
    assert seen.column(3)[:5] == [*["1x16gb"] * 4, "2x16gb"]
    seen.page.get_by_label("all 41 rows").check()
    everything = seen.column(3)
    assert len(everything) == _JOBS + 1
    assert everything[-1] == "16x16gb"
    # Rows without a number are last in either direction.
    for _ in range(2):
        seen.page.get_by_role("button", name="latency").click()
        assert seen.column(4)[-1] == "infeasible"
    assert seen.said == []
    seen.page.close()


def test_it_is_readable_without_script_and_on_a_phone(browser: "Browser", report: Path) -> None:
    seen = Seen(browser, report, "light", script=False)
    seen.page.set_viewport_size({"width": 400, "height": 800})
    assert seen.column(4)[0] == "100.000"
    seen.page.get_by_label("all 41 rows").check()
    assert len(seen.column(4)) == _JOBS + 1
    seen.page.close()


def test_a_row_leads_to_its_job_and_its_run_can_be_copied(
    browser: "Browser", tmp_path: Path
) -> None:
    folder = tmp_path / "sweeps" / "0 a"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({}))
    (folder / "memory.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"><text/></svg>')
    rows = [row(1.0, mode="a", run_id="0123456789abcdef" * 2), row(2.0, mode="b", run_id="f" * 32)]
    rows[0] = replace(rows[0], folder=str(folder))
    path = tmp_path / "reports" / "report.html"
    path.parent.mkdir()
    path.write_text(report_html(sweep(rows, "mode"), path.parent))
    seen = Seen(browser, path, "light", script=True)
    name = seen.page.locator("tbody .id").first
    name.click()
    assert seen.page.evaluate("getSelection().toString().trim()") == "0123456789abcdef" * 2
    assert name.get_attribute("title") == "0123456789abcdef" * 2
    assert seen.page.locator("td a").all_inner_texts() == ["files"]
    assert seen.page.locator(".verdict a").all_inner_texts() == ["files", "memory"]
    seen.page.get_by_role("link", name="memory").click()
    seen.page.wait_for_url((folder / "memory.svg").as_uri())
    assert seen.said == []
    seen.page.go_back()
    seen.page.get_by_role("link", name="files").last.click()
    seen.page.wait_for_url(f"{folder.as_uri()}/")
    assert "memory.svg" in seen.page.inner_text("body")
    seen.page.close()

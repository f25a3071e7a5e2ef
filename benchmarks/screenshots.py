"""``python -m benchmarks.screenshots``: screenshots of what a user sees of a sweep.

Runs a small sweep, starts MLflow's dashboard on it, and takes pictures of MLflow's run table and
charts, as they open without a click, of our report, light and dark, and of each figure of a run.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.browser import BROWSER, FLAGS, NAMES, served
from benchmarks.process import run_python

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SWEEP = (
    "model=gpt2",
    "mode=size_based,pipeline,kl_based,cost_aware",
    "devices=1x0.5gb,2x0.5gb,4x0.5gb",
    "transfer_rate=pcie4,25gbit",
    "reserve=none",
    "model.seq_len=128",
    "question=Which mode is the fastest, and is a second device worth its price?",
)
RUNS = {
    "training": (
        *("model=gpt2", "model.seq_len=128", "devices=4x16gb", "phase=training"),
        *("mode=pipeline", "schedule=1f1b", "microbatches=8"),
    ),
    "batches": ("model=gpt2", "model.seq_len=128", "devices=1x2gb", "capture.symbolic=batch"),
}
"""Runs that together have all figures."""
_WAIT_MS = 60_000


def main() -> int:
    """Take the pictures and print their paths; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("outputs", "screenshots"))
    folder: Path = parser.parse_args().folder
    if BROWSER is None:
        print(f"error: there is no browser on PATH: {', '.join(NAMES)}; install one")
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as temporary:
        root = Path(temporary)
        sweep = run_python(["-m", "runner", "-m", *SWEEP], root)
        print(sweep.output)
        printed = dict(re.findall(r"^(\w+): +(.+)$", sweep.output, re.MULTILINE))
        with _browser() as browser:
            for path in (
                *_report(browser, root / printed["report"], folder),
                *_dashboard(browser, root, printed, folder),
                *_figures(browser, root, folder),
            ):
                print(path)
    return 0


@contextmanager
def _browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def _report(browser: "Browser", report: Path, folder: Path) -> Iterator[Path]:
    """Take pictures of the report opened as a file, with the network off."""
    schemes = {"light": "report_light.png", "dark": "report_dark.png"}
    for scheme, name in schemes.items():
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.emulate_media(color_scheme="light" if scheme == "light" else "dark")
        page.context.set_offline(True)
        page.goto(report.resolve().as_uri())
        yield _screenshot(page, folder / name)
        yield _screenshot(page, folder / f"whole_{name}", whole=True)
        page.close()


def _dashboard(
    browser: "Browser", root: Path, printed: dict[str, str], folder: Path
) -> Iterator[Path]:
    """Take pictures of MLflow's table and charts as they open from the printed addresses."""
    with served(printed["dashboard"], root, root) as server:
        pages = {
            "compare": ("mlflow_table.png", ".ag-row"),
            "charts": ("mlflow_charts.png", ".bars"),
        }
        for key, (name, selector) in pages.items():
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.set_default_timeout(_WAIT_MS)
            page.goto(re.sub(r"^http://[^/]+", server, printed[key]))
            page.locator(selector).first.wait_for(state="attached")
            page.wait_for_timeout(
                3000
            )  # charts are animated when they open, and no event marks the end
            yield _screenshot(page, folder / name)
            page.close()


def _figures(browser: "Browser", root: Path, folder: Path) -> Iterator[Path]:
    """Take pictures of the figures of single runs."""
    for name, overrides in RUNS.items():
        run = root / name
        options = ("tracking=none", "figures=all", f"hydra.run.dir={run}")
        print(run_python(["-m", "runner", *overrides, *options], root).output)
        for figure in sorted(run.glob("*.svg")):
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(figure.as_uri())
            yield _screenshot(page, folder / f"{name}_{figure.stem}.png")
            page.close()


def _screenshot(page: "Page", path: Path, *, whole: bool = False) -> Path:
    page.screenshot(path=path, full_page=whole)
    return path


if __name__ == "__main__":
    sys.exit(main())

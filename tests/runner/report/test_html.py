"""The report as a file. A browser opens it in `test_report_in_browser`."""

import re
from html.parser import HTMLParser
from itertools import product

import pytest

from runner.output.svg import DARK, IN_PAGE, LIGHT
from runner.report.html import report_html
from runner.report.sweep_data import SweepData, SweepRow
from tests.runner.report.sweeps import row, sweep, unfit

EVIL = '<script>alert("x")</script>&\'"'


class Tags(HTMLParser):
    """Collect the contents of a page; an unclosed tag is an error."""

    void = ("meta", "link", "input", "br", "img", "path", "rect")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.words: list[str] = []
        self.addresses: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "action", "data")]
        if tag not in self.void:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.void:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def large(jobs: int) -> SweepData:
    """Return a sweep like those of users: some of its jobs do not fit."""
    pairs = list(product(range(jobs // 25), range(25)))
    return sweep(
        [
            unfit("the model needs 24 GiB", mode=f"mode_{i}", devices=f"{j}x16gb", model="llama")
            if j < 2
            else row(
                100.0 + i * j,
                mode=f"mode_{i}",
                devices=f"{j}x16gb",
                model="llama",
                run_id="0123456789abcdef" * 2,
                metrics={"devices_used": float(j), "peak_memory_gib": 24.0 / j + i / 100},
            )
            for i, j in pairs
        ],
        "mode",
        "devices",
    )


def test_it_holds_the_question_the_findings_and_the_command() -> None:
    rows = [row(1.0, mode="a", run_id="abc"), row(2.0, mode="b"), unfit("too big", mode="c")]
    page = report_html(
        sweep(rows, "mode", title="modes", question="Which?", command="python -m runner -m x")
    )
    words = Tags(page).words
    for part in ("modes", "Which?", "2 finished", "1 does not fit", "mode=c: too big"):
        assert part in words
    assert {"python -m runner -m x", "python -m runner rerun=abc"} <= set(words)
    (sentence,) = (text.strip() for text in words if text.startswith(" mode=a: "))
    assert sentence.startswith("mode=a: 1.000 ms, 33.3 % less than the median of 2 results")


def test_nothing_is_fetched_and_the_script_is_its_own() -> None:
    tags = Tags(report_html(large(50)))
    assert tags.addresses == ["data:,"]
    assert tags.names.count("script") == 1
    assert not {"iframe", "img", "object", "embed"} & set(tags.names)
    assert "default-src 'none'" in report_html(large(50))


def test_names_are_words_and_never_markup() -> None:
    rows = [
        row(1.0, mode=EVIL, devices=EVIL + "2", run_id=EVIL),
        row(2.0, mode="b"),
        unfit(EVIL, model=EVIL),
    ]
    page = report_html(
        sweep(rows, "mode", "devices", "model", title=EVIL, question=EVIL, command=EVIL)
    )
    tags = Tags(page)
    assert tags.names.count("script") == 1
    assert "<script>alert" not in page
    assert EVIL in "".join(tags.words)


def test_a_thousand_jobs_are_a_small_file() -> None:
    page = report_html(large(1000))
    assert len(page.encode()) < 2_000_000
    tags = Tags(page)
    assert len(re.findall(r"<tr[ >]", page)) == 1001
    assert "all 1000 rows" in "".join(tags.words)
    assert report_html(large(1000)) == page


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row(1.0)],
        [unfit()],
        [row(status="running"), row(status="cut_off", error="its process died")],
        [row(0.0, metrics={"peak_memory_gib": 0.0}), row(0.0, mode="b")],
        [row(1.0, model=f"m{i}", mode=mode) for i in range(10) for mode in ("a", "b")],
        [row(float(i + 1), model__lr=f"{i / 7:.5f}") for i in range(30)],
        [row(metrics={"step_ms": 8.0, "examples_per_s": 1e3, "schedule_peak_gib": 2.0})],
    ],
    ids=["none", "one", "unfit", "under way", "zeros", "models", "many values", "schedule"],
)
def test_any_sweep_has_a_report(rows: list[SweepRow]) -> None:
    page = report_html(sweep(rows, "mode", "model.lr"))
    assert Tags(page).names.count("table") == 1
    assert "nan" not in page


def test_of_several_models_each_is_visible_at_first() -> None:
    rows = [row(float(n), model=model, mode=f"m{n}") for model in "xyz" for n in range(30)]
    page = report_html(sweep([*rows, unfit(model="x")], "model", "mode"))
    shown = re.findall(
        r"<tr(?: class=\"(?:best|next|best next)\")?><td[^>]*>.?</td><td>(.)</td>", page
    )
    assert [shown.count(model) for model in "xyz"] == [6, 5, 5]


def test_a_sweep_in_progress_is_marked() -> None:
    words = Tags(report_html(sweep([row(status="running")]))).words
    assert "No job has a result yet." in words
    assert "1 running" in words


def of_layers(counts: range) -> SweepData:
    """Return a sweep of models with these numbers of layers, each with two modes but the last."""
    rows = [
        row(100.0 * n + (mode == "b"), model__config__n_layer=str(n), mode=mode)
        for n in counts
        for mode in ("ab" if n != counts[-1] else "a")
    ]
    return sweep(rows, "model.config.n_layer", "mode")


def test_the_best_of_each_model_is_named_and_drawn() -> None:
    page = report_html(of_layers(range(9, 12)))
    words = Tags(page).words
    assert "Best:" not in words
    named = [word for word in words if word.startswith("n_layer=")]
    assert named == ["n_layer=9", "n_layer=10", "n_layer=11"]
    titles = re.findall(r"<h2>(Latency[^<]*)</h2>", page)
    # A single job leaves nothing to compare; over all models, the differing settings are shown.
    assert sorted(titles) == [
        "Latency against memory, n_layer=10",
        "Latency against memory, n_layer=9",
        "Latency by mode, n_layer=10",
        "Latency by mode, n_layer=9",
        "Latency by model.config.n_layer",
    ]
    assert "1 more model in the table, without figures" in words
    rows = re.findall(r'<tr class="([^"]*)"><td[^>]*>.?</td><td>(\d+)</td>', page)
    assert rows == [("best", "9"), ("best next", "10"), ("best next", "11")]


def test_of_many_models_some_are_named() -> None:
    words = Tags(report_html(of_layers(range(1, 12)))).words
    assert [word for word in words if word.startswith("n_layer=")][-1] == "n_layer=8"
    assert "… and 3 more models in the table" in words


def test_the_pages_colours_follow_its_style() -> None:
    page = report_html(large(50))
    style, body = page.split("</style>")
    for palette in (LIGHT, DARK):
        assert all(f"--{name}:{colour};" in style for name, colour in palette.variables().items())
    used = set(re.findall(r"(?:fill|stroke)=\"([^\"]+)", body)) - {"none"}
    assert used
    assert used <= set(IN_PAGE.variables().values())

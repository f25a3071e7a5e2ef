"""The figures of a report: their contents and positions."""

import re
from itertools import product
from xml.etree import ElementTree

import pytest

from runner.report.heat_map import heat_map_keys, heat_map_svg
from runner.report.parameter_plot import parameter_figure
from runner.report.pareto_plot import pareto_figure
from runner.report.ranking import ranked
from runner.report.sweep_data import SweepData
from tests.runner.report.sweeps import row, sweep, unfit

SVG = "{http://www.w3.org/2000/svg}"


def tips(svg: str) -> list[str]:
    """Return the tooltips in the order drawn, without the drawing's own title."""
    return [title.text or "" for title in ElementTree.fromstring(svg).iter(f"{SVG}title")][1:]


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def pareto_svg(data: SweepData) -> str:
    return pareto_figure(ranked(data), "gpt2")


def parameter_svg(data: SweepData, key: str) -> str:
    return parameter_figure(ranked(data), "gpt2", key)


def a_grid() -> SweepData:
    rows = [
        row(10.0 * number, mode=mode, model__batch_size=size, metrics={"devices_used": used})
        for number, ((mode, used), size) in enumerate(
            product((("a", 1.0), ("b", 4.0)), ("1", "2", "64")), start=1
        )
    ]
    return sweep([*rows, unfit(mode="c", model__batch_size="64")], "mode", "model.batch_size")


def test_the_pareto_plot_has_each_job_once_and_names_the_best() -> None:
    svg = pareto_svg(a_grid())
    jobs = [tip for tip in tips(svg) if tip.startswith("mode=")]
    assert len(jobs) == 6
    assert "mode=a model.batch_size=1\n10.000 ms, 1.500 GiB, 1 device used" in jobs
    assert "best: a · 1" in texts(svg)
    assert {"devices used", "1", "4", "latency, ms"} <= set(texts(svg))


def test_points_are_where_their_numbers_are() -> None:
    peaks = ((1.0, 300.0), (2.0, 200.0), (3.0, 100.0))
    data = sweep([row(time, metrics={"peak_memory_gib": peak}) for peak, time in peaks])
    shapes = re.findall(
        r'<path d="M([\d.]+) ([\d.]+)m[^>]*><title>a job\n(\S+) ms', pareto_svg(data)
    )
    places = {float(ms): (float(x), float(y)) for x, y, ms in shapes}
    assert places[300.0] < places[200.0] < places[100.0]  # the less memory, the further left
    assert places[300.0][1] < places[200.0][1] < places[100.0][1]  # the slower, the higher
    middle = (places[300.0][1] + places[100.0][1]) / 2
    assert places[200.0][1] == pytest.approx(middle, abs=0.2)


def test_many_numbers_of_devices_share_a_mark() -> None:
    rows = [row(float(used), metrics={"devices_used": float(used)}) for used in range(1, 10)]
    assert "6 or more" in texts(pareto_svg(sweep(rows)))


def test_a_numeric_parameter_has_an_axis_and_shows_jobs_that_do_not_fit() -> None:
    svg = parameter_svg(a_grid(), "model.batch_size")
    assert {"1", "2", "64", "x does not fit", "a", "b"} <= set(texts(svg))
    assert "model.batch_size=64: 1 of 3 do not fit" in tips(svg)
    assert len([tip for tip in tips(svg) if tip.startswith("mode=")]) == 6


def test_a_parameter_of_names_has_a_line_for_each() -> None:
    svg = parameter_svg(a_grid(), "mode")
    labels = texts(svg)
    assert labels.index("a") < labels.index("b") < labels.index("c")
    assert {"10.000", "40.000", "1 of 1", "do not fit", "-"} <= set(labels)


@pytest.mark.parametrize("key", ["mode", "model.batch_size"])
def test_of_many_jobs_the_spread_is_drawn(key: str) -> None:
    rows = [
        row(float(n + 1), mode=mode, model__batch_size=size, transfer_rate=f"{n}gb")
        for mode in ("a", "b")
        for size in ("1", "2")
        for n in range(10)
    ]
    svg = parameter_svg(sweep(rows, "mode", "model.batch_size", "transfer_rate"), key)
    value = {"mode": "a", "model.batch_size": "1"}[key]
    spread = f"{key}={value}: 20 jobs, 1.000 to 10.000 ms, median 5.500 ms"
    assert spread in tips(svg)


def test_trials_of_a_search_are_drawn_one_by_one() -> None:
    rows = [row(10.0 + n, mode__x=f"{n / 7:.4f}", mode__y=f"{-n / 3:.4f}") for n in range(30)]
    svg = parameter_svg(sweep(rows, "mode.x", "mode.y"), "mode.x")
    assert len([tip for tip in tips(svg) if tip.startswith("mode.x=")]) == 30
    assert not [tip for tip in tips(svg) if "median" in tip]


def test_of_many_values_some_are_drawn() -> None:
    rows = [row(float(n), mode=f"m{n}") for n in range(60)]
    assert "and 20 more values" in texts(parameter_svg(sweep(rows, "mode"), "mode"))


def test_the_heat_map_has_the_best_of_each_pair() -> None:
    rows = [
        row(30.0, mode="a", devices="2x16gb", transfer_rate="slow"),
        row(20.0, mode="a", devices="2x16gb", transfer_rate="fast"),
        row(5.25, mode="b", devices="16x16gb", transfer_rate="fast"),
        unfit(mode="b", devices="2x16gb"),
    ]
    ranking = ranked(sweep(rows, "transfer_rate", "devices", "mode"))
    assert heat_map_keys(ranking) == ("mode", "devices")
    svg = heat_map_svg(ranking, "gpt2", ("mode", "devices"))
    assert tips(svg) == [
        "mode=b devices=2x16gb: does not fit",
        "mode=b devices=16x16gb: 5.250 ms",
        "mode=a devices=2x16gb: 20.000 ms",
    ]
    assert {"does not fit", "5.250", "20.00"} <= set(texts(svg))


def test_a_heat_map_needs_two_parameters() -> None:
    assert heat_map_keys(ranked(sweep([row(1.0, mode="a"), row(2.0, mode="b")]))) is None
    assert heat_map_keys(ranked(a_grid())) == ("mode", "model.batch_size")


def test_without_a_result_there_is_no_figure() -> None:
    data = sweep([unfit(mode="a"), unfit(mode="b")], "mode")
    assert (pareto_svg(data), parameter_svg(data, "mode")) == ("", "")


def test_a_heat_map_shows_one_model_and_never_several() -> None:
    rows = [
        row(ms, model__config__n=n, mode=mode, devices=devices)
        for n, ms in (("1", 10.0), ("8", 80.0))
        for mode in "ab"
        for devices in ("2x16gb", "4x16gb")
    ]
    rows.append(unfit(model__config__n="8", mode="c", devices="2x16gb"))
    ranking = ranked(sweep(rows, "model.config.n", "devices", "mode"))
    assert heat_map_keys(ranking) == ("mode", "devices")
    svg = heat_map_svg(ranking, "n=1", ("mode", "devices"))
    assert len(tips(svg)) == 4
    assert all(tip.endswith(": 10.000 ms") for tip in tips(svg))
    figure = parameter_figure(ranking, "n=8", "mode")
    assert "1 of 1" in texts(figure)
    assert not [tip for tip in tips(figure) if "10.000 ms" in tip]
    of_all = parameter_figure(ranking, None, "model.config.n")
    assert [sum(f"{ms}.000 ms" in tip for tip in tips(of_all)) for ms in (10, 80)] == [4, 4]
    two = sweep([row(1.0, model__config__n=n, mode=m) for n in "18" for m in "ab"])
    assert heat_map_keys(ranked(two)) is None

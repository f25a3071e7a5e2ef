"""The drawing of a schedule."""

import re
from xml.etree import ElementTree

import pytest

from fxpart.schedule import PipelineCosts, ScheduleResult, StageCost, simulate_schedule
from runner.output.schedule_plot import MOST_HIGH, schedule_svg
from tests.runner.output.test_figures import SVG, words
from tests.runner.pipelines import step_forward, step_of_training


def boxes(svg: str) -> dict[str, ElementTree.Element]:
    """Return the boxes of the events by their tooltips."""
    rectangles = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    tips = {rect.findtext(f"{SVG}title"): rect for rect in rectangles}
    return {tip: rect for tip, rect in tips.items() if tip}


def pipeline(name: str, devices: int, chunks: int, microbatches: int) -> ScheduleResult:
    stages = tuple(
        StageCost(device=stage % devices, forward_s=0.001, backward_s=0.002)
        for stage in range(devices * chunks)
    )
    return simulate_schedule(name, PipelineCosts(stages, (), training=True), microbatches)


@pytest.mark.parametrize(
    "result",
    [
        step_forward(),
        step_of_training(),
        pipeline("1f1b", 4, 1, 8),
        pipeline("interleaved", 2, 6, 4),
    ],
)
def test_a_box_for_each_event(result: ScheduleResult) -> None:
    svg = schedule_svg(result)
    assert len(boxes(svg)) == len(result.events)
    assert svg == schedule_svg(result)
    assert "nan" not in svg


def test_boxes_lie_where_their_times_are() -> None:
    result = step_of_training()
    drawn = boxes(schedule_svg(result))
    forward = drawn["forward of microbatch 0, stage 0: 0.00 ms to 1000 ms"]
    last = drawn["backward of microbatch 1, stage 0: 7000 ms to 8000 ms"]
    other_stage = drawn["backward of microbatch 1, stage 1: 5000 ms to 6000 ms"]
    x = {name: float(str(box.get("x"))) for name, box in (("f", forward), ("l", last))}
    # Seven steps of equal width from the first to the last.
    width = float(str(forward.get("width"))) + 0.8
    assert x["l"] - x["f"] == pytest.approx(7 * width, abs=1)
    assert forward.get("y") == last.get("y") != other_stage.get("y")
    assert forward.get("fill") != last.get("fill") == other_stage.get("fill")


def test_texts_of_the_drawing() -> None:
    seen = words(schedule_svg(step_of_training()))
    assert seen[0] == "gpipe: training step 8000 ms, bubble 50.0%, 2 microbatches"
    assert {"forward", "backward", "device 0", "device 1", "the number is the microbatch"} <= {
        *seen
    }
    assert [tick for tick in seen if tick.endswith("000 ms")] == [f"{i}000 ms" for i in range(1, 9)]
    assert seen.count("0") == seen.count("1") == 4
    assert any(word.endswith("50% busy") for word in seen)
    assert "backward" not in words(schedule_svg(step_forward()))


def test_stages_of_a_device_are_distinguished() -> None:
    drawn = schedule_svg(pipeline("interleaved", 2, 6, 4))
    seen = words(drawn)
    assert [word for word in seen if word.startswith("stages ")] == [
        "stages 0-1",
        "stages 2-3",
        "stages 4-5",
        "stages 6-11",
    ]
    fills = {
        tip.partition(":")[0].rpartition(" ")[2]: box.get("fill")
        for tip, box in boxes(drawn).items()
        if tip.startswith("forward of microbatch 0")
    }
    assert fills["0"] == fills["1"]
    assert len({fills[stage] for stage in ("0", "2", "4", "6")}) == 4
    assert fills["6"] == fills["8"] == fills["10"]


def test_numbers_that_do_not_all_fit_are_left_out() -> None:
    seen = words(schedule_svg(pipeline("gpipe", 2, 1, 200)))
    assert "7" not in seen
    assert "the number is the microbatch" not in seen


def test_one_digit_is_left_out_where_two_do_not_fit() -> None:
    """Of 31 equal steps over 882 pixels, a forward has 9 and a backward 19."""
    seen = words(schedule_svg(pipeline("gpipe", 2, 1, 30)))
    assert seen.count("5") == seen.count("25") == 2
    assert "the number is the microbatch" in seen


def test_a_long_step_stays_a_small_file() -> None:
    result = pipeline("gpipe", 2, 1, 5000)
    svg = schedule_svg(result)
    assert len(result.events) == 20_000
    # Little more than one for each of some 900 pixels, for both passes and devices.
    assert svg.count("<rect") < 4000
    # No busy time of device 1 is left white before its last forward.
    drawn = [box for tip, box in boxes(svg).items() if re.match(r"forward.*stage 1:", tip)]
    right = 0.0
    for box in drawn:
        x, width = float(str(box.get("x"))), float(str(box.get("width")))
        assert not right or x - right < 0.5
        right = x + width


def test_many_devices_have_low_rows() -> None:
    few, many = (schedule_svg(pipeline("gpipe", count, 1, 2)) for count in (24, 60))
    assert few.count('height="30"') > MOST_HIGH
    assert 'height="30"' not in many
    height = float(str(ElementTree.fromstring(many).get("height")))
    assert height < 60 * 20 + 120


def test_a_step_that_takes_no_time() -> None:
    stages = tuple(StageCost(device=device, forward_s=0.0) for device in range(2))
    costs = PipelineCosts(stages, (), training=False)
    svg = schedule_svg(simulate_schedule("gpipe", costs, 2))
    assert words(svg)[0] == "gpipe: step 0.00 ms, bubble 0.0%, 2 microbatches"
    assert "0% busy" in svg
    assert "nan" not in svg


def test_sums_and_updates_are_drawn_apart() -> None:
    stages = (
        StageCost(0, 1.0, 1.0, update_s=1.0, reduce_s=2.0),
        StageCost(1, 1.0, 1.0, update_s=0.0),
    )
    svg = schedule_svg(simulate_schedule("gpipe", PipelineCosts(stages, (), training=True), 1))
    drawn = boxes(svg)
    # Forward and backward there and back take 4 s.
    sums = drawn["sums over replicas: 4000 ms to 6000 ms"]
    update = drawn["updates of stage 0: 6000 ms to 7000 ms"]
    last = drawn["backward of microbatch 0, stage 0: 3000 ms to 4000 ms"]
    assert len(drawn) == 4 + 2
    assert sums.get("y") == update.get("y") == last.get("y")
    assert len({box.get("fill") for box in (sums, update, last)}) == 3
    assert {"sums over replicas", "updates"} <= {*words(svg)}
    assert "updates" not in words(schedule_svg(step_of_training()))

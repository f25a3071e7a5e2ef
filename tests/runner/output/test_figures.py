import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fxpart.core.topology import DeviceSpec, Link, Topology, uniform_topology
from fxpart.errors import CacheError, SpecError
from runner.output.figures import (
    MOST_OPERATORS,
    check_figures,
    wants_figures,
    wants_traces,
    write_figures,
)
from runner.output.memory_plot import memory_svg
from runner.output.partition_plot import partition_graph_svg, suits_boxes
from runner.output.partition_summary import Edge, columns, device_matrix, summarise
from runner.output.svg import DARK, IN_PAGE, LIGHT
from tests.cost.training_step import step
from tests.runner.scene import Scene, fork, long_chain, scene
from tests.sketch import Sketch, devices, random_graph

SVG = "{http://www.w3.org/2000/svg}"


def words(svg: str) -> list[str]:
    """Return the visible text of the drawing, without tooltips."""
    return [node.text or "" for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def graph_of(what: Scene) -> str:
    return partition_graph_svg(what.graph, what.assignment, what.evaluation)


def memory_of(what: Scene) -> str:
    return memory_svg(what.graph, what.assignment, what.evaluation)


def test_summary_of_a_fork() -> None:
    what = fork()
    summary = summarise(what.graph, what.assignment, what.evaluation)
    assert summary.operators.tolist() == [1, 1, 2]
    assert summary.weight_bytes.tolist() == [10, 20, 30]
    assert summary.time_s.tolist() == [3.0, 2.0, 6.0]
    # The 4 bytes are sent to device 1 once, for partition 1; partition 2 finds them there.
    assert summary.edges == (Edge(0, 1, True, 4), Edge(0, 2, True, 0), Edge(1, 2, False, 0))
    assert columns(summary) == [0, 1, 2]
    assert device_matrix(summary) == {(0, 1): 4}


@pytest.mark.parametrize("seed", range(6))
def test_edges_add_up_to_the_bytes_sent(seed: int) -> None:
    part = [op // 5 for op in range(40)]
    homes: list[tuple[int, ...]] = [((seed + p * 5) % 3,) for p in range(8)]
    what = scene(random_graph(seed, 40), devices(999, 999, 999), part, homes)
    summary = summarise(what.graph, what.assignment, what.evaluation)
    assert sum(edge.sent_bytes for edge in summary.edges) == what.evaluation.transfer_bytes
    column = columns(summary)
    assert all(column[edge.source] < column[edge.target] for edge in summary.edges)
    places = list(zip(column, summary.device.tolist(), strict=True))
    assert len(set(places)) == len(places)


def test_few_partitions_have_labelled_boxes() -> None:
    seen = words(graph_of(fork()))
    assert seen[0] == "3 partitions on 2 devices: 15.00 s, 4 B transferred"
    assert {"P0, 1 op", "P1, 1 op", "P2, 2 ops", "30 B", "6000 ms", "4 B"} <= set(seen)
    assert {"stem", "left", "body +1"} <= set(seen)
    assert {"device 0", "device 1"} <= set(seen)
    assert "device 2" not in seen


def test_replicas_are_named() -> None:
    what = fork()
    homes = [(0,), (1, 2), (1,)]
    copied = scene(what.graph, what.topology, what.assignment.partition_of.tolist(), homes)
    assert "P1 (+ 2), 1 op" in words(graph_of(copied))


def test_partitions_are_named_after_their_modules() -> None:
    """Numbered modules are a range, however many numbers are below."""
    what = long_chain(8, 2, 2)
    layers = [f"model.layers.{op}.mlp.experts.{op % 2}" for op in range(6)]
    paths = ("model.embed", *layers, "lm_head")
    named = what._replace(graph=replace(what.graph, modules=paths))
    summary = summarise(named.graph, named.assignment, named.evaluation)
    assert summary.modules == (("layers 0-2", "embed"), ("layers 3-5", "lm_head"))
    assert {"layers 0-2 +1", "layers 3-5 +1"} <= set(words(graph_of(named)))
    assert "partition 0 on device 0: layers 0-2, embed" in graph_of(named)
    assert any(word.endswith(", backward") for word in words(graph_of(two_halves(trained()))))


def test_figures_begin_with_the_subject() -> None:
    what, line = fork(), "gpt2, 124M parameters, float32"
    for svg in (
        partition_graph_svg(what.graph, what.assignment, what.evaluation, line),
        memory_svg(what.graph, what.assignment, what.evaluation, line),
    ):
        assert words(svg)[0] == line


def two_halves(what: Scene) -> Scene:
    """Return a step whose forward and backward are on two devices."""
    part = what.graph.is_backward.astype(int).tolist()
    return scene(what.graph, devices(999, 999), part, [(0,), (1,)])


def test_a_waiting_device_shows_its_weights_alone() -> None:
    what = fork()
    copied = scene(
        what.graph, what.topology, [0, 1, 2, 2], [(0, 2), (1,), (1,)]
    )  # device 2 holds a copy of op0
    assert "peak 16 of 300 B, waits for its turn" in words(memory_of(copied))
    title = words(graph_of(copied))[0]
    assert title.endswith("4 B transferred, the first of 2 inputs in turn")


def test_many_partitions_are_drawn_over_the_time_of_their_devices() -> None:
    what = long_chain(600, 300, 4)
    summary = summarise(what.graph, what.assignment, what.evaluation)
    assert not suits_boxes(summary)
    svg = graph_of(what)
    tips = re.findall(r"<title>(P\d+):", svg)
    assert set(tips) == {f"P{number}" for number in range(300)}
    assert "busy" in words(svg)
    # Boxes of a device are as wide as it is busy: of 760 pixels for the whole time.
    part = what.assignment.partition_of.tolist()
    slow = scene(what.graph, devices(*[10**6] * 4), part, [(p % 4,) for p in range(300)])
    boxes = [
        (float(r.attrib["y"]), float(r.attrib["width"]))
        for r in ElementTree.fromstring(graph_of(slow)).iter(f"{SVG}rect")
        if (r.findtext(f"{SVG}title") or "").startswith("P")
    ]
    for row, y in enumerate(sorted({y for y, _ in boxes})):
        load_s = slow.evaluation.devices[row].load_s
        expected = 760 * load_s / slow.evaluation.latency_s
        assert sum(wide for top, wide in boxes if top == y) == pytest.approx(expected, rel=0.05)
    assert not any(re.fullmatch(r"P\d+", word) for word in words(svg))
    pair = device_matrix(summary)[0, 1]
    assert f"device 0 to 1: {pair} B" in svg
    assert str(pair) in words(svg)


def test_many_devices_do_not_break_it() -> None:
    svg = graph_of(long_chain(200, 200, 40))
    assert "39: d39" in words(svg)


def test_labels_do_not_overlap_boxes() -> None:
    """The arrow from the first to the third lane passes behind the box in the second."""
    sketch = Sketch()
    a = sketch.op([sketch.input(1)], 7)
    b = sketch.op([a], 5)
    c = sketch.op([a, b], 1)
    three = scene(sketch.graph(c), devices(99, 99, 99), [0, 1, 2], [(0,), (1,), (2,)])
    root = ElementTree.fromstring(graph_of(three))
    boxes = [
        (float(r.attrib["x"]), float(r.attrib["y"]))
        for r in root.iter(f"{SVG}rect")
        if r.find(f"{SVG}title") is not None
    ]
    labels = [t for t in root.iter(f"{SVG}text") if "paint-order" in t.attrib]
    assert len(boxes) == 3
    assert sorted(label.text or "" for label in labels) == ["5 B", "7 B", "7 B"]
    for label in labels:
        x, y = float(label.attrib["x"]), float(label.attrib["y"])
        assert not any(bx < x < bx + 120 and by < y < by + 80 for bx, by in boxes)


def test_memory_names_devices_peaks_and_units() -> None:
    what = fork()
    seen = words(memory_of(what))
    peak = what.evaluation.devices[1].peak_bytes
    assert {"Memory held over one run", "weights", "other tensors", "capacity"} <= set(seen)
    assert {"the device, B", "beside weights and their state, over time, B"} <= set(seen)
    assert f"peak {peak} of 200 B, at body.right (op)" in seen
    assert "time in s" in seen
    assert "device 2: d2" not in seen


def test_memory_area_is_drawn_to_scale() -> None:
    """With 200 bytes on 110 pixels and a tenth of headroom, the 50 bytes of weights take 25."""
    root = ElementTree.fromstring(memory_of(fork()))
    heights = [
        float(r.attrib["height"])
        for r in root.iter(f"{SVG}rect")
        if "weights 50 B" in (r.findtext(f"{SVG}title") or "")
    ]
    assert heights == [25.0]


def test_live_tensors_are_visible_beside_large_weights() -> None:
    """On a scale of its own: a thousandth of the weights is as high as the panel."""
    what = fork()
    heavy = replace(what.graph, weight_bytes=what.graph.weight_bytes * 1000)
    part = what.assignment.partition_of.tolist()
    large = scene(heavy, devices(10**5, 10**5), part, [(0,), (1,), (1,)])
    paths = re.findall(r'<path d="M[\d.]+ ([\d.]+)(H[^"]*)z" fill="#', memory_of(large))
    rises = [
        float(base) - min(map(float, re.findall(r"V([\d.]+)", steps))) for base, steps in paths
    ]
    assert max(rises) == pytest.approx(110 / 1.1, rel=0.02)


def small_on(topology: Topology) -> Scene:
    what = fork()
    part = what.assignment.partition_of.tolist()
    return scene(what.graph, topology, part, [(0,), (1,), (1,)])


def test_memory_shows_what_does_not_fit() -> None:
    tight = words(memory_of(small_on(devices(100, 40))))
    assert any("of 40 B, does not fit, at " in word for word in tight)
    ample = words(memory_of(small_on(devices(10**4, 10**4))))
    assert not any("does not fit" in word for word in ample)


def trained() -> Scene:
    """Return a training step on one device of 200 bytes, 50 of which are reserved."""
    graph = step()
    spec = DeviceSpec("d0", 150, {"float32": 1.0}, 1.0, reserved_bytes=50)
    return scene(graph, uniform_topology((spec,), Link(1.0)), [0] * 6, [(0,)])


def test_memory_of_a_training_step_is_drawn_by_kind() -> None:
    svg = memory_of(trained())
    seen = words(svg)
    assert seen[1:6] == [
        "weights",
        "optimizer state",
        "gradients",
        "saved activations",
        "other tensors",
    ]
    # 30 bytes of weights, 25 of state, 3 of input and 21 of tensors at the last operator.
    assert "peak 79 of 200 B, 50 reserved, at net.one (add in the backward)" in seen
    assert "<title>the peak, at net.one (add in the backward)</title>" in svg
    assert "<title>reserved 50 B</title>" in svg
    assert "<title>optimizer state 25 B</title>" in svg


def test_a_long_place_is_shown_from_its_end() -> None:
    what = trained()
    modules = ("module." * 30 + "last",) * 6
    named = what._replace(graph=replace(what.graph, modules=modules))
    (says,) = [word for word in words(memory_of(named)) if word.startswith("peak 79")]
    assert re.search(r"at \.\.\.[a-z.]+\.last \(add in the backward\)$", says)
    assert len(says) < 125


def test_a_graph_without_time_or_bytes_can_be_drawn() -> None:
    sketch = Sketch()
    value = sketch.op([sketch.input(0)], 0)
    empty = scene(sketch.graph(value), devices(10), [0], [(0,)])
    ElementTree.fromstring(memory_of(empty))
    assert "P0, 1 op" in words(graph_of(empty))


def test_figures_are_small_offline_and_repeatable(tmp_path: Path) -> None:
    what = long_chain(2700, 12, 4)
    for folder in ("a", "b"):
        write_figures(tmp_path / folder, what.graph, what.assignment, what.evaluation)
    paths = sorted((tmp_path / "a").iterdir())
    assert [path.name for path in paths] == ["memory.svg", "partition_graph.svg"]
    for path in paths:
        text = path.read_text()
        assert text == (tmp_path / "b" / path.name).read_text()
        assert text.count("http") == 1  # the name of the format, which nobody fetches
        assert "<script" not in text
        assert len(text) < 200_000


def test_names_cannot_break_the_drawing() -> None:
    what = small_on(devices(100, 100))
    use = what.evaluation.devices[0]
    object.__setattr__(use, "name", '<b>&"')
    assert any('<b>&"' in word for word in words(memory_of(what)))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    what = fork()
    with pytest.raises(CacheError, match="cannot write"):
        write_figures(tmp_path / "file", what.graph, what.assignment, what.evaluation)


@pytest.mark.parametrize(
    ("figures", "operators", "in_sweep", "drawn", "traced"),
    [
        ("auto", MOST_OPERATORS, True, True, False),
        ("auto", MOST_OPERATORS + 1, True, False, False),
        ("auto", MOST_OPERATORS + 1, False, True, True),
        ("all", MOST_OPERATORS + 1, True, True, True),
        ("none", 1, False, False, False),
    ],
)
def test_chosen_figures_are_drawn(
    figures: str, operators: int, in_sweep: bool, drawn: bool, traced: bool
) -> None:
    assert wants_figures(figures, operators, in_sweep=in_sweep) is drawn
    assert wants_traces(figures, in_sweep=in_sweep) is traced


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(SpecError, match="figures=every does not exist; write auto, all, none"):
        check_figures("every")


def test_all_colours_are_of_one_palette() -> None:
    palette = set(LIGHT.variables().values())
    for svg in (graph_of(fork()), graph_of(long_chain(600, 300, 4)), memory_of(trained())):
        assert set(re.findall(r"(?:fill|stroke)=\"(#[^\"]+)", svg)) <= palette
    assert set(DARK.variables()) == set(LIGHT.variables())
    assert set(IN_PAGE.variables().values()) == {f"var(--{name})" for name in LIGHT.variables()}

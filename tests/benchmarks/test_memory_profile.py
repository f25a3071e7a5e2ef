"""The comparison of memory profiles detects profiles that differ."""

import pytest

from benchmarks import memory_profile
from benchmarks.memory_profile import SHAPES, compare_profiles, main
from fxpart.torch_compat.memory import build_memory_profile


def test_a_graph_has_about_the_given_number_of_nodes() -> None:
    peaks = {
        shape: max(build_memory_profile(make(50), lambda _: False))
        for shape, make in SHAPES.items()
    }
    assert peaks == {
        "operators in a row": 51 * 16,
        "views of views": 16,
        "items of a tuple": 51 * 16,
    }
    assert [len(make(50).nodes) for make in SHAPES.values()] == [52, 52, 53]


def test_each_shape_and_size_has_a_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_profile, "_MAX_ITEMS", 20)
    main(["200", "1"])
    heads, *rows = capsys.readouterr().out.splitlines()
    assert heads.split()[0] == "graph"
    assert len(rows) == 9
    assert [row.split()[-1] == "-" for row in rows] == [False] * 8 + [True]


def test_differing_profiles_end_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = "torch._inductor.fx_passes.memory_estimator.build_memory_profile"
    monkeypatch.setattr(builder, lambda *_: [0])
    with pytest.raises(SystemExit, match="views of views, 9 nodes: the profiles differ"):
        compare_profiles("views of views", 9, 1)

import math

import pytest

from runner.tracking.mlflow_values import (
    batches,
    finite_metrics,
    legal_names,
    param_texts,
    tag_texts,
    thin,
)


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("latency_ms", "latency_ms"),
        ("time/trace_s", "time/trace_s"),
        ("a+b@c=d,e", "a_b_c_d_e"),
        ("kl·based", "kl_based"),
        ("a//b/", "a/b"),
        ("/a", "a"),
        ("../a/./b", "a/b"),
        ("", "_"),
        ("//", "_"),
        ("x" * 300, "x" * 250),
    ],
)
def test_legal_name(name: str, legal: str) -> None:
    assert legal_names([name]) == {name: legal}


def test_names_that_become_equal_stay_apart() -> None:
    assert legal_names(["a+b", "a=b", "a_b"]) == {"a+b": "a_b", "a=b": "a_b_2", "a_b": "a_b_3"}
    long = legal_names(["x" * 300, "x" * 301])
    assert len(set(long.values())) == 2
    assert max(map(len, long.values())) <= 250


def test_metrics_that_are_not_finite_are_left_out() -> None:
    metrics = {"a": 1, "b": math.inf, "c": -math.inf, "d": math.nan, "e": 0.5}
    assert finite_metrics(metrics) == {"a": 1.0, "e": 0.5}


def test_params_read_like_yaml_and_are_cut() -> None:
    params = {"n": 4, "none": None, "yes": True, "list": [1, 2], "long": "x" * 7000}
    texts = param_texts(params)
    assert texts == {
        "n": "4",
        "none": "null",
        "yes": "true",
        "list": "[1, 2]",
        "long": "x" * 5999 + "…",
    }


def test_tags_are_cut() -> None:
    assert tag_texts({"error": "x" * 8000, "long": "y" * 8001}) == {
        "error": "x" * 8000,
        "long": "y" * 7999 + "…",
    }


def test_characters_that_no_database_accepts_are_replaced() -> None:
    assert tag_texts({"error": "a\0b\udc80c"}) == {"error": "a?b?c"}
    assert param_texts({"name": "\udc80ä"}) == {"name": "?ä"}


def test_thin_keeps_a_short_series_as_it_is() -> None:
    assert thin([(3, 1.0), (7, 2.0)]) == [(3, 1.0), (7, 2.0)]
    assert thin([(0, 1.0), (1, math.inf), (2, 3.0)]) == [(0, 1.0), (2, 3.0)]
    assert thin([]) == []


def test_thin_keeps_the_largest_of_each_stretch_with_its_step() -> None:
    # Stretches of 10 with at most 4 points: steps 0-2, 3-5, 6-8, and the last.
    series = [(step, value) for step, value in enumerate([1, 5, 2, 9, 8, 7, 0, 0, 4, 3])]
    assert thin(series, max_points=4) == [(1, 5.0), (3, 9.0), (8, 4.0), (9, 3.0)]


def test_thin_keeps_the_best_that_a_search_has_found() -> None:
    best = [(step, 200.0 - step) for step in range(150)]
    assert thin(best)[-1] == (149, 51.0)


def test_thin_of_many_points_keeps_the_peak() -> None:
    series = [(step, 100.0 if step == 1717 else step / 2700) for step in range(2700)]
    thinned = thin(series)
    assert len(thinned) == 100
    assert (1717, 100.0) in thinned
    assert thinned == sorted(thinned)


def test_batches_respect_every_limit_and_lose_nothing() -> None:
    metrics, params, tags = list(range(2500)), list(range(250)), list(range(130))
    sent = list(batches(metrics, params, tags))
    assert [len(batch.params) for batch in sent] == [100, 100, 50, 0]
    assert [len(batch.metrics) for batch in sent] == [900, 900, 700, 0]
    assert [len(batch.tags) for batch in sent] == [0, 0, 100, 30]
    for joined, whole in ((0, metrics), (1, params), (2, tags)):
        assert [item for batch in sent for item in batch[joined]] == whole


def test_tags_are_sent_last() -> None:
    (first, last) = batches([1] * 990, [2] * 10, [3])
    assert (len(first.metrics), len(first.params), first.tags) == (990, 10, [])
    assert last.tags == [3]
    (only,) = batches([1] * 989, [2] * 10, [3])
    assert only.tags == [3]


def test_nothing_to_send_is_no_batch() -> None:
    assert list(batches([], [], [])) == []

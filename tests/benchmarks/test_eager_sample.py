"""Eager memory of a random sample: the counts of its summary, and one row of it."""

from benchmarks.eager_sample import Comparison, compare, summary


def test_a_row_compares_a_forward_and_a_step() -> None:
    row = compare("GLPNModel")
    assert (row.status, row.reason) == ("compared", "")
    assert row.forward is not None
    assert row.step is not None
    for predicted, counted in (row.forward, row.step):
        assert abs(predicted - counted) <= 4  # of the loss
    assert row.step[0] > 3 * row.forward[0]


def test_large_and_unknown_classes_are_no_comparisons() -> None:
    assert compare("LlamaForCausalLM").status == "large"
    refused = compare("Sam3VideoModel")
    assert refused.status == "refused"
    assert "needs inference_session" in refused.reason


def test_errors_are_counted_by_size() -> None:
    rows = [
        Comparison("A", "compared", forward=(1000, 1000), step=(995, 1000)),
        Comparison("B", "compared", "too random", forward=(1020, 1000)),
        Comparison("C", "large"),
    ]
    assert list(summary(rows)) == [
        "2 compared, 1 large",
        "forward: 2 compared, 1 within 0.1 %, 1 within 1 %; the largest error 2.00 %",
        "step: 1 compared, 0 within 0.1 %, 1 within 1 %; the largest error 0.50 %",
    ]

"""A case has torch's sizes, latencies that can be checked by hand, and independent copies."""

import pytest
from torch.fx.passes.graph_manipulation import get_size_of_all_nodes

from benchmarks.static_case import (
    NAME,
    equal_shares,
    fresh_copy,
    make_case,
    random_case,
    sparse_case,
)
from benchmarks.torch_families import chain, residual, transformer


def test_two_linear_layers_by_hand() -> None:
    case = make_case("two", chain(2), (0.5, 1.0), 1.0)
    weights, output = (64 * 64 + 64) * 4, 4 * 64 * 4
    assert case.total_bytes == 2 * (weights + output) + output
    assert case.memory_bytes == (case.total_bytes // 2, case.total_bytes)
    # Weights, output and input at 1e10 bytes/s; two operations per weight and row at 1e10 FLOP/s.
    expected = pytest.approx(((weights + 2 * output) / 1e10, 2 * 4 * 64 * 64 / 1e10))
    assert [case.latency_s[name] for name in case.operators] == [expected, expected]
    # At ratio 1 the transfer of one output takes as long as one layer.
    assert output / case.bytes_per_s == pytest.approx(max(case.latency_s[case.operators[0]]))


def test_ten_times_the_ratio_is_a_tenth_of_the_rate() -> None:
    slow, fast = (make_case("r", residual(1), (1.0,), ratio) for ratio in (10.0, 1.0))
    assert slow.bytes_per_s == pytest.approx(fast.bytes_per_s / 10)


def test_a_matrix_product_counts_two_operations_per_element_and_inner_step() -> None:
    case = make_case("block", transformer(1), (1.0,), 1.0)
    # Scores: 8 x 8 elements over 64 numbers; the mixed values: 8 x 64 over 8.
    assert case.latency_s["matmul"][1] * 1e10 == pytest.approx(2 * 8 * 8 * 64)
    assert case.latency_s["matmul_1"][1] * 1e10 == pytest.approx(2 * 8 * 64 * 8)


@pytest.mark.parametrize("case", [random_case(3), random_case(4), sparse_case(1)])
def test_the_total_size_is_that_of_torch(case: object) -> None:
    from benchmarks.static_case import Case

    assert isinstance(case, Case)
    traced = fresh_copy(case)
    get_size_of_all_nodes(traced, list(case.inputs))
    nodes = [node for node in traced.graph.nodes if node.op != "output"]
    assert sum(node.size_bytes.total_size for node in nodes) == case.total_bytes


def test_a_copy_has_the_same_names_and_weights_but_no_common_nodes() -> None:
    case = random_case(7)
    first, second = fresh_copy(case), fresh_copy(case)
    names = [node.name for node in case.traced.graph.nodes]
    assert [node.name for node in first.graph.nodes] == names
    assert [node.meta[NAME] for node in second.graph.nodes] == names
    next(iter(first.graph.nodes)).size_bytes = 1
    assert not hasattr(next(iter(second.graph.nodes)), "size_bytes")
    weights = dict(case.traced.named_parameters())
    assert weights
    assert all(weights[name] is weight for name, weight in first.named_parameters())


def test_random_cases_respect_their_bounds_and_seed() -> None:
    for seed in range(20):
        case = random_case(seed, 8, 16)
        assert 8 <= len(case.operators) <= 16
        assert 2 <= len(case.memory_bytes) <= 5
        shares = [memory / case.total_bytes for memory in case.memory_bytes]
        assert 0.299 <= min(shares) <= max(shares) <= 0.9
    first, again = random_case(9), random_case(9)
    assert (first.memory_bytes, first.bytes_per_s) == (again.memory_bytes, again.bytes_per_s)
    assert first.latency_s == again.latency_s


def test_equal_shares_sum_to_the_slack() -> None:
    assert equal_shares(4) == (0.45,) * 4
    assert sum(equal_shares(3, 1.2)) == pytest.approx(1.2)

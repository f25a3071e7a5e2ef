"""Growth exponents, and runs of torch in their own processes."""

import pytest

from benchmarks.compare_speed import growth
from benchmarks.torch_child import family_case, run_torch


def test_growth_is_the_exponent_of_a_power_law() -> None:
    sizes = [1, 10, 20, 40, 80]
    assert growth(sizes, [1e9, *(3.0 * n**2 for n in sizes[1:])]) == pytest.approx(2.0)
    assert str(growth([3], [1.0])) == "nan"


def test_a_run_in_its_own_process_returns_names() -> None:
    run = run_torch("chain", 4, 2, "kl_based", 60.0)
    assert run is not None
    assert not run.error
    assert 0 < run.seconds < 60
    assert list(run.partition_of) != []
    assert set(run.partition_of) == set(family_case("chain", 4, 2).operators)
    assert run.devices == {0: [0], 1: [1]}


def test_a_run_over_its_limit_has_no_answer() -> None:
    assert run_torch("chain", 40, 4, "cost_aware", 0.05) is None


def test_another_failure_of_a_run_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no_family"):
        run_torch("no_family", 4, 2, "kl_based", 60.0)

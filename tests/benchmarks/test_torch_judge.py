"""The numbers of the judge by hand, and every fault that it reports."""

import pytest

from benchmarks.static_case import Case, make_case
from benchmarks.torch_families import chain, residual
from benchmarks.torch_judge import make_judge


@pytest.fixture(name="case")
def _case() -> Case:
    return make_case("three", chain(3), (0.8, 0.8), 1.0)


def test_a_cut_chain_takes_its_layers_and_one_transfer(case: Case) -> None:
    first, second, third = case.operators
    verdict = make_judge(case).verdict({first: 0, second: 1, third: 1}, {0: [0], 1: [1]})
    layer_s = max(case.latency_s[first])
    # At ratio 1 a transfer takes as long as a layer.
    assert verdict.latency_s == pytest.approx(4 * layer_s)
    assert verdict.valid


def test_partitions_on_one_device_exchange_nothing(case: Case) -> None:
    first, second, third = case.operators
    judge = make_judge(case)
    apart = judge.verdict({first: 0, second: 1, third: 2}, {0: [0], 1: [0], 2: [1]})
    assert apart.latency_s == pytest.approx(4 * max(case.latency_s[first]))
    assert apart.valid


def test_too_many_bytes_on_one_device_are_a_fault(case: Case) -> None:
    verdict = make_judge(case).verdict(dict.fromkeys(case.operators, 0), {0: [1]})
    whole, memory = case.total_bytes, case.memory_bytes[1]
    assert verdict.fault == f"device 1 holds {whole} of {memory} bytes"
    assert verdict.latency_s > 0


def test_bytes_on_one_device_are_counted_together(case: Case) -> None:
    judge = make_judge(case)
    single = judge.verdict(dict.fromkeys(case.operators, 0), {0: [0]})
    first, second, third = case.operators
    divided = judge.verdict({first: 0, second: 0, third: 1}, {0: [0], 1: [0]})
    assert single.fault == divided.fault != ""


def test_a_partition_without_a_device_is_a_fault(case: Case) -> None:
    first, second, third = case.operators
    verdict = make_judge(case).verdict({first: 0, second: 1, third: 1}, {0: [0], 1: []})
    assert verdict.fault == "a partition without a device"


def test_an_unplaced_operator_is_a_fault(case: Case) -> None:
    verdict = make_judge(case).verdict({case.operators[0]: 0}, {0: [0]})
    assert verdict.fault == "2 operators without a partition"


def test_a_cycle_is_a_fault() -> None:
    case = make_case("block", residual(1), (1.0, 1.0), 1.0)
    up, relu, down, add = case.operators
    verdict = make_judge(case).verdict({up: 0, relu: 1, down: 0, add: 0}, {0: [0], 1: [1]})
    assert verdict.fault == "a cycle of partitions"

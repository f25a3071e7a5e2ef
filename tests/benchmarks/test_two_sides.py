"""Torch itself as a side: its answers in names, its errors, its limits."""

import gc
from dataclasses import replace

import pytest

from benchmarks.static_case import Case, equal_shares, make_case, random_case
from benchmarks.time_limit import OverLimitError
from benchmarks.torch_families import chain
from benchmarks.torch_judge import make_judge
from benchmarks.two_sides import TORCH, Question, solve


@pytest.fixture(name="case")
def _case() -> Case:
    return make_case("four", chain(4), equal_shares(2), 1.0)


def test_torch_fills_one_device_after_the_other(case: Case) -> None:
    answer = solve(TORCH, case, Question("size_based"))
    assert dict(answer.partition_of) == dict(zip(case.operators, (0, 0, 0, 1), strict=True))
    assert [part.devices for part in answer.partitions] == [(0,), (1,)]
    assert answer.emitted == answer.partition_of
    assert answer.same_outputs
    assert answer.seconds > 0
    assert answer.total_bytes == case.total_bytes


def test_an_ahead_of_time_mapping_is_followed(case: Case) -> None:
    aot = dict(zip(case.operators, (1, 1, 0, 0), strict=True))
    answer = solve(TORCH, case, Question("aot_based", aot=aot, aot_devices={0: [1], 1: [0]}))
    assert answer.partition_of == answer.emitted == aot
    assert [part.devices for part in answer.partitions] == [(1,), (0,)]


def test_an_error_is_an_answer(case: Case) -> None:
    answer = solve(TORCH, replace(case, memory_bytes=(1, 1)), Question("size_based"))
    assert answer.error == "RuntimeError: Devices do not have enough memory for the module"
    assert answer.runtime_error
    assert not answer.partitions


def test_a_run_over_the_limit_is_stopped() -> None:
    case = make_case("long", chain(40), equal_shares(4), 1.0)
    # Python swallows exceptions raised in a callback of the collector, such as hypothesis's.
    gc.disable()
    try:
        with pytest.raises(OverLimitError):
            solve(TORCH, case, Question("cost_aware"), limit_s=0.05)
    finally:
        gc.enable()


def test_torch_emits_another_module_than_its_kl_based_partitions() -> None:
    answers = [solve(TORCH, random_case(seed, 8, 12), Question("kl_based")) for seed in range(8)]
    assert any(answer.emitted != answer.partition_of for answer in answers)
    assert all(answer.same_outputs for answer in answers)


def test_a_chain_of_four_on_two_devices_takes_five_layers(case: Case) -> None:
    layers_s = sum(max(case.latency_s[name]) for name in case.operators)
    for question in (Question("kl_based"), Question("cost_aware")):
        answer = solve(TORCH, case, question)
        devices = {part.number: part.devices for part in answer.partitions}
        verdict = make_judge(case).verdict(answer.partition_of, devices)
        assert verdict.latency_s == pytest.approx(layers_s * 5 / 4)

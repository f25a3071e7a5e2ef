"""The architectures can be traced, run, and have the stated number of operators."""

import pytest
import torch
from torch import fx

from benchmarks.plain_models import LARGER, SMALL
from benchmarks.static_case import architecture_cases

OPERATORS = {
    "alexnet": 22,
    "vgg11": 30,
    "resnet, 3 blocks": 32,
    "googlenet, 2 modules": 38,
    "u-net, 2 levels": 27,
    "encoder, 1 block": 28,
    "dlrm": 21,
    "mlp-mixer, 2 blocks": 30,
    "resnet-18": 69,
    "googlenet, 4 modules": 66,
    "u-net, 4 levels": 49,
    "encoder, 3 blocks": 76,
    "mlp-mixer, 5 blocks": 66,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_architecture_traces_to_its_operators_and_computes_the_same(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = (SMALL | LARGER)[name]()
    module.eval()
    traced = fx.symbolic_trace(module)
    called = [node for node in traced.graph.nodes if node.op.startswith("call_")]
    assert len(called) == OPERATORS[name]
    with torch.no_grad():
        assert torch.equal(module(*inputs), traced(*inputs))


def test_sizes_stay_small_enough_for_torch() -> None:
    assert {*SMALL, *LARGER} == set(OPERATORS)
    assert max(OPERATORS[name] for name in SMALL) <= 40
    assert max(OPERATORS[name] for name in LARGER) <= 90


def test_architecture_cases_are_named_by_model_and_devices() -> None:
    cases = list(architecture_cases(small_only=True))
    assert [case.name for case in cases] == [f"{name}, 4 devices" for name in SMALL]
    assert {len(case.memory_bytes) for case in cases} == {4}

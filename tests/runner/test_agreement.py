"""What a pipeline computed is held against the unsplit model, by the rule of a local run."""

import math

import pytest
import torch
from torch import nn

from fxpart.errors import ExecutionError
from fxpart.pipeline.chain import Chain, chain_stages
from fxpart.pipeline.cut_points import generate_pipeline_partition
from runner.agreement import refuse_other_results

MICROBATCHES = [(torch.full((2, 4), float(number)),) for number in (1, 100)]
"""What `ones` makes of them: 5 and 401."""
ROUNDING = math.sqrt(torch.finfo(torch.float32).eps)


@pytest.fixture(scope="module")
def ones() -> Chain:
    """Two stages: the sum of four numbers and one, and nothing more."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return chain_stages(generate_pipeline_partition(model, ["0"]))


def refused(chain: Chain, results: float, gradients: float | None) -> str:
    try:
        refuse_other_results(chain, MICROBATCHES, results, gradients, threads=1)
    except ExecutionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("gradients", [None, 0.0, 0.9 * ROUNDING])
@pytest.mark.parametrize("results", [0.0, 0.9 * ROUNDING * 401])
def test_rounding_is_taken(ones: Chain, results: float, gradients: float | None) -> None:
    assert refused(ones, results, gradients) == ""


@pytest.mark.parametrize(
    ("results", "gradients", "said"),
    [
        (1.1 * ROUNDING * 401, None, "results are 0.152 from the unsplit model's, more than the"),
        (math.inf, 0.0, "results are inf from"),
        (0.0, 1.1 * ROUNDING, "gradients are 0.00038 of their largest element from the unsplit"),
        (0.0, math.inf, "gradients are inf of"),
    ],
)
def test_more_is_refused(ones: Chain, results: float, gradients: float | None, said: str) -> None:
    line = refused(ones, results, gradients)
    assert said in line
    assert line.endswith("take it out of the model")
    assert "\n" not in line

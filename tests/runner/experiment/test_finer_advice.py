"""The advice where a grouping is too coarse to fit."""

from dataclasses import replace

import numpy as np
import pytest

from fxpart.core.granularity import group_operators
from fxpart.errors import InfeasibleError
from fxpart.placement import make_mode
from runner.experiment.experiment import _placed
from tests.runner.composed import read
from tests.sketch import chain, devices, problem


@pytest.mark.parametrize(
    ("state", "granularity", "advised"),
    [(0, "1", True), (5, "1", True), (6, "1", False), (0, "operator", False)],
)
def test_a_finer_grouping_is_advised_where_weights_and_state_have_room(
    state: int, granularity: str, advised: bool
) -> None:
    # One module of four operators of 10 bytes on 30 and 30: with 20 bytes of state none is left.
    graph = replace(chain(4), modules=("whole",) * 4, weight_state_bytes=np.full(4, state))
    this = problem(group_operators(graph, granularity), devices(30, 30))
    config = read(f"granularity={granularity}")
    if granularity == "operator":
        this = problem(graph, devices(19, 19))
    with pytest.raises(InfeasibleError) as refused:
        _placed(config, this, make_mode("size_based"))
    assert ("a finer one, such as granularity=operator, may fit" in str(refused.value)) is advised

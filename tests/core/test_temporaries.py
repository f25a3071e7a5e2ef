"""Temporaries of operators leave everything else of a graph as it was."""

import numpy as np
import torch
from torch import nn

from fxpart.capture.training.joint import joint_graph
from fxpart.core.temporaries import with_temporaries


def test_a_temporary_is_a_value_of_its_operator_without_readers() -> None:
    graph = joint_graph(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), (torch.zeros(2, 8),))
    makers = np.array([graph.n_ops - 1, 0])
    changed, value_of = with_temporaries(graph, makers, np.array([100, 7]))
    assert changed.n_values == graph.n_values + 2
    added = np.setdiff1d(np.arange(changed.n_values), value_of)
    assert changed.value_producer[added].tolist() == [0, graph.n_ops - 1]
    assert changed.value_alloc_bytes[added].tolist() == [7, 100]
    assert not np.isin(added, changed.reads).any()
    assert (graph.value_base >= 0).any()
    bases = np.where(graph.value_base >= 0, value_of[graph.value_base], -1)
    assert changed.value_base[value_of].tolist() == bases.tolist()
    assert changed.reads.tolist() == value_of[graph.reads].tolist()
    assert changed.gradient_values.tolist() == value_of[graph.gradient_values].tolist()
    for name in ("value_bytes", "value_alloc_bytes", "value_is_output", "value_held"):
        before, after = getattr(graph, name), getattr(changed, name)
        assert after[value_of].tolist() == before.tolist()

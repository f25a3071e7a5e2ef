"""Modes on captured models, small versions of real architectures, with independent costs."""

import numpy as np
import pytest

from fxpart.capture.api import capture_graph
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.graph import OpGraph
from fxpart.core.topology import Link
from fxpart.placement import make_mode
from tests import independent
from tests.sketch import devices, problem

SMALL = {
    "gpt2": ModelSpec(
        "gpt2",
        architecture="GPT2LMHeadModel",
        config={"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 211, "n_positions": 64},
        batch_size=2,
        seq_len=32,
    ),
    "t5": ModelSpec(
        "t5",
        architecture="T5ForConditionalGeneration",
        config={"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}
        | {"num_heads": 4},
        batch_size=2,
        seq_len=16,
    ),
    "dlrm": ModelSpec(
        "dlrm",
        factory="fxpart.capture.models.dlrm:dlrm",
        factory_args={"embedding_dim": 16, "rows": [50] * 6, "bottom": [32], "top": [32, 16]},
        batch_size=4,
    ),
}


@pytest.fixture(scope="module", params=sorted(SMALL))
def graph(request: pytest.FixtureRequest) -> OpGraph:
    """A captured model."""
    built = build_model(SMALL[request.param])
    return capture_graph(built.module, built.args, built.kwargs)


@pytest.mark.parametrize("share", [0.65, 0.8])
def test_both_modes_fit_and_moving_only_helps(graph: OpGraph, share: float) -> None:
    whole = independent.peak_bytes(graph, np.zeros(graph.n_ops, dtype=np.int64), 0)
    size = int(whole * share)
    # Links fast enough that sending a branch elsewhere can pay.
    this = problem(graph, devices(size, size, size, rate=1e9, link=Link(1e6, 1e-6)))
    by_size, by_kl = make_mode("size_based")(this), make_mode("kl_based")(this)
    for placed in (by_size, by_kl):
        for device in range(3):
            assert independent.peak_bytes(graph, placed.device_of, device) <= size
    slow = independent.latency_s(this, by_size.device_of)
    fast = independent.latency_s(this, by_kl.device_of)
    assert fast <= slow * (1 + 1e-12)
    assert len(set(by_size.device_of.tolist())) > 1

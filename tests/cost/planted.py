"""Graphs whose operator times follow a known roofline, which a fit must recover."""

from dataclasses import replace

import numpy as np

from fxpart.core.graph import OpGraph
from fxpart.cost.calibration import Calibration
from fxpart.cost.profile import OperatorProfile
from tests.sketch import chain

TARGETS = (
    "aten.linear.default",
    "aten.convolution.default",
    "aten.scaled_dot_product_attention.default",
    "aten.add.Tensor",
    "aten.gelu.default",
    "aten.native_layer_norm.default",
    "aten.view.default",
    "getitem",
)
PLANTED = Calibration(
    5e-6,
    2e-6,
    2e10,
    {"attention float32": 5e10, "convolution float32": 2e11, "gemm float32": 3e11},
    "a device",
    fresh_s_per_byte=1e-9,
    moves_per_s={"function": 5e9, "reduction": 1e10},
)


def graph_of(seed: int, n: int = 60, dtype: str = "float32") -> OpGraph:
    """Return operators of every class, some limited by computing and some by memory."""
    rng = np.random.default_rng(seed)
    which = rng.integers(0, len(TARGETS), n)
    flops = (10 ** rng.uniform(5, 10, n)).astype(np.int64)
    moved = (10 ** rng.uniform(3, 8, n)).astype(np.int64)
    flops[which >= 3], moved[which >= 6] = 0, 0
    large = np.where(rng.random(n) < 0.2, 2**25 + rng.integers(0, 2**25, n), 4)
    graph = chain(n)
    result_bytes = np.concatenate([graph.value_alloc_bytes[:1], large])
    return replace(
        graph,
        value_alloc_bytes=result_bytes,
        targets=tuple(TARGETS[kind] for kind in which),
        dtypes=(dtype,) * n,
        flops=flops,
        moved_bytes=moved,
    )


def profile_of(graph: OpGraph, model: Calibration = PLANTED) -> OperatorProfile:
    """Return the profile of operators that follow `model`."""
    return OperatorProfile(
        model.seconds(graph), np.full(graph.n_ops, 5, dtype=np.int64), model.device_name
    )

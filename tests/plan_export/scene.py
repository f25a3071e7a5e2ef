"""Small models, and plans for them, shared by the tests of `fxpart.plan_export`."""

from dataclasses import replace
from functools import cache

import numpy as np

from fxpart.capture.api import capture_graph
from fxpart.capture.models.build import BuiltModel, build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.partitions import partition_by_device
from tests.capture.small_specs import BERT, GPT2, LLAMA, RESNET

DLRM = ModelSpec(
    "dlrm",
    factory="fxpart.capture.models.dlrm:dlrm",
    factory_args={"embedding_dim": 8, "rows": [30, 5, 20], "bottom": [16], "top": [16]},
    batch_size=4,
)
SPECS = {spec.name: spec for spec in (GPT2, LLAMA, RESNET, BERT, DLRM)}


@cache
def scene(name: str) -> tuple[BuiltModel, OpGraph]:
    """Return a small model, without memory for its weights, and its graph."""
    built = build_model(SPECS[name])
    return built, capture_graph(built.module, built.args, built.kwargs)


def random_plan(graph: OpGraph, seed: int, devices: int = 3) -> Assignment:
    """Return a plan that places modules of some depth, often several in a row, on one device."""
    rng = np.random.default_rng(seed)
    depth, stay = int(rng.integers(1, 6)), float(rng.choice([0.0, 0.5, 0.9]))
    device_of = np.zeros(graph.n_ops, dtype=np.int64)
    home: dict[tuple[str, ...], int] = {}
    device = 0
    for op, module in enumerate(graph.modules):
        parts = tuple(module.split(".")[:depth])
        if parts not in home:
            device = device if rng.random() < stay else int(rng.integers(devices))
            home[parts] = device
        device_of[op] = home[parts]
    return partition_by_device(graph, device_of)


def named(graph: OpGraph, *weights: str) -> OpGraph:
    """Return a random graph with names for its weights."""
    return replace(graph, weight_names=weights)


def on_devices(graph: OpGraph, *device_of: int) -> Assignment:
    """Return the plan that places each operator on the given device."""
    return partition_by_device(graph, np.array(device_of, dtype=np.int64))

"""Linear layers that multiply in 8 bits: which, how fast, and what their casts move."""

import numpy as np
import pytest
from torch import nn

from fxpart.capture.models.build import build_model
from fxpart.core.graph import OpGraph
from fxpart.core.topology import DeviceSpec, Link, Topology, uniform_topology
from fxpart.cost.float8 import RECIPES, TimesInFloat8, cast_bytes, linear_modules
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import SpecError
from runner.experiment.model_spec import model_spec
from runner.experiment.subject import graph_to_place, shared_subject
from tests.runner.composed import TINY_LLAMA, read

_STEP = (
    *TINY_LLAMA,
    "model.config.num_hidden_layers=2",
    "model.dtype=bfloat16",
    "phase=training",
    "optimizer=none",
    "runtime=graph",
)
_GPT2 = (
    "model=gpt2",
    "model.batch_size=2",
    "model.seq_len=16",
    "model.config={n_layer:1,n_embd:32,n_head:2,vocab_size:100}",
    "model.dtype=bfloat16",
    "phase=training",
    "optimizer=none",
    "runtime=graph",
)


def _graph(*overrides: str) -> OpGraph:
    config = read(*overrides)
    return graph_to_place(config, shared_subject(config, model_spec(config)))


def _topology(**rates: float) -> Topology:
    device = DeviceSpec("device", 10**12, {"float32": 1e12, "bfloat16": 1e12, **rates}, 1e11)
    return uniform_topology((device,), Link(1e9))


def test_linear_layers_are_those_of_the_module() -> None:
    config = read(*_STEP)
    module = build_model(model_spec(config)).module
    paths = {path for path, inner in module.named_modules() if isinstance(inner, nn.Linear)}
    graph = _graph(*_STEP)
    assert linear_modules(graph) == paths
    assert linear_modules(graph, ["lm_head", "layers.0"]) == {
        path for path in paths if path != "lm_head" and "layers.0" not in path
    }
    # Not products of GPT-2's Conv1D, whose weight is not transposed, nor its head, which is tied.
    assert not linear_modules(_graph(*_GPT2))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_casts_its_operands_in_both_passes(recipe: str) -> None:
    graph = _graph(*_STEP)
    path = "model.layers.1.mlp.down_proj"
    casts = cast_bytes(graph, recipe, frozenset({path}))
    assert [graph.modules[op] for op in casts] == [path] * 3
    weight = graph.weight_names.index(f"{path}.weight")
    w = int(graph.weight_bytes[weight]) // 2
    forward = next(op for op in casts if not graph.is_backward[op])
    x, g = (
        int(graph.value_bytes[value]) // 2
        for value in (graph.reads_of(forward)[0], graph.reads_of(forward + 1)[0])
    )
    scale = {"tensorwise": 2, "rowwise": 0}[recipe]
    # Each is read for its scale, and for the cast. In the backward the gradient is the left operand
    # of both products, transposed in one, and input and weight are right operands.
    expected = {"forward": (3 + scale) * (x + w), "backward": (3 + scale) * (x + w + g)}
    in_backward = sum(size for op, size in casts.items() if graph.is_backward[op])
    assert {"forward": casts[forward], "backward": in_backward} == expected


def test_what_several_layers_read_is_cast_once() -> None:
    graph = _graph(*_STEP)
    parts = [f"model.layers.0.self_attn.{name}_proj" for name in ("q", "k", "v")]
    each = [sum(cast_bytes(graph, "rowwise", frozenset({part})).values()) for part in parts]
    together = sum(cast_bytes(graph, "rowwise", frozenset(parts)).values())
    forward = next(
        op for op in range(graph.n_ops) if graph.modules[op] == parts[0] and graph.flops[op]
    )
    x = int(graph.value_bytes[graph.reads_of(forward)[0]]) // 2
    assert sum(each) - together == 2 * 2 * 3 * x


def test_products_take_the_time_of_8_bits_and_casts() -> None:
    graph, latency = _graph(*_STEP), LatencyModel(op_overhead_s=0.0)
    devices = _topology(float8_e4m3fn=4e12)
    usual = latency.op_time_s(graph, devices)[:, 0]
    times = TimesInFloat8(latency, "rowwise", ("lm_head",)).op_time_s(graph, devices)[:, 0]
    casts = cast_bytes(graph, "rowwise", linear_modules(graph, ["lm_head"]))
    products = list(casts)
    others = np.delete(np.arange(graph.n_ops), products)
    assert times[others] == pytest.approx(usual[others])
    share = latency.bandwidth_efficiency
    moving_s = np.array(list(casts.values())) / (1e11 * (share or 1.0))
    faster = latency.op_time_s(graph, _topology(bfloat16=4e12))[:, 0]
    assert (faster[products] < usual[products]).any()
    assert times[products] == pytest.approx(faster[products] + moving_s, rel=1e-6)


def test_a_device_without_8_bits_is_refused() -> None:
    with pytest.raises(SpecError, match="device has no rate of float8_e4m3"):
        TimesInFloat8(LatencyModel(), "tensorwise").op_time_s(_graph(*_STEP), _topology())

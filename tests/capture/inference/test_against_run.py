"""The estimate against a real run: the captured graph is executed and its live storages counted."""

from operator import attrgetter

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from fxpart.capture.api import capture
from fxpart.capture.live_bytes import LiveBytes, storage_sizes
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.graph import without_python
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables
from fxpart.errors import SpecError
from tests.capture.small_specs import BERT, GPT2, LLAMA, RESNET


def _on_cpu(spec: ModelSpec) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    built = build_model(spec)
    module = built.module.to_empty(device="cpu")
    for tensor in [*module.parameters(), *module.buffers()]:
        torch.nn.init.uniform_(tensor) if tensor.is_floating_point() else tensor.zero_()
    module.tie_weights()  # type: ignore[operator]
    return module, {name: torch.zeros_like(t, device="cpu") for name, t in built.kwargs.items()}


def _constants(module: fx.GraphModule) -> list[torch.Tensor]:
    """Return every parameter, buffer and constant read by the graph."""
    names = [str(node.target) for node in module.graph.nodes if node.op == "get_attr"]
    values = (attrgetter(name)(module) for name in names)
    return [tensor for tensor in values if torch.is_tensor(tensor)]


@pytest.mark.parametrize("spec", [GPT2, LLAMA, RESNET, BERT], ids=lambda spec: spec.name)
def test_the_peak_equals_that_of_a_run_of_the_graph(spec: ModelSpec) -> None:
    module, inputs = _on_cpu(spec)
    captured = capture(module, (), inputs)
    graph = without_python(captured.graph)
    everything = np.zeros(graph.n_ops, dtype=np.int64)
    estimated = int(peak_bytes(memory_tables(graph), everything, 1)[0])
    # Weights, constants and inputs exist before and after.
    resident = storage_sizes([*inputs.values(), *_constants(captured.graph_module)])
    with torch.no_grad(), LiveBytes([resident]) as run:
        captured.graph_module(**inputs)
    resident_bytes = graph.total_weight_bytes + sum(t.nbytes for t in inputs.values())
    assert run.peak_bytes[0] > run.live_bytes[0]
    assert estimated - resident_bytes == run.peak_bytes[0] - sum(resident.values())


@pytest.mark.parametrize("spec", [GPT2, LLAMA, RESNET, BERT], ids=lambda spec: spec.name)
def test_the_flops_equal_those_counted_by_torch(spec: ModelSpec) -> None:
    built = build_model(spec)
    captured = capture(built.module, built.args, built.kwargs)
    with torch.no_grad(), torch.device("meta"), FlopCounterMode(display=False) as counter:
        captured.graph_module(**built.kwargs)
    assert captured.graph.flops.sum() == counter.get_total_flops()


def test_operators_are_nodes_of_the_graph_module() -> None:
    built = build_model(GPT2)
    captured = capture(built.module, built.args, built.kwargs)
    calls = [n.name for n in captured.graph_module.graph.nodes if n.op == "call_function"]
    assert set(captured.graph.names) <= set(calls)


def test_both_levels_agree_on_memory_and_flops_of_a_plain_model() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to("meta")
    args = (torch.zeros(3, 4, device="meta"),)
    fine, coarse = capture(module, args), capture(module, args, level="module")
    assert fine.graph.flops.sum() == coarse.graph.flops.sum() == 2 * 3 * (4 * 8 + 8 * 2)
    assert fine.graph.total_weight_bytes == coarse.graph.total_weight_bytes
    assert fine.graph.moved_bytes.tolist() == coarse.graph.moved_bytes.tolist()


def test_an_unknown_level_suggests_the_nearest() -> None:
    with pytest.raises(SpecError, match="nearest: module"):
        capture(nn.Linear(1, 1), (torch.zeros(1),), level="modul")


def test_named_inputs_are_refused_at_module_level() -> None:
    with pytest.raises(SpecError, match=r"use capture\.level=operator"):
        capture(nn.Linear(1, 1), (), {"input": torch.zeros(1)}, level="module")

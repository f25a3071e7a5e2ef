"""Costs of a training step, and modules of its operators: by hand, and against a run."""

import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.training.joint import joint_capture
from fxpart.core.graph import OpGraph
from tests.capture.small_specs import GPT2, LLAMA, RESNET
from tests.capture.training.joint_scene import Mlp


@pytest.mark.parametrize("spec", [GPT2, LLAMA, RESNET], ids=lambda spec: spec.name)
def test_all_parameters_have_their_gradient_among_the_outputs(spec: ModelSpec) -> None:
    built = build_model(spec)
    captured = joint_capture(built.module, (), built.kwargs)
    graph, parameters = captured.graph, dict(built.module.named_parameters())
    assert captured.gradients.keys() == parameters.keys()
    for name, value_name in captured.gradients.items():
        value = graph.value_names.index(value_name)
        assert graph.value_is_output[value]
        assert graph.value_bytes[value] == parameters[name].nbytes
        assert graph.value_producer[value] >= captured.graph.first_backward
    # Only the loss: the result of the model is not kept.
    assert graph.value_is_output.sum() == len(parameters) + 1
    # Gradients are created, weights exist before.
    assert set(graph.weight_names) <= {*parameters, *dict(built.module.named_buffers())}
    assert graph.total_weight_bytes >= sum(p.nbytes for p in parameters.values())


@pytest.mark.parametrize("spec", [GPT2, LLAMA], ids=lambda spec: spec.name)
def test_the_backward_of_a_transformer_costs_about_twice_the_forward(spec: ModelSpec) -> None:
    built = build_model(spec)
    captured = joint_capture(built.module, (), built.kwargs)
    flops = captured.graph.flops
    forward, backward = (
        flops[: captured.graph.first_backward].sum(),
        flops[captured.graph.first_backward :].sum(),
    )
    assert forward > 0
    # Fused attention computes its scores a second time.
    assert 2.0 < backward / forward < 2.1


def test_a_perceptron_with_input_gradient_costs_exactly_twice() -> None:
    x = torch.zeros(2, 4, device="meta", requires_grad=True)
    captured = joint_capture(Mlp().to("meta"), (x,))
    flops = captured.graph.flops
    assert flops[: captured.graph.first_backward].sum() == 2 * 2 * (4 * 8 + 8 * 6)
    assert flops[captured.graph.first_backward :].sum() == 2 * 2 * 2 * (4 * 8 + 8 * 6)
    assert list(captured.gradients) == ["up.weight", "down.weight", "down.bias", "x"]


def test_without_input_gradient_the_first_layer_has_one_product_less() -> None:
    captured = joint_capture(Mlp().to("meta"), (torch.zeros(2, 4, device="meta"),))
    flops = captured.graph.flops
    assert flops[captured.graph.first_backward :].sum() == 2 * 2 * (4 * 8 + 2 * 8 * 6)


class _Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value)


def test_attention_is_one_fused_operator_each_way() -> None:
    batch, heads, rows, columns, width = 2, 3, 5, 7, 8
    q = torch.zeros(batch, heads, rows, width, device="meta", requires_grad=True)
    k = torch.zeros(batch, heads, columns, width, device="meta")
    captured = joint_capture(_Attention(), (q, k, k.clone()))
    product = 2 * batch * heads * rows * columns * width
    flops = captured.graph.flops
    assert sorted(flops[flops > 0].tolist()) == [2 * product, 5 * product]
    # No value has a probability for each pair of positions.
    assert captured.graph.value_bytes.max() < 4 * batch * heads * columns * (width + 1)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


def test_a_recurrent_layer_is_captured_as_its_products() -> None:
    captured = joint_capture(_Recurrent().to("meta"), (torch.zeros(2, 5, 4, device="meta"),))
    gates, forward = 4 * 8, captured.graph.flops[: captured.graph.first_backward]
    assert forward.sum() == 2 * 2 * 5 * gates * (4 + 8)
    assert not any("mkldnn" in target for target in captured.graph.targets)


def _modules(graph: OpGraph, first: int, last: int) -> list[str]:
    """Return the modules of a range of operators, consecutive ones once."""
    path = graph.modules[first:last]
    return [name for i, name in enumerate(path) if i == 0 or name != path[i - 1]]


def test_a_backward_operator_belongs_to_the_module_whose_gradient_it_computes() -> None:
    x = torch.zeros(2, 4, device="meta", requires_grad=True)
    captured = joint_capture(Mlp().to("meta"), (x,))
    graph, border = captured.graph, captured.graph.first_backward
    # The activation and the mean belong to the root.
    assert _modules(graph, 0, border) == ["up", "", "down", ""]
    assert _modules(graph, border, graph.n_ops) == ["", "down", "", "up"]
    for name, path in [("up.weight", "up"), ("down.weight", "down"), ("down.bias", "down")]:
        value = graph.value_names.index(captured.gradients[name])
        assert graph.modules[int(graph.value_producer[value])] == path


def test_gradients_of_a_transformer_belong_to_the_module_of_their_parameter() -> None:
    built = build_model(LLAMA)
    captured = joint_capture(built.module, (), built.kwargs)
    graph = captured.graph
    for name, value_name in captured.gradients.items():
        producer = int(graph.value_producer[graph.value_names.index(value_name)])
        assert graph.modules[producer] == name.removesuffix(".weight")
    forward = set(graph.modules[: captured.graph.first_backward])
    assert set(graph.modules[captured.graph.first_backward :]) <= forward

"""Dropout and attention as on accelerators, or as on the CPU."""

import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.training.joint import JointCapture, StepOptions, joint_capture


class _Attention(nn.Module):
    """Attention with a positional dropout argument, as in eager calls."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.by_name = by_name

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attention = nn.functional.scaled_dot_product_attention
        p = 0.5 if self.training else 0.0
        return attention(q, k, v, dropout_p=p) if self.by_name else attention(q, k, v, None, p)


def _attention(by_name: bool, options: StepOptions, train: bool) -> JointCapture:
    shape = (2, 3, 16, 8)
    q, k, v = (torch.zeros(shape, device="meta", requires_grad=True) for _ in range(3))
    return joint_capture(_Attention(by_name).train(train), (q, k, v), options=options)


def _calls(captured: JointCapture, word: str) -> int:
    return sum(word in target for target in captured.graph.targets)


@pytest.mark.parametrize("by_name", [True, False])
def test_attention_with_dropout_is_one_fused_call_each_way(by_name: bool) -> None:
    captured = _attention(by_name, StepOptions(), train=True)
    assert _calls(captured, "flash_attention") == 2
    assert _calls(captured, "bernoulli") == 0
    without = _attention(by_name, StepOptions(), train=False)
    assert captured.graph.targets == without.graph.targets
    # No value has rows x columns elements.
    assert captured.graph.value_bytes.max() == 2 * 3 * 16 * 8 * 4


def test_otherwise_probabilities_and_the_mask_are_kept() -> None:
    captured = _attention(True, StepOptions(fused_attention=False), train=True)
    assert _calls(captured, "flash_attention") == 0
    assert _calls(captured, "bernoulli") == 1
    assert captured.graph.value_bytes.max() == 2 * 3 * 16 * 16 * 4


class _Biased(nn.Module):
    """Attention with a learned bias that is shared by the examples."""

    def __init__(self, *, transposed: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.bias = nn.Parameter(torch.randn(2, 10, 10))
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).reshape(-1, 10, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.bias.transpose(1, 2) if self.transposed else self.bias
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias) ** 2


def test_attention_with_a_learned_bias_keeps_no_probabilities() -> None:
    torch.manual_seed(0)
    module, x = _Biased(), torch.randn(3, 10, 16)
    captured = joint_capture(module, (x,))
    assert _calls(captured, "flash_attention") == 2
    assert _calls(captured, "softmax") == 0
    graph = captured.graph
    forward = graph.value_bytes[graph.value_producer < graph.first_backward]
    probabilities_bytes = 3 * 2 * 10 * 10 * 4
    assert probabilities_bytes not in forward.tolist()
    as_the_cpu = joint_capture(module, (x,), options=StepOptions(fused_attention=False))
    assert _calls(as_the_cpu, "softmax") == 2
    weights = dict(module.named_parameters())
    inputs = [
        weights[spec.target].detach() if spec.target else x
        for spec in captured.program.graph_signature.input_specs
    ]
    loss, *gradients = captured.program.graph_module(*inputs)
    wanted = torch.autograd.grad(module(x).mean(), list(weights.values()))
    assert captured.gradients.keys() == weights.keys()
    torch.testing.assert_close(loss, module(x).mean())
    torch.testing.assert_close(
        dict(zip(captured.gradients, gradients, strict=True)),
        dict(zip(weights, wanted, strict=True)),
    )
    assert wanted[0].abs().max() > 1e-4


def test_attention_with_a_transposed_bias_is_computed_by_its_definition() -> None:
    """As T5's on an H100: fused kernels need masks with contiguous rows."""
    captured = joint_capture(_Biased(transposed=True), (torch.randn(3, 10, 16),))
    assert _calls(captured, "flash_attention") == 0
    assert _calls(captured, "softmax") == 2


def _dropout(p: float, options: StepOptions, train: bool = True) -> JointCapture:
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(p)).train(train)
    return joint_capture(module.to("meta"), (torch.zeros(2, 4, device="meta"),), options=options)


def test_the_dropout_mask_has_a_byte_per_element() -> None:
    captured = _dropout(0.5, StepOptions())
    assert _calls(captured, "native_dropout.default") == 1
    assert _calls(captured, "native_dropout_backward") == 1
    graph = captured.graph
    mask = next(i for i, name in enumerate(graph.value_names) if name == "native_dropout.1")
    assert graph.value_bytes[mask] == 2 * 8


def test_the_dropout_mask_of_a_cpu_has_a_number_per_element() -> None:
    captured = _dropout(0.5, StepOptions(fused_dropout=False))
    assert _calls(captured, "native_dropout") == 0
    graph = captured.graph
    drawn = next(i for i, target in enumerate(graph.targets) if "bernoulli" in target)
    value = int((graph.value_producer == drawn).argmax())
    assert graph.value_bytes[value] == 2 * 8 * 4


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, False)])
def test_dropout_without_effect_is_omitted(p: float, train: bool) -> None:
    captured = _dropout(p, StepOptions(), train)
    assert _calls(captured, "dropout") + _calls(captured, "bernoulli") == 0


def test_full_dropout_follows_torch() -> None:
    captured = _dropout(1.0, StepOptions())
    assert _calls(captured, "native_dropout") == 0
    assert list(captured.gradients) == ["0.weight", "0.bias"]

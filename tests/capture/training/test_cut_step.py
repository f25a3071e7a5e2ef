"""A training step cut in two: results of the parts, passed values, and real memory."""

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxpart.capture.live_bytes import LiveBytes, storage_sizes
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.training.cut_step import ForwardBackward, cut_step
from fxpart.capture.training.joint import JointCapture, joint_capture
from fxpart.torch_compat.memory import get_fwd_bwd_interactions, get_peak_memory
from tests.capture.small_specs import BERT, GPT2, LLAMA, RESNET
from tests.capture.training.joint_scene import Mlp, flat_inputs, on_cpu


def _interpreter(module: fx.GraphModule) -> fx.Interpreter:
    """Return an interpreter that also frees unread values, as the module's own code does."""
    interpreter = fx.Interpreter(module)
    for node in module.graph.nodes:
        if not node.users and node.op == "call_function":
            interpreter.user_to_last_uses.setdefault(node, []).append(node)
    return interpreter


def _run(cut: ForwardBackward, inputs: list[Tensor]) -> tuple[list[Tensor], int]:
    """Return the loss and the gradients, and the peak bytes, including `inputs`.

    A value is freed after its last use; the caller keeps the inputs and the loss.
    """
    counter = LiveBytes([storage_sizes(inputs)])
    with torch.no_grad(), counter:
        loss, *saved = _interpreter(cut.forward).boxed_run(list(inputs))
        gradients = _interpreter(cut.backward).boxed_run(saved)
    return [loss, *gradients], counter.peak_bytes[0]


def _peak(cut: ForwardBackward) -> int:
    return get_peak_memory(cut.forward.graph, cut.backward.graph, n_results=cut.n_results)


def _by_autograd(module: nn.Module, captured: JointCapture, loss: Tensor) -> list[Tensor]:
    """Return the loss and the gradients in the order of the captured step."""
    module.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [module.get_parameter(name).grad for name in captured.gradients]
    return [loss.detach(), *(g for g in gradients if g is not None)]


@pytest.mark.parametrize(
    ("spec", "train"),
    [(GPT2, False), (LLAMA, False), (RESNET, False), (BERT, False), (GPT2, True), (RESNET, True)],
    ids=lambda given: given.name if isinstance(given, ModelSpec) else ("eval", "train")[given],
)
def test_parts_of_a_model_compute_the_step_with_the_predicted_memory(
    spec: ModelSpec, train: bool
) -> None:
    module, inputs = on_cpu(spec)
    module.train(train)
    captured = joint_capture(module, (), inputs)
    cut = cut_step(captured)
    flat = flat_inputs(captured, module, inputs)
    whole = captured.program.graph_module
    torch.manual_seed(0)
    expected = whole(*(tensor.clone() for tensor in flat))
    torch.manual_seed(0)
    results, peak_bytes = _run(cut, flat)
    for wanted, result in zip(expected, results, strict=True):
        assert torch.equal(wanted, result)
    assert peak_bytes == _peak(cut)
    if not train:
        loss = module(**inputs).logits.float().mean()
        for wanted, result in zip(_by_autograd(module, captured, loss), results, strict=True):
            torch.testing.assert_close(wanted, result, rtol=1e-4, atol=1e-7)


class _Tied(nn.Module):
    """One weight under two names, read as it is and as a view, and in-place writes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids) * 2
        hidden[:, 0] = hidden[:, 1] * 3
        return self.head(hidden.relu_())  # type: ignore[no-any-return]


class _Buffers(nn.Module):
    """A counter changed by a step, an input passed through, two weights with one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(3, 4))
        self.right = nn.Parameter(torch.randn(3, 4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = (self.left + self.right) * x
        y.sigmoid_()
        return self.norm(y).square() + torch.tensor([1.0, 2.0, 3.0, 4.0])  # type: ignore[no-any-return]


def test_a_tied_weight_with_in_place_writes() -> None:
    module, ids = _Tied(), torch.tensor([[1, 2, 3], [4, 1, 0]])
    captured = joint_capture(module, (ids,))
    cut = cut_step(captured)
    flat = flat_inputs(captured, module, {"ids": ids})
    results, peak_bytes = _run(cut, flat)
    assert peak_bytes == _peak(cut)
    expected = _by_autograd(module, captured, module(ids).mean())
    assert len(results) == len(expected) == 2
    torch.testing.assert_close(results, expected)
    _, kept = get_fwd_bwd_interactions(cut.forward.graph, cut.backward.graph)
    views = [n for n in cut.saved if n in kept]
    assert views, "the weight, or a view of it, is saved and may not go"


def test_buffers_changed_by_a_step_and_constants() -> None:
    module, x = _Buffers(), torch.randn(3, 4)
    captured = joint_capture(module, (x,))
    cut = cut_step(captured)
    results, peak_bytes = _run(cut, flat_inputs(captured, module, {"x": x}))
    assert peak_bytes == _peak(cut)
    assert int(module.norm.num_batches_tracked) == 1  # type: ignore[arg-type]
    expected = _by_autograd(module, captured, module(x).mean())
    torch.testing.assert_close(results, expected)
    assert captured.gradients["left"] == captured.gradients["right"]


def test_passed_values_have_the_same_names_on_both_sides() -> None:
    module, x = Mlp(), torch.randn(2, 4)
    cut = cut_step(joint_capture(module, (x,)))
    outputs: Any = cut.forward.graph.output_node().args[0]
    assert tuple(node.name for node in outputs[cut.n_results :]) == cut.saved
    taken = cut.backward.graph.find_nodes(op="placeholder")
    assert tuple(node.name for node in taken) == cut.saved
    for node, other in zip(outputs[cut.n_results :], taken, strict=True):
        assert node.meta["val"] is other.meta["val"]
    # The first layer's weight needs no gradient of the input.
    assert "p_up_weight" not in cut.saved
    assert "x" in cut.saved
    # Nothing is computed twice.
    names = [
        {n.name for n in side.graph.nodes if n.op == "call_function"}
        for side in (cut.forward, cut.backward)
    ]
    assert not operator.and_(*names)


def test_a_model_with_nothing_to_train_has_an_empty_backward() -> None:
    module, x = Mlp().requires_grad_(False), torch.randn(2, 4)
    captured = joint_capture(module, (x,))
    cut = cut_step(captured)
    results, peak_bytes = _run(cut, flat_inputs(captured, module, {"x": x}))
    assert cut.saved == ()
    torch.testing.assert_close(results, [module(x).mean()])
    assert peak_bytes == _peak(cut)


def test_symbolic_sizes_are_passed_last() -> None:
    class Grown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).sum(0).expand(x.shape[0], 4) * x

    module, x = Grown(), torch.randn(3, 4)
    batch = torch.export.Dim("batch", min=2, max=64)
    captured = joint_capture(module, (x,), dynamic_shapes={"x": {0: batch}})
    cut = cut_step(captured)
    numbers = [
        isinstance(node.meta["val"], torch.SymInt)
        for node in cut.backward.graph.find_nodes(op="placeholder")
    ]
    assert any(numbers)
    assert numbers == sorted(numbers)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        results, _ = _run(cut, flat_inputs(captured, module, {"x": x}))
        torch.testing.assert_close(results, _by_autograd(module, captured, module(x).mean()))

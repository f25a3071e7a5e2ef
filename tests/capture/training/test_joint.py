"""A training step as one graph: its results are those of autograd."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.training.joint import JointCapture, joint_capture, joint_graph
from fxpart.errors import CaptureError
from tests.capture.small_specs import GPT2, LLAMA, RESNET
from tests.capture.training.joint_scene import Mlp, flat_inputs, on_cpu


def _run(
    captured: JointCapture, module: nn.Module, inputs: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run the captured step on the real weights; return the loss and the gradients by name."""
    loss, *gradients = captured.program.graph_module(*flat_inputs(captured, module, inputs))
    names = [str(spec.target) for spec in captured.program.graph_signature.output_specs[1:]]
    return loss, dict(zip(names, gradients, strict=True))


def _by_autograd(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def _mean(output: Any) -> Tensor:  # noqa: ANN401 - what a model returns
    return output.logits.float().mean()  # type: ignore[no-any-return]


def _agree(gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0 or "k_proj" in name
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("spec", [GPT2, LLAMA, RESNET], ids=lambda spec: spec.name)
def test_the_captured_step_computes_the_gradients_of_autograd(spec: ModelSpec) -> None:
    module, inputs = on_cpu(spec)
    captured = joint_capture(module, (), inputs)
    expected = _mean(module(**inputs))
    loss, gradients = _run(captured, module, inputs)
    torch.testing.assert_close(loss, expected)
    _agree(gradients, _by_autograd(module, expected))


def test_a_meta_capture_runs_on_real_weights() -> None:
    built = build_model(LLAMA)
    captured = joint_capture(built.module, (), built.kwargs)
    module, inputs = on_cpu(LLAMA)
    _, gradients = _run(captured, module, inputs)
    _agree(gradients, _by_autograd(module, _mean(module(**inputs))))


def test_labels_use_the_loss_of_the_model() -> None:
    module, inputs = on_cpu(LLAMA)
    inputs["labels"] = inputs["input_ids"]
    captured = joint_capture(module, (), inputs)
    expected = module(**inputs).loss
    loss, gradients = _run(captured, module, inputs)
    torch.testing.assert_close(loss, expected)
    _agree(gradients, _by_autograd(module, expected))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))  # type: ignore[no-any-return]


def test_tied_weights_are_one_storage_and_have_one_gradient() -> None:
    module, ids = _Tied(), torch.tensor([[1, 2, 2]])
    captured = joint_capture(module, (ids,))
    assert captured.graph.weight_bytes.tolist() == [10 * 4 * 4]
    assert list(captured.gradients) == ["embed.weight"]
    _, gradients = _run(captured, module, {"ids": ids})
    _agree(gradients, _by_autograd(module, module(ids).mean()))


class _Shared(nn.Module):
    """A sum whose two weights have one gradient, with a storage written to in part."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(3, 4))
        self.right = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = (self.left + self.right) * x
        y[:, :2] = y[:, :2] * 3
        return y.relu_()


def test_two_weights_may_have_one_gradient_despite_in_place_writes() -> None:
    module, x = _Shared(), torch.randn(3, 4)
    captured = joint_capture(module, (x,))
    assert captured.gradients["left"] == captured.gradients["right"]
    _, gradients = _run(captured, module, {"x": x})
    _agree(gradients, _by_autograd(module, module(x).mean()))


class _Fixed(nn.Module):
    """A part without gradients in its middle, an unused weight, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.main = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.sigmoid(self.gate(x))
        return self.frozen(self.main(x) * scale)  # type: ignore[no-any-return]


def test_parameters_without_a_gradient_have_none() -> None:
    module, x = _Fixed(), torch.randn(3, 4)
    captured = joint_capture(module, (x,))
    assert list(captured.gradients) == ["main.weight", "main.bias"]
    _, gradients = _run(captured, module, {"x": x})
    _agree(gradients, _by_autograd(module, module(x).mean()))
    # The operators of the region are captured, in their module.
    assert "gate" in captured.graph.modules[: captured.graph.first_backward]
    assert "gate" not in captured.graph.modules[captured.graph.first_backward :]


def test_a_model_with_nothing_to_train_is_its_forward() -> None:
    captured = joint_capture(Mlp().requires_grad_(False), (torch.zeros(2, 4),))
    assert captured.gradients == {}
    assert captured.graph.first_backward == captured.graph.n_ops
    assert captured.graph.value_is_output.sum() == 1


class _Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.inner(x)
        return y.float() * 2  # type: ignore[no-any-return]


def test_a_region_under_autocast_computes_in_its_dtype() -> None:
    module, x = _Cast(), torch.randn(3, 4)
    captured = joint_capture(module, (x,))
    product = int(captured.graph.flops[: captured.graph.first_backward].argmax())
    assert captured.graph.dtypes[product] == "bfloat16"
    _, gradients = _run(captured, module, {"x": x})
    _agree(gradients, _by_autograd(module, module(x).mean()))


def test_batch_normalisation_in_training_mode_updates_its_buffers() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(8, 4)
    weight = torch.randn(4, generator=torch.Generator().manual_seed(1))
    module.append(_Scale(weight))
    captured = joint_capture(module, (x,))
    expected = module(x).mean()
    module.zero_grad()
    gradients_now = _by_autograd(module, expected)
    before = int(module[1].num_batches_tracked)  # type: ignore[arg-type]
    _, gradients = _run(captured, module, {"input": x})
    assert int(module[1].num_batches_tracked) == before + 1  # type: ignore[arg-type]
    assert gradients.keys() == gradients_now.keys()
    for name, gradient in gradients_now.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-6)


class _Experts(nn.Module):
    """Counts how often each row is chosen, as in a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, chosen: Tensor) -> Tensor:
        return self.weight * torch.histc(chosen.int(), bins=4, min=0, max=3)


def test_an_integer_count_is_captured_for_the_cpu() -> None:
    chosen = torch.tensor([0, 2, 2, 3])
    captured = joint_capture(_Experts().to("meta"), (chosen.to("meta"),))
    module = _Experts()
    loss, gradients = _run(captured, module, {"chosen": chosen})
    counts = torch.tensor([1.0, 0.0, 2.0, 1.0])
    torch.testing.assert_close(loss, (module.weight * counts).mean())
    torch.testing.assert_close(gradients, {"weight": counts / 4})


class _Scale(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).square()


class _Named(nn.Module):
    """Its inputs have the names of calls in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, t: Tensor, mul: Tensor) -> Tensor:
        return self.line(t) * mul * t  # type: ignore[no-any-return]


def test_inputs_may_have_the_names_of_operators() -> None:
    module, inputs = _Named(), {"t": torch.randn(3, 4), "mul": torch.randn(3, 4)}
    captured = joint_capture(module, (inputs["t"],), {"mul": inputs["mul"]})
    assert [spec.arg.name for spec in captured.program.graph_signature.input_specs[-2:]] == [
        "t",
        "mul",
    ]
    names = captured.graph.names
    assert len(set(names)) == len(names)
    assert not {"t", "mul"} & set(names)
    _, gradients = _run(captured, module, inputs)
    _agree(gradients, _by_autograd(module, module(**inputs).mean()))


def test_captures_are_deterministic() -> None:
    built = build_model(GPT2)
    first, second = (joint_graph(built.module, (), built.kwargs) for _ in range(2))
    assert first.names == second.names
    assert first.modules == second.modules
    assert first.reads.tolist() == second.reads.tolist()
    assert first.group.tolist() == second.group.tolist()


class _Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.long()


class _Nothing(nn.Module):
    def forward(self) -> Tensor:
        return torch.zeros(2)


class _Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.table(x.long())
        return rows


class _Correlation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.corrcoef(x)


@pytest.mark.parametrize(
    ("make", "args", "message"),
    [
        (_Sparse, (torch.zeros(2),), "the sparse gradient of table has no .*; set sparse=False"),
        (_Correlation, (torch.ones(2, 3),), "torch.corrcoef call aten.equal: write them as a"),
        (_Counts, (torch.zeros(2),), "_Counts cannot be trained: .* no real-valued tensor"),
        (_Nothing, (), "_Nothing cannot be trained: .* neither weights nor inputs"),
        (_Branches, (torch.zeros(2),), "_Branches cannot be captured .* branches on the values"),
    ],
)
def test_an_untrainable_model_is_refused_with_the_reason(
    make: Callable[[], nn.Module], args: tuple[Tensor, ...], message: str
) -> None:
    with pytest.raises(CaptureError, match=message) as error:
        joint_capture(make(), args)
    assert "\n" not in str(error.value)

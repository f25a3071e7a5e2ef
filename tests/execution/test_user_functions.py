"""Functions with their own backward: memory and gradients of a step equal those of eager mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.training.joint import joint_capture
from fxpart.core.partitions import partition_by_device
from fxpart.core.phases import StepOptions
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables
from fxpart.errors import CaptureError
from fxpart.execution.forward_devices import forward_devices
from fxpart.execution.local import run_local
from fxpart.execution.real_model import RealModel
from fxpart.execution.real_step import step_peak_bytes
from fxpart.execution.stages.stage_archive import stage_program

pytestmark = pytest.mark.usefixtures("one_thread")

_CPU = StepOptions(fused_attention=False, fused_dropout=False)


class StraightThrough(Function):
    """Rounds; its gradient is `scale` times that of its input, which is no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:  # noqa: ANN401
        ctx.scale = scale
        return torch.round(x * scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return gradient * ctx.scale, None


_round = StraightThrough.apply
"""Bound before any capture, as is common."""


class Recomputing(Function):
    """Saves only its input, and runs its forward again under autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, weight)
        return torch.exp(torch.tanh(x @ weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            again = torch.exp(torch.tanh(x @ weight))
        return torch.autograd.grad(again, (x, weight), gradient)  # type: ignore[return-value]


class Locals(Function):
    """Its backward has variables that outlive their last reader, a view's among them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, weight)
        return torch.tanh(x @ weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        again = torch.tanh(x @ weight)
        view = (gradient * (1 - again * again)).view(-1)
        of_weight = x.t() @ view.view(gradient.shape)
        del again
        _, _unread = torch.topk(x, 3)
        return view.view(gradient.shape) @ weight.t() + x.repeat(4, 1).sum() * 0, of_weight


class OwnGraph(Function):
    """Its forward has a variable that nothing reads, and keeps a graph and a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401
        unread = torch.cat([x] * 8)
        with torch.enable_grad():
            ctx.inputs = tuple(tensor.detach().requires_grad_() for tensor in (x, weight))
            result = torch.tanh(Recomputing.apply(*ctx.inputs))  # type: ignore[no-untyped-call]
        ctx.factor = torch.exp(x)
        ctx.save_for_backward(result)
        del unread
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        (result,) = ctx.saved_tensors
        factor, ctx.factor = ctx.factor, None
        gradient = gradient * factor
        del factor
        of_x, of_weight = torch.autograd.grad(result, ctx.inputs, gradient)
        return of_x + torch.cat([of_x] * 4).sum(), of_weight


class Twice(Function):
    """Multiplies by a matrix and by its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, weight)
        return x @ weight @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        part = gradient @ weight
        return part @ weight.t(), x.t() @ part + gradient.t() @ (x @ weight)


class Reversal(Function):
    """Saves nothing, and sets up its context separately from its forward."""

    @staticmethod
    def forward(x: Tensor, pair: tuple[float, Tensor]) -> tuple[Tensor, Tensor]:
        factor, other = pair
        return x.view_as(x), other * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ANN401
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor | None) -> tuple[Tensor, None]:  # noqa: ANN401
        return -first, None


class Attributes(Function):
    """Keeps an argument, a tensor of its own and its result as attributes of its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        inner = torch.tanh(x)
        ctx.pair = [inner, x]
        ctx.result = inner * 2
        return ctx.result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        return gradient * ctx.pair[0] + ctx.result  # type: ignore[no-any-return]


class Masking(Function):
    """Makes a mask while it sets up its context, and keeps it as an attribute."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clamp(min=0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ANN401
        ctx.mask = inputs[0] > 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        return gradient * ctx.mask  # type: ignore[no-any-return]


class Unread(Function):
    """Saves its input for a gradient that nothing needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x * 2, x.exp()

    @staticmethod
    def backward(ctx: Any, to_double: Tensor, to_power: Tensor | None) -> Tensor:  # noqa: ANN401
        if to_power is None:
            return to_double * 2
        return to_double * 2 + to_power * ctx.saved_tensors[0].exp()  # type: ignore[no-any-return]

    @classmethod
    def doubled(cls, x: Tensor) -> Tensor:
        """Apply it, and return its first result."""
        return cls.apply(x)[0]  # type: ignore[no-any-return,no-untyped-call]


class Reversible(Function):
    """Keeps its results only, and finds the weights in a module of its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, layer: nn.Linear, *weights: Tensor) -> Any:  # noqa: ANN401
        ctx.layer = layer
        with torch.no_grad():
            x = x + torch.tanh(layer(y))
        ctx.save_for_backward(x, y)
        return x, y.clone()

    @staticmethod
    def backward(ctx: Any, of_x: Tensor, of_y: Tensor) -> Any:  # noqa: ANN401
        _, y = ctx.saved_tensors
        weights = tuple(ctx.layer.parameters())
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            again = torch.tanh(ctx.layer(y))
        inner, *of_weights = torch.autograd.grad(again, (y, *weights), of_x)
        return of_x, of_y + inner, None, *of_weights


class Accumulating(Function):
    """Adds the gradients of a module's weights to their ``.grad`` itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:  # noqa: ANN401
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.tanh(layer(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:  # noqa: ANN401
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            again = torch.tanh(ctx.layer(x))
        torch.autograd.backward(again, gradient)
        return x.grad, None


class Holding(nn.Module):
    """Functions that are given modules."""

    def __init__(self, function: type[Function], *, again: bool = False) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.function, self.again = function, again

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.function is Reversible:
            x, y = Reversible.apply(x, x * 2, self.inner, *self.inner.parameters())  # type: ignore[no-untyped-call]
            x, y = Reversible.apply(y, x, self.inner, *self.inner.parameters())  # type: ignore[no-untyped-call]
            x = x * y
        else:
            x = Accumulating.apply(Accumulating.apply(x, self.inner), self.inner)  # type: ignore[no-untyped-call]
        return self.down(self.inner(x) if self.again else x)  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """All of them between ordinary layers."""

    def __init__(self, *wanted: str) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        if set(wanted) & {"recomputing", "locals", "own graph", "twice"}:
            self.weight = nn.Parameter(torch.randn(32, 32) / 8)
        self.down = nn.Linear(32, 8)
        self.wanted = wanted

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.up(x))
        if "straight" in self.wanted:
            x = _round(x, 3.0)  # type: ignore[no-untyped-call]
        if "twice" in self.wanted:
            # Two functions share a weight, of which one has a view.
            once = Twice.apply(x, self.weight)  # type: ignore[no-untyped-call]
            x = Twice.apply(once, self.weight.t()) + x @ self.weight  # type: ignore[no-untyped-call]
        if "own graph" in self.wanted:
            x = OwnGraph.apply(x, self.weight)  # type: ignore[no-untyped-call]
        if "locals" in self.wanted:
            x = Locals.apply(x, self.weight)  # type: ignore[no-untyped-call]
        if "recomputing" in self.wanted:
            x = Recomputing.apply(x, self.weight)  # type: ignore[no-untyped-call]
        if "reversal" in self.wanted:
            x, _ = Reversal.apply(x, (2.0, x))  # type: ignore[no-untyped-call]
        return self.down(torch.sigmoid(x))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Layers whose results only a Function saves."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.call(layer(x))
        return x


def _bloom() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2, use_cache=False)
    ids = torch.randint(0, 64, (2, 16))
    return BloomForCausalLM(config), {"input_ids": ids}


def _accumulating() -> tuple[nn.Module, dict[str, Tensor]]:
    return Holding(Accumulating), {"x": torch.randn(64, 16)}


def _mixed(*wanted: str) -> Callable[[], tuple[nn.Module, dict[str, Tensor]]]:
    return lambda: (Mixed(*wanted), {"x": torch.randn(64, 16)})


CASES: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "straight": _mixed("straight"),
    "recomputing": _mixed("recomputing"),
    "locals": _mixed("locals"),
    "own graph": _mixed("own graph"),
    "twice": _mixed("twice"),
    "reversal": _mixed("reversal"),
    "mixed": _mixed("straight", "locals", "own graph", "recomputing", "reversal"),
    "attributes": lambda: (Residual(Attributes.apply), {"x": torch.randn(64, 16)}),
    "masking": lambda: (Residual(Masking.apply), {"x": torch.randn(64, 16)}),
    "unread": lambda: (Residual(Unread.doubled), {"x": torch.randn(64, 16)}),
    "reversible": lambda: (Holding(Reversible), {"x": torch.randn(64, 16)}),
    "bloom": _bloom,
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_split_step_equal_those_of_the_module(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = CASES[name]()
    module.eval()
    step = joint_capture(module, (), inputs)
    forward = op_graph(step.forward)
    real = RealModel(module, (), inputs, step.forward, forward)
    half = (torch.arange(step.graph.n_ops) >= len(step.exported_names) // 4).long().numpy()
    placed = partition_by_device(forward, forward_devices(half, step.exported_names, forward))
    run = run_local(real, placed, 2, repeats=1, training=True)
    assert run.max_difference == 0.0
    assert run.gradient_difference == 0.0


@pytest.mark.parametrize("name", [*CASES, "accumulating"])
def test_the_peak_of_a_step_equals_that_of_the_module(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = (CASES | {"accumulating": _accumulating})[name]()
    module.train()
    graph = joint_capture(module, (), inputs, _CPU).graph
    predicted = int(peak_bytes(memory_tables(graph), graph.group * 0, 1)[0])
    real = step_peak_bytes(module, (), inputs)
    loss_bytes = 0 if real.phase == "forward" else 4  # held by the caller's variable
    assert predicted == real.peak_bytes - loss_bytes


def test_a_function_is_not_replaced_after_a_capture() -> None:
    before = {f: f.forward for f in (StraightThrough, Recomputing, Reversal)}
    joint_capture(Mixed("straight", "recomputing", "reversal"), (torch.randn(2, 16),))
    assert {f: f.forward for f in before} == before
    x = torch.ones(3, requires_grad=True)
    _round(x, 2.0).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(torch.as_tensor(x.grad), torch.full((3,), 2.0))


class InPlace(Function):
    """Writes to its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        return 3 * gradient


def test_a_function_that_writes_to_its_input_is_named() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return InPlace.apply(self.layer(x))  # type: ignore[no-any-return,no-untyped-call]

    with pytest.raises(CaptureError, match=r"InPlace, a torch.autograd.Function, writes"):
        joint_capture(Model(), (torch.randn(2, 4),))


@pytest.mark.parametrize("function", [Reversible, Accumulating])
def test_a_function_that_is_given_a_module_has_the_gradients_of_eager(
    function: type[Function],
) -> None:
    torch.manual_seed(0)
    module, x = Holding(function), torch.randn(4, 16)
    before = dict(module.named_parameters())
    step = joint_capture(module, (x,), options=_CPU)
    weights = dict(module.named_parameters())
    assert all(weights[name] is weight for name, weight in before.items())
    inputs = [weights.get(str(s.target), x) for s in step.program.graph_signature.input_specs]
    _, *gradients = step.program.graph_module(*(value.detach() for value in inputs))
    module(x).mean().backward()
    assert set(step.gradients) == set(weights)
    for name, gradient in zip(step.gradients, gradients, strict=True):
        torch.testing.assert_close(gradient, weights[name].grad)


def test_a_function_that_adds_to_gradients_of_weights_used_elsewhere_is_named() -> None:
    with pytest.raises(CaptureError, match=r"Accumulating, a torch.autograd.Function, adds"):
        joint_capture(Holding(Accumulating, again=True), (torch.randn(4, 16),))


class _Listed(nn.Module):
    """Gives its Function a list that shares a weight with a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weights = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return _Scaled.apply(self.layer(x), self)  # type: ignore[no-any-return,no-untyped-call]


class _Scaled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: _Listed) -> Tensor:  # noqa: ANN401
        ctx.owner = owner
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return gradient @ ctx.owner.weights[0], None


def test_a_function_that_reads_a_weight_from_a_list_is_named() -> None:
    module = _Listed().to("meta")
    with pytest.raises(CaptureError, match=r"_Scaled, a torch.autograd.Function, reads a tensor"):
        joint_capture(module, (torch.randn(2, 4, device="meta"),))


class Normalizing(Function):
    """Divides by its largest element, a number in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        ctx.largest = x.max().item()
        return x / ctx.largest  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        return gradient / ctx.largest  # type: ignore[no-any-return]


class Branching(Function):
    """Branches on its gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        return gradient * 2 if gradient.sum() > 0 else gradient


class Selecting(Branching):
    """Selects elements of its gradient by a mask."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        return gradient * gradient[gradient > 0].sum()


@pytest.mark.parametrize("function", [Normalizing, Branching, Selecting])
def test_a_function_that_needs_values_is_named(function: type[Function]) -> None:
    name = function.__name__
    with pytest.raises(CaptureError, match=rf"{name}, a torch.autograd.Function.* needs the val"):
        joint_capture(Residual(function.apply), (torch.randn(4, 16),))


def test_a_stage_with_a_user_function_cannot_be_saved() -> None:
    module, x = Mixed("straight", "reversal"), torch.randn(4, 16)
    step = joint_capture(module, (x,))
    with pytest.raises(CaptureError, match=r"StraightThrough, Reversal, a torch.autograd.Function"):
        stage_program(step.forward.module(), (x,), "stage 0")


def test_what_a_function_saved_may_be_overwritten_if_its_backward_does_not_read_it() -> None:
    def overwritten(x: Tensor) -> Tensor:
        kept = x + 1
        result = Unread.doubled(kept)
        kept.add_(1)
        return result

    graph = joint_capture(Residual(overwritten), (torch.randn(64, 16),), {}, _CPU).graph
    assert graph.first_backward < graph.n_ops

"""Models that call `torch.utils.checkpoint` themselves: memory as in eager mode, or a refusal."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from fxpart.capture.training.joint import joint_capture
from fxpart.capture.training.own_checkpoints import checkpointed_calls
from fxpart.core.phases import StepOptions
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables
from fxpart.errors import CaptureError
from fxpart.execution.real_step import step_peak_bytes
from tests.execution.test_user_functions import Residual, Unread

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning"),
]

_CPU = StepOptions(fused_attention=False, fused_dropout=False)


def _layer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Sigmoid())


class Checkpointed(nn.Module):
    """Calls its layers through `call`, after one that is called directly."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.layers = nn.ModuleList(_layer() for _ in range(4))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = self.call(layer, x)
        return x


def _directly(layer: nn.Module, x: Tensor) -> Any:  # noqa: ANN401
    return layer(x)


class Squared(Function):
    """Saves what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        slope = x * 2
        ctx.save_for_backward(slope)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        (slope,) = ctx.saved_tensors
        return gradient * slope  # type: ignore[no-any-return]


def _with_function(layer: nn.Sequential, x: Tensor, *, use_reentrant: bool) -> Any:  # noqa: ANN401
    def part(x: Tensor) -> Tensor:
        return layer(Squared.apply(x))  # type: ignore[no-any-return,no-untyped-call]

    return checkpoint(part, x, use_reentrant=use_reentrant)


def _nested(layer: nn.Sequential, x: Tensor) -> Any:  # noqa: ANN401
    def part(x: Tensor) -> Tensor:
        inner: Tensor = checkpoint(layer[:2], x, use_reentrant=False)
        return layer[2:](inner)  # type: ignore[no-any-return]

    return checkpoint(part, x, use_reentrant=False)


def _without_gradients(layer: nn.Sequential, x: Tensor) -> Any:  # noqa: ANN401
    with torch.no_grad():
        fixed = checkpoint(layer, x, use_reentrant=True)
    return x + fixed


class _BetweenLayers(nn.Module):
    """Recomputes an activation that the layer after it saves too."""

    def __init__(self, activation: nn.Module, width: int = 256) -> None:
        super().__init__()
        self.first, self.activation = nn.Linear(32, 256), activation
        self.last = nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        return self.last(checkpoint(self.activation, self.first(x), use_reentrant=False))


def _partly_frozen(call: Callable[..., Any]) -> nn.Module:
    module = Checkpointed(call)
    for part in (module.first, *module.layers[:2]):
        part.requires_grad_(requires_grad=False)
    return module


def _gpt2(*, use_reentrant: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=64, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})  # type: ignore[no-untyped-call]
    return model


_NOT_REENTRANT = partial(checkpoint, use_reentrant=False)
CASES: dict[str, Callable[[], nn.Module]] = {
    "without": lambda: Checkpointed(_directly),
    "not reentrant": lambda: Checkpointed(_NOT_REENTRANT),
    "reentrant": lambda: Checkpointed(partial(checkpoint, use_reentrant=True)),
    "not reentrant, partly frozen": lambda: _partly_frozen(_NOT_REENTRANT),
    "reentrant, without gradients": lambda: Checkpointed(_without_gradients),
    "function": lambda: Checkpointed(partial(_with_function, use_reentrant=False)),
    "reentrant function": lambda: Checkpointed(partial(_with_function, use_reentrant=True)),
    "one activation": lambda: _BetweenLayers(nn.ReLU()),
    "masked": lambda: _BetweenLayers(nn.Sequential(nn.Linear(256, 32), _Masked()), 32),
    "two activations": lambda: _BetweenLayers(nn.Sequential(nn.ReLU(), nn.Sigmoid())),
    "gpt2, not reentrant": lambda: _gpt2(use_reentrant=False),
    "gpt2, reentrant": lambda: _gpt2(use_reentrant=True),
}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_step_equals_that_of_the_module(name: str) -> None:
    torch.manual_seed(0)
    module = CASES[name]().train()
    # Tokens by position, as many call a model.
    x = torch.zeros(4, 64, dtype=torch.int64) if "gpt2" in name else torch.randn(256, 32)
    graph = joint_capture(module, (x,), {}, _CPU).graph
    predicted = int(peak_bytes(memory_tables(graph), graph.group * 0, 1)[0])
    real = step_peak_bytes(module, (x,), {})
    loss_bytes = 0 if real.phase == "forward" else 4  # held by the caller's variable
    assert predicted == real.peak_bytes - loss_bytes


class _Masked(nn.Module):
    """Its last product is not saved, but runs again before what is saved after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        masked: Tensor = self.layer(x).masked_fill(x > 1, 0.0)
        return masked


@pytest.mark.parametrize("name", ["without", "not reentrant", "reentrant", "masked"])
def test_a_checkpoint_recomputes_its_function(name: str) -> None:
    module, x = CASES[name](), torch.randn(8, 32)
    captured_flops = int(joint_capture(module, (x,)).graph.flops.sum())
    with FlopCounterMode(display=False) as counter:
        module(x).mean().backward()
    assert captured_flops == counter.get_total_flops()


def _selective(layer: nn.Module, x: Tensor) -> Any:  # noqa: ANN401
    def policy(*_: object, **__: object) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


def _offloaded(layer: nn.Module, x: Tensor) -> Any:  # noqa: ANN401
    with save_on_cpu():
        return layer(x)


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        (_selective, _CPU, "with a context_fn, which selects what is recomputed"),
        (_offloaded, _CPU, "enters torch.autograd.graph.save_on_cpu"),
        (_nested, _CPU, "nests calls of torch.utils.checkpoint"),
        (_NOT_REENTRANT, StepOptions(checkpointing="block"), "calls torch.utils.checkpoint itself"),
        (
            _NOT_REENTRANT,
            StepOptions(backward_order="late_weight_gradients"),
            "calls torch.utils.checkpoint itself",
        ),
    ],
)
def test_what_cannot_be_captured_is_named(
    call: Callable[..., Any], options: StepOptions, message: str
) -> None:
    with pytest.raises(CaptureError, match=message):
        joint_capture(Checkpointed(call), (torch.randn(2, 32),), {}, options)


def test_hooks_of_another_thread_are_left_alone() -> None:
    failures: list[BaseException] = []

    def train() -> None:
        try:
            for _ in range(200):
                with save_on_cpu():
                    torch.ones(2, requires_grad=True).exp().sum().backward()  # type: ignore[no-untyped-call]
        except BaseException as error:
            failures.append(error)

    with checkpointed_calls():
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert not failures


def test_a_reentrant_checkpoint_whose_backward_reads_nothing_is_captured() -> None:
    def doubled(x: Tensor) -> Tensor:
        return checkpoint(Unread.doubled, x, use_reentrant=True)  # type: ignore[no-any-return]

    graphs = [
        joint_capture(Residual(call), (torch.randn(64, 16),), {}, _CPU).graph
        for call in (doubled, Unread.doubled)
    ]
    products = [sum("mul" in target for target in graph.targets) for graph in graphs]
    # Three in the forward and in the backward; those of the forward are computed again.
    assert products == [9, 6]

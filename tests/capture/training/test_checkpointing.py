"""Checkpointed steps: the same gradients, with less memory."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from fxpart.capture.training.joint import JointCapture, StepOptions, joint_capture
from fxpart.core.graph import OpGraph
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables
from fxpart.errors import NotApplicableError, SpecError
from tests.capture.small_specs import GPT2, LLAMA, RESNET
from tests.capture.training.joint_scene import Mlp, flat_inputs, on_cpu

BLOCK = StepOptions("block", fused_attention=False, fused_dropout=False)
NONE = replace(BLOCK, checkpointing="none")


def _peak(graph: OpGraph) -> int:
    return int(peak_bytes(memory_tables(graph), np.zeros(graph.n_ops, dtype=np.int64), 1)[0])


def _again(captured: JointCapture) -> list[str]:
    return [name for name in captured.graph.names if name.endswith("_again")]


def _targets_again(captured: JointCapture) -> list[str]:
    calls = zip(captured.graph.names, captured.graph.targets, strict=True)
    return [target for name, target in calls if name.endswith("_again")]


def _both(module: nn.Module, x: Tensor) -> tuple[JointCapture, JointCapture]:
    """Return the step with and without checkpointing, after checking that gradients are equal."""
    plain, checked = (joint_capture(module, (x,), options=options) for options in (NONE, BLOCK))
    _same(plain, checked, module, {"x": x})
    return plain, checked


def _same(
    plain: JointCapture, checked: JointCapture, module: nn.Module, inputs: dict[str, Tensor]
) -> None:
    assert list(plain.gradients) == list(checked.gradients)
    with torch.no_grad():
        expected = plain.program.graph_module(*flat_inputs(plain, module, inputs))
        results = checked.program.graph_module(*flat_inputs(checked, module, inputs))
    assert len(expected) > 1
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other)


class _Stack(nn.Module):
    """A chain of blocks, each in a list, of a class given by the test."""

    def __init__(self, make: Callable[[], nn.Module], depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class _Products(nn.Module):
    """A chain of four products, the last without a bias, and attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = nn.ModuleDict({n: nn.Linear(16, 16, bias=False) for n in "abcd"})

    def forward(self, x: Tensor) -> Tensor:
        q = self.lines["a"](x)
        k = self.lines["b"](x).sin()
        y = nn.functional.scaled_dot_product_attention(*(t[:, None] for t in (q, k, q)))[:, 0]
        return x + self.lines["d"](self.lines["c"](y).tanh())  # type: ignore[no-any-return]


def test_a_selective_step_keeps_attention_and_every_second_product() -> None:
    module, x = _Stack(_Products), torch.randn(8, 32, 16)
    plain, checked, whole = (
        joint_capture(module, (x,), options=replace(BLOCK, checkpointing=checkpointing))
        for checkpointing in ("none", "selective", "block")
    )
    _same(plain, checked, module, {"x": x})
    # Torch's own `create_selective_checkpoint_contexts` runs as many calls in a step.
    assert _calls_of_a_step(module, x) == {
        name: sum(target.split(".")[1:2] == [name] for target in checked.graph.targets)
        for name in ("mm", "tanh", "sin")
    }
    assert not any("attention" in name for name in _again(checked))
    assert any("attention" in name for name in _again(whole))


class _Attention(nn.Module):
    """Attention as products, between two linears, and experts as batched products with a router."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.router, self.experts = nn.Linear(16, 2), nn.Parameter(torch.randn(2, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.out(self.attend(self.into(x)))
        shares = torch.softmax(self.router(y), dim=-1)
        outputs = y.expand(2, -1, -1) @ self.experts
        return y + (outputs * shares.permute(2, 1, 0)).sum(0)  # type: ignore[no-any-return]

    def attend(self, q: Tensor) -> Tensor:
        return torch.softmax(q @ q.transpose(1, 2) * 0.25, dim=-1) @ q


class _NarrowValues(_Attention):
    """Values narrower than keys, for which torch computes attention by products."""

    def attend(self, q: Tensor) -> Tensor:
        parts = (q[:, None], q[:, None], q[:, None, :, :8])
        return nn.functional.scaled_dot_product_attention(*parts)[:, 0].repeat(1, 1, 2)


@pytest.mark.parametrize(
    ("attention", "scales", "softmax"),
    [(_Attention, 2, "_softmax"), (_NarrowValues, 0, "_safe_softmax")],
)
def test_only_the_core_of_attention_is_recomputed(
    attention: type[_Attention], scales: int, softmax: str
) -> None:
    module, x = _Stack(attention, 2), torch.randn(1, 64, 16)
    plain, checked = (
        joint_capture(module, (x,), options=replace(BLOCK, checkpointing=how))
        for how in ("none", "core_attention")
    )
    _same(plain, checked, module, {"x": x})
    again = Counter(target.split(".")[1] for target in _targets_again(checked))
    # Per block: scores, their scaling if any, the softmax. No linear, router or expert.
    products = {name: again[name] for name in ("bmm", "mul", "mm", "addmm")}
    assert products == {"bmm": 2, "mul": scales, "mm": 0, "addmm": 0}
    assert {name: n for name, n in again.items() if "softmax" in name} == {softmax: 2}
    # The softmax of one block at a time is kept, not of two; and so are copies for its products.
    assert 1 <= (_peak(plain.graph) - _peak(checked.graph)) / (64 * 64 * 4) < 1.25


def test_fused_attention_has_no_scores_to_recompute() -> None:
    options = replace(BLOCK, checkpointing="core_attention")
    with pytest.raises(NotApplicableError, match="its attention is one kernel"):
        joint_capture(_Stack(_Products), (torch.randn(8, 32, 16),), options=options)


def _policy() -> Callable[..., CheckpointPolicy]:
    """Return the policy of torchtitan's ``selective_ac_option="op"``, for one block."""
    counts: Counter[bool] = Counter()

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ANN401
        is_product = func == torch.ops.aten.mm.default
        counts[ctx.is_recompute] += is_product
        saved = is_product and counts[ctx.is_recompute] % 2 == 1
        saved |= "_scaled_dot_product" in str(func)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _calls_of_a_step(module: _Stack, x: Tensor) -> dict[str, int]:
    """Return how often torch runs some operators in a step with selective checkpoints."""
    y = x
    with _Counting() as counting:
        for block in module.blocks:
            contexts = partial(create_selective_checkpoint_contexts, _policy())
            y = checkpoint(block, y, use_reentrant=False, context_fn=contexts)
        y.mean().backward()  # type: ignore[no-untyped-call]
    return {name: counting.counts[name] for name in ("mm", "tanh", "sin")}


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_small_step_by_hand() -> None:
    plain, checked = _both(_Stack(_Wide), torch.randn(512, 4))
    # Per block: the product and its tanh, which the backward reads. Not the second product.
    assert [name.split("_")[0] for name in _again(checked)].count("tanh") == 3
    flops = [step.graph.flops.sum() for step in (plain, checked)]
    assert flops[1] - flops[0] == 3 * 2 * 512 * 4 * 64
    # Three tanh of 512 x 64 are kept; then one.
    assert _peak(plain.graph) - _peak(checked.graph) > 1.8 * 512 * 64 * 4
    graph = checked.graph
    for name in _again(checked):
        op = graph.names.index(name)
        assert graph.names[graph.forward_of[op]] == name.removesuffix("_again")
        assert graph.modules[op] == graph.modules[graph.forward_of[op]]
        assert graph.is_backward[op]
        assert checked.exported_names[op] == ""


def test_a_deeper_stack_only_keeps_one_more_block_input() -> None:
    x = torch.zeros(64, 4, device="meta")
    deep, deeper = (
        joint_capture(_Stack(_Wide, n).to("meta"), (x,), options=BLOCK).graph for n in (4, 5)
    )
    more = deeper.total_weight_bytes - deep.total_weight_bytes
    # Besides the weights and their gradients: the input of the block.
    assert _peak(deeper) - _peak(deep) <= 2 * more + x.nbytes


class _Writes(nn.Module):
    """Writes to its own result, through a view and whole, and then reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x).clone()
        y[:, :2] = y[:, :2] * 3
        y.tanh_()
        result: Tensor = y * y
        return result


class _WritesIntoResult(nn.Module):
    """Writes to its input, the result of the block before."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x.mul_(2)).sigmoid().sin()
        result: Tensor = y.mul_(0.5)
        return result


class _Residual(nn.Module):
    """Adds a value computed from its input to the input in place, which cannot be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        more: Tensor = self.line(x.tanh()).sin()
        return x.add_(more)


class _Copied(_Stack):
    """Does not change its caller's input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone())


class _Outside(_Stack):
    """The result of each block is written to between the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x.add_(1)
        return x


class _Reads(nn.Module):
    """Its result shares memory with a value that it reads again."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x)
        result: Tensor = torch.relu(y.tanh().view(4, -1)).view(-1, 4) + y.sum()
        return result


@pytest.mark.parametrize(
    "module",
    [
        _Stack(_Writes),
        _Copied(_WritesIntoResult),
        _Copied(_Residual),
        _Outside(_Reads),
        _Outside(_Wide),
        _Stack(_Reads),
    ],
    ids=["writes", "into results", "residual", "between", "between wide", "views"],
)
def test_written_values_are_recomputed_exactly_or_kept(module: nn.Module) -> None:
    _, checked = _both(module, torch.randn(8, 4))
    assert _again(checked)


class _Ends(nn.Module):
    """Its backward reads its result, and so does that of the next block."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.line(x))


class _EndsAfterRelu(_Ends):
    """Its backward does not read its own operand."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu(x))


class _EndsInProduct(_Ends):
    """Its last product saves its operand, and is not computed again."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.line(torch.tanh(x))
        return result


@pytest.mark.parametrize("make", [_Ends, _EndsAfterRelu])
def test_a_result_that_the_next_block_reads_too_is_recomputed(make: type[nn.Module]) -> None:
    _, checked = _both(_Stack(make), torch.randn(8, 4))
    assert sum("tanh" in name for name in _again(checked)) == 3


@pytest.mark.parametrize("make", [_Ends, _EndsAfterRelu, _EndsInProduct])
@pytest.mark.parametrize("shape", [(8, 4), (2, 4, 4)])
def test_a_checkpointed_step_computes_as_much_as_torch_does(
    make: type[nn.Module], shape: tuple[int, ...]
) -> None:
    module, x = _Stack(make), torch.randn(shape)
    checked = joint_capture(module, (x,), options=BLOCK)
    with FlopCounterMode(display=False) as counter:
        for block in module.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        x.mean().backward()  # type: ignore[no-untyped-call]
    assert checked.graph.flops.sum() == counter.get_total_flops()


class _Twice(_Stack):
    """Runs its blocks twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def test_a_block_that_runs_twice_has_two_backwards() -> None:
    _, once = _both(_Stack(_Wide, 2), torch.randn(8, 4))
    _, twice = _both(_Twice(_Wide, 2), torch.randn(8, 4))
    assert len(_again(twice)) == 2 * len(_again(once))


class _Norm(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU())


def test_dropout_and_batch_normalization_are_recomputed() -> None:
    module = _Stack(_Norm).to("meta").train()
    x = torch.zeros(8, 4, device="meta")
    plain, checked = (
        joint_capture(module, (x,), options=StepOptions(c)) for c in ("none", "block")
    )
    assert plain.gradients.keys() == checked.gradients.keys()
    names = " ".join(_again(checked))
    assert names.count("native_dropout") == names.count("native_batch_norm") == 3
    # Counters of batches are not incremented a second time.
    assert "add_" not in names
    assert _peak(checked.graph) < _peak(plain.graph)


@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet"])
def test_gradients_of_models_are_unchanged(name: str) -> None:
    spec = {"gpt2": GPT2, "llama": LLAMA, "resnet": RESNET}[name]
    module, inputs = on_cpu(spec)
    plain, checked = (joint_capture(module, (), inputs, options) for options in (NONE, BLOCK))
    _same(plain, checked, module, inputs)
    assert _again(checked)
    # A backward with its recomputation stays on the device of its forward.
    graph = checked.graph
    assert np.array_equal(graph.group[graph.forward_of], graph.group)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(SpecError, match="no repeated blocks in Mlp"):
        joint_capture(Mlp(), (torch.zeros(2, 4),), options=BLOCK)


def test_captures_are_deterministic() -> None:
    module, x = _Stack(_Writes), torch.randn(8, 4)
    first, second = (joint_capture(module, (x,), options=BLOCK).graph for _ in range(2))
    assert first.names == second.names
    assert first.reads.tolist() == second.reads.tolist()

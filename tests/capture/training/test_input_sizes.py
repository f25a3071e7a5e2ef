"""A step with symbolic sizes: the same operators, with sizes from the inputs alone."""

import pytest
import torch
from torch import SymInt, Tensor, fx, nn
from torch.export import Dim

from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.training.joint import JointProgram, StepOptions, joint_capture, joint_programs
from tests.capture.small_specs import GPT2, LLAMA, RESNET
from tests.capture.training.joint_scene import flat_inputs, on_cpu


def _symbolic(
    module: nn.Module, inputs: dict[str, Tensor], options: StepOptions, least: int = 1
) -> JointProgram:
    batch = Dim("batch", min=least, max=1024)
    return joint_programs(module, (), inputs, options, {name: {0: batch} for name in inputs})


def _operators(step: JointProgram) -> list[fx.Node]:
    calls = [n for n in step.program.graph.nodes if n.op == "call_function"]
    return [node for node in calls if not isinstance(node.meta["val"], SymInt)]


@pytest.mark.parametrize(
    ("spec", "checkpointing"), [(GPT2, "block"), (LLAMA, "none"), (RESNET, "none")]
)
def test_a_symbolic_step_has_the_operators_of_a_static_one(
    spec: ModelSpec, checkpointing: str
) -> None:
    module, inputs = on_cpu(spec)
    options = StepOptions(checkpointing)
    symbolic = _symbolic(module, inputs, options)
    static = joint_programs(module, (), inputs, options)
    assert [n.target for n in _operators(symbolic)] == [n.target for n in _operators(static)]
    sizes = [n for n in symbolic.program.graph.nodes if isinstance(n.meta.get("val"), SymInt)]
    assert sizes
    for node in sizes:
        assert all(i.op == "placeholder" or i in sizes for i in node.all_input_nodes)


def test_a_symbolic_step_runs_at_another_batch_size() -> None:
    module, inputs = on_cpu(GPT2)
    symbolic = _symbolic(module, inputs, StepOptions())
    more = {name: torch.cat([t, t.flip(0)[:1]]) for name, t in inputs.items()}
    static = joint_capture(module, (), more)
    results = symbolic.program.graph_module(*flat_inputs(symbolic, module, more))
    expected = static.program.graph_module(*flat_inputs(static, module, more))
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)


class _Odd(nn.Module):
    """Uses a size that is no polynomial: that of every other row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight)[::2].square().sum(0)


def test_a_size_that_is_no_polynomial_is_kept() -> None:
    module, x = _Odd(), torch.randn(6, 3)
    symbolic = _symbolic(module, {"x": x}, StepOptions(), least=4)
    shapes = [n.meta["val"].shape for n in _operators(symbolic) if n.meta["val"].dim() == 2]
    rows = {str(shape[0]) for shape in shapes}
    assert any("//" in size for size in rows)
    more = torch.randn(9, 3)
    loss, gradient = symbolic.program.graph_module(*flat_inputs(symbolic, module, {"x": more}))
    expected = module(more).mean()
    torch.testing.assert_close(loss, expected)
    expected.backward()
    torch.testing.assert_close(gradient, module.weight.grad)

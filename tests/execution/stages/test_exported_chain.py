"""Chains of exported models: results, training and refusals."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from fxpart.capture.api import capture
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.assignment import Assignment
from fxpart.errors import SpecError
from fxpart.execution.split.placement import split_by_assignment
from fxpart.execution.stages.chain import chain_stages
from fxpart.torch_compat.pipeline.tied_weights import tied_gradient_stages
from fxpart.torch_compat.split_module import split_module
from tests.capture.small_specs import GPT2, LLAMA
from tests.execution.stages.small_models import assert_same, assert_same_gradients
from tests.execution.stages.test_chain import assert_links


def real_model(spec: ModelSpec) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a small model with seeded weights, and seeded inputs."""
    built = build_model(spec)
    torch.manual_seed(0)
    model: Any = built.module.to_empty(device="cpu")
    model.tie_weights()  # of which memory for each weight made two
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
        for buffer in model.buffers():
            buffer.uniform_()
    return model, {
        name: torch.randint(0, 90, tensor.shape) for name, tensor in built.kwargs.items()
    }


@pytest.mark.parametrize("spec", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_exported_models_in_one_to_four_stages(spec: ModelSpec) -> None:
    model, inputs = real_model(spec)
    captured = capture(model, (), inputs)
    whole = captured.graph_module
    expected = whole(**inputs)
    n = captured.graph.n_ops
    for stages in (1, 2, 3, 4):
        cut = Assignment(
            np.arange(n, dtype=np.int64) * stages // n, tuple((s,) for s in range(stages))
        )
        chain = chain_stages(split_by_assignment(whole, captured.graph, cut))
        assert len(chain.stages) == stages
        assert_links(chain)
        output = chain(**inputs)
        assert type(output) is type(expected)
        assert_same(output, expected)
        assert_same_gradients(whole, output, whole(**inputs))
        names = dict(model.named_parameters(remove_duplicate=False))
        for stage in chain.stages:
            assert all(names[n].shape == p.shape for n, p in stage.module.named_parameters())
        tied = [t.stages for t in tied_gradient_stages(chain)]
        # The head of GPT-2 is its embedding.
        assert tied == ([(0, stages - 1)] if spec is GPT2 and stages > 1 else [])


def test_the_same_stages_come_of_a_split_by_a_callback_with_the_checks_in_a_stage() -> None:
    model, inputs = real_model(GPT2)
    whole = capture(model, (), inputs).graph_module
    split = split_module(whole, whole, lambda _: 0)
    chain = chain_stages(split)
    assert_same(chain(**inputs), whole(**inputs))
    # The checks of inputs are in no stage.
    modules = {name for name, _ in chain.stages[0].module.named_modules()}
    assert not any("_guards_fn" in name for name in modules)
    wrong = {name: tensor[:, :-1] for name, tensor in inputs.items()}
    with pytest.raises(SpecError, match="cut for other inputs than these: AssertionError") as got:
        chain.flat_inputs((), wrong)
    assert "\n" not in str(got.value)
    with pytest.raises(SpecError, match="cut for other inputs than these: TypeError"):
        chain.flat_inputs()


class Nested(nn.Module):
    """Nested inputs and outputs, a size used in a computation, a constant, an unused input."""

    def forward(
        self, pair: tuple[Tensor, Tensor], named: Mapping[str, Tensor], unused: Tensor
    ) -> dict[str, Any]:
        rows = pair[0].shape[0]
        a = torch.sin(pair[0])
        b = torch.exp(a) * rows
        c = b + named["z"].reshape(rows, -1)
        return {"c": [c, a], "input": pair[1], "none": None, "number": 5, "again": c}


def test_nested_inputs_dynamic_sizes_and_other_leaves() -> None:
    def example(rows: int) -> tuple[Any, ...]:
        return (torch.randn(rows, 3), torch.randn(2)), {"z": torch.randn(3 * rows)}, torch.ones(1)

    rows = torch.export.Dim("rows", min=2, max=64)
    shapes = (({0: rows}, None), {"z": {0: 3 * rows}}, None)
    program = torch.export.export(Nested(), example(4), dynamic_shapes=shapes)
    whole = program.module()
    assert isinstance(whole, fx.GraphModule)
    operators = [n for n in whole.graph.nodes if n.op.startswith("call")]
    for edge in range(1, len(operators)):
        stage_of = {node: int(index >= edge) for index, node in enumerate(operators)}
        if len({stage_of[n] for n in operators if n.name != "_guards_fn"}) < 2:
            continue
        split = split_module(whole, whole, stage_of.__getitem__, keep_original_order=True)
        chain = chain_stages(split)
        assert_links(chain)
        for size in (4, 6):
            inputs = example(size)
            assert_same(chain(*inputs), Nested()(*inputs))
            assert len(chain.flat_inputs(inputs)) == 3

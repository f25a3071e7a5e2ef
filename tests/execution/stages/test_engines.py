import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from fxpart.errors import SpecError
from fxpart.execution.stages.chain import Chain, chain_stages
from fxpart.execution.stages.engines import pipeline_stage
from fxpart.torch_compat.pipeline.build import build_pipeline_model
from fxpart.torch_compat.pipeline.cut_points import generate_pipeline_partition
from fxpart.torch_compat.split_module import split_module
from tests.execution.stages.small_models import assert_same, encoder_decoder


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group with only this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _chain() -> Chain:
    return chain_stages(generate_pipeline_partition(encoder_decoder()[0], ["enc"]))


def _whole(model: nn.Module) -> fx.GraphModule:
    """Return a model as one stage."""
    traced = fx.symbolic_trace(model)
    return split_module(traced, model, lambda _: 0)


@pytest.mark.usefixtures("alone")
def test_torch_runs_a_chain_of_one_stage() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    stage = build_pipeline_model(_whole(model))
    assert isinstance(stage, PipelineStage)
    x = torch.randn(6, 4)
    with torch.no_grad():
        output = ScheduleGPipe(stage, 3).step(x)
        expected = torch.cat([model(part) for part in x.chunk(3)])
    assert_same(output if isinstance(output, Tensor) else output[0], expected)


def test_without_a_process_group_the_error_names_the_call() -> None:
    chain = _chain()
    with pytest.raises(SpecError, match=r"stage 1 of 2: .*init_process_group first"):
        pipeline_stage(chain.stages[1], 2, torch.device("cpu"))
    with pytest.raises(SpecError, match=r"stage 0 of 2: .*init_process_group first"):
        build_pipeline_model(chain)


@pytest.mark.usefixtures("alone")
def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(SpecError, match=r"stage 2 was asked for, and there are 2"):
        build_pipeline_model(_chain(), "torch", stage_index=2)


@pytest.mark.usefixtures("alone")
def test_a_stage_that_passes_nothing_is_refused() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            torch.exp(x)
            return torch.sin(self.weight)

    stages = {"exp": 0, "sin": 1}
    split = split_module(fx.symbolic_trace(Apart()), Apart(), lambda n: stages[n.name])
    chain = chain_stages(split)
    with pytest.raises(SpecError, match=r"stage 0 of 2 passes on no tensor"):
        pipeline_stage(chain.stages[0], 2, torch.device("cpu"))
    with pytest.raises(SpecError, match=r"stage 1 of 2 takes no tensor"):
        pipeline_stage(chain.stages[1], 2, torch.device("cpu"))


def test_an_unknown_engine_names_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"no pipeline engine 'deepsped'; nearest: deepspeed"):
        build_pipeline_model(_chain(), "deepsped")


def test_an_engine_that_is_not_installed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As on a system without the package.
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    with pytest.raises(SpecError, match=r"needs the package deepspeed, .*pip install deepspeed"):
        build_pipeline_model(_chain(), "deepspeed")

"""The peak of a checkpointed step equals that of a step under torch's own checkpointing."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fxpart.capture.live_bytes import LiveBytes, storage_sizes
from fxpart.capture.models.build import build_model
from fxpart.capture.training.joint import StepOptions, joint_capture, repeated_blocks
from fxpart.capture.training.loss import training_loss
from fxpart.core.graph import OpGraph
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables
from tests.execution.small_presets import SMALL_PRESETS

BLOCK = StepOptions("block", fused_attention=False, fused_dropout=False)


def _peak(graph: OpGraph) -> int:
    return int(peak_bytes(memory_tables(graph), np.zeros(graph.n_ops, dtype=np.int64), 1)[0])


def _peak_under_torch(module: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Return the measured peak of a step of `module`, whose blocks become checkpointed."""
    for path in repeated_blocks(module):
        block = module.get_submodule(path)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    resident = storage_sizes([*module.parameters(), *module.buffers(), *inputs.values()])
    with LiveBytes([resident]) as counter, torch.enable_grad():
        results = module(**inputs)
        loss = training_loss([leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)])
        del results
        loss.backward()  # type: ignore[no-untyped-call]
    return int(counter.peak_bytes[0])


@pytest.mark.parametrize(("name", "share"), [("llama3_70b", 0.001), ("gpt2", 0.001)])
def test_the_peak_equals_that_of_torch_checkpointing(name: str, share: float) -> None:
    torch.manual_seed(0)
    spec = replace(SMALL_PRESETS[name], batch_size=8)
    built = build_model(spec, torch.device("cpu"))
    module = built.module
    captured = joint_capture(module, built.args, built.kwargs, BLOCK)
    expected = _peak_under_torch(module, dict(built.kwargs))
    assert _peak(captured.graph) == pytest.approx(expected, rel=share)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre", "post"])
def test_a_block_keeps_its_input_until_its_backward_ends(
    norm_first: bool, batch_first: bool
) -> None:
    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(
            16, 4, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first
        )

    blocks = nn.Sequential(layer(), layer(), layer())
    module = nn.Sequential(nn.Linear(16, 16), blocks, nn.Linear(16, 40))
    x = torch.randn(32, 6, 16, generator=torch.Generator().manual_seed(0))
    captured = joint_capture(module, (x,), options=BLOCK)
    # A run holds the divisor of the loss.
    assert _peak_under_torch(module, {"input": x}) - _peak(captured.graph) == 4

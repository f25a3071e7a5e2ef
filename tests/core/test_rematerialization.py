"""What a compiled backward recomputes: by hand, and compared with torch's own partitioner."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T  # noqa: N812
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional

from fxpart.capture.api import capture_graph
from fxpart.capture.training.joint import joint_graph
from fxpart.core.fusion import fused
from fxpart.core.graph import OpGraph, storage_roots
from fxpart.core.rematerialization import rematerialized

_BYTES = 8 * 16 * 4
"""Bytes of a tensor in these tests."""


def _saved(graph: OpGraph) -> dict[int, int]:
    """Return the bytes of each tensor of the forward that the backward reads."""
    root, saved = storage_roots(graph), {}
    for op in np.flatnonzero(graph.is_backward).tolist():
        for storage in root[graph.reads_of(op)].tolist():
            maker = int(graph.value_producer[storage])
            if maker >= 0 and not graph.is_backward[maker] and graph.value_alloc_bytes[storage]:
                saved[storage] = int(graph.value_alloc_bytes[storage])
    return saved


def _makers(graph: OpGraph) -> list[str]:
    """Return the operators that make these tensors, in alphabetical order."""
    makers = graph.value_producer[list(_saved(graph))].tolist()
    return sorted(graph.targets[op].split(".")[1] for op in makers)


class _Chain(nn.Module):
    """A product, three pointwise operators whose derivatives read their results, a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.second = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(torch.sigmoid(torch.exp(self.first(x)))))
        return result.sum()


def test_a_chain_is_recomputed_from_the_product_before_it() -> None:
    with torch.device("meta"):
        module, x = _Chain(), torch.empty(8, 16)
    graph = joint_graph(module, (x,), {})
    # Derivatives are computed from the three results; the loss has the shape of its gradient.
    assert _makers(graph) == ["exp", "sigmoid", "sum", "tanh"]
    cut = rematerialized(graph, [""] * graph.n_ops)
    # The second product's gradient reads the last one from memory.
    assert _makers(cut) == ["mm", "sum", "tanh"]
    assert sorted(_saved(cut).values()) == [4, _BYTES, _BYTES]
    # Nothing is recomputed across the edge of what is compiled, or where nothing is.
    inside = [None if target.startswith("aten.exp") else "" for target in graph.targets]
    assert _makers(rematerialized(graph, inside)) == ["exp", "sum", "tanh"]
    assert _makers(rematerialized(graph, [None] * graph.n_ops)) == _makers(graph)


def test_a_forward_alone_is_left_as_it_is() -> None:
    with torch.device("meta"):
        module, x = _Chain(), torch.empty(8, 16)
    step = joint_graph(module, (x,), {})
    assert rematerialized(step, [""] * step.n_ops) is not step
    forward = capture_graph(module, (x,))
    assert rematerialized(forward, [""] * forward.n_ops) is forward


class _Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(functional.dropout(self.first(x), 0.5, training=True)).sum()


def test_random_numbers_are_saved() -> None:
    with torch.device("meta"):
        module, x = _Dropped(), torch.empty(8, 16)
    graph = joint_graph(module, (x,), {})
    assert "native_dropout" in _makers(rematerialized(graph, [""] * graph.n_ops))


_SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TOKENS = torch.ones(2, 64, dtype=torch.int64)
_IMAGES = torch.ones(2, 3, 32, 32)


def _llama() -> tuple[nn.Module, dict[str, Tensor]]:
    config = T.LlamaConfig(**_SIZES, vocab_size=512, intermediate_size=192, use_cache=False)
    return T.LlamaForCausalLM(config), {"input_ids": _TOKENS, "labels": _TOKENS}


def _vit() -> tuple[nn.Module, dict[str, Tensor]]:
    none: dict[str, Any] = {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "num_labels": 10,
    }
    config = T.ViTConfig(**_SIZES, **none, image_size=32, patch_size=8)
    labels = torch.ones(2, dtype=torch.int64)
    return T.ViTForImageClassification(config), {"pixel_values": _IMAGES, "labels": labels}


@pytest.mark.parametrize(
    ("made", "not_here"),
    [
        # A causal mask, which torch 2.13's attention of a CPU needs beside it.
        (_llama, 2 * 64 * 64 * 4),
        (_vit, 0),
    ],
)
def test_as_many_bytes_are_saved_as_by_torch(
    made: Callable[[], tuple[nn.Module, dict[str, Tensor]]], not_here: int
) -> None:
    module, inputs = made()
    ours = sum(_saved(fused(joint_graph(module, (), inputs))).values())
    assert ours + not_here == pytest.approx(_saved_by_torch(module, inputs), rel=0.01)


def _saved_by_torch(module: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Return the bytes that AOTAutograd's partitioner saves for the backward of a step."""
    tensors = [*module.parameters(), *module.buffers(), *inputs.values()]
    others = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    saved: dict[int, int] = {}

    def forward(graph: torch.fx.GraphModule, _: object) -> object:
        return make_boxed_func(graph.forward)

    def backward(graph: torch.fx.GraphModule, _: object) -> object:
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        run = make_boxed_func(graph.forward)

        def counted(arguments: list[Any]) -> object:
            for name, argument in zip(names, arguments, strict=True):
                if isinstance(argument, Tensor) and not name.startswith("tangents"):
                    storage = argument.untyped_storage()
                    if storage.data_ptr() not in others:
                        saved[storage.data_ptr()] = storage.nbytes()
            return run(arguments)

        counted._boxed_call = True  # type: ignore[attr-defined]
        return counted

    compiled = torch.compile(
        module,
        fullgraph=True,
        backend=aot_autograd(
            fw_compiler=forward,
            bw_compiler=backward,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        ),
    )
    compiled(**inputs)[0].backward()
    return sum(saved.values())

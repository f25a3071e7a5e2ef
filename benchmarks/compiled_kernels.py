"""Compare the kernels that ``runtime=compiled`` predicts with those torch's inductor generates.

    python -m benchmarks.compiled_kernels

Each model is captured and its graph fused, and the same module is passed to `torch.compile` on this
machine's CPU. Only kernels that inductor generates are counted, not its library calls, of which
there is one for each product, convolution and attention. For the CPU it also generates copies to
layouts that libraries require, mostly of convolutions, and does not fuse some norms with their
readers.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
import transformers as T  # noqa: N812
from torch import nn

from fxpart.capture import capture
from fxpart.core.fusion import fused, kernel_count

Sample = tuple[str, nn.Module, torch.Tensor]


def main() -> int:
    """Print a row for each model, and return an exit status."""
    print(f"{'model':8} {'operators':>9} {'predicted':>9} {'inductor':>8}")
    predicted_total = counted_total = 0
    for name, module, sample in _models():
        graph = capture(module, (sample,)).graph
        kernels = fused(graph)
        predicted = kernel_count(kernels) - int((graph.flops > 0).sum())
        operators = kernel_count(graph) - int((graph.flops > 0).sum())
        counted = _inductor_kernels(module, sample)
        predicted_total, counted_total = predicted_total + predicted, counted_total + counted
        print(f"{name:8} {operators:9} {predicted:9} {counted:8}", flush=True)
    print(f"{'all':8} {'':9} {predicted_total:9} {counted_total:8}")
    return 0


def _models() -> Iterator[Sample]:
    """Yield small models of two blocks each, in evaluation mode."""
    tokens = torch.ones(2, 64, dtype=torch.int64)
    image = torch.ones(2, 3, 32, 32)
    layers: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text: dict[str, Any] = {
        **layers,
        "vocab_size": 512,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    gpt2: dict[str, Any] = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512}
    t5: dict[str, Any] = {"num_layers": 2, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4}
    stages: dict[str, Any] = {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2]}
    models: list[tuple[str, type[nn.Module], object, torch.Tensor]] = [
        ("gpt2", T.GPT2Model, T.GPT2Config(**gpt2, bos_token_id=0, eos_token_id=0), tokens),
        ("llama", T.LlamaModel, T.LlamaConfig(**text, intermediate_size=192), tokens),
        ("bert", T.BertModel, T.BertConfig(**text, intermediate_size=256), tokens),
        ("t5", T.T5EncoderModel, T.T5Config(**t5, vocab_size=512), tokens),
        ("vit", T.ViTModel, T.ViTConfig(**layers, image_size=32, patch_size=8), image),
        ("resnet", T.ResNetModel, T.ResNetConfig(**stages), image),
    ]
    for name, model_class, config, sample in models:
        torch.manual_seed(0)
        config.use_cache = False  # type: ignore[attr-defined]
        yield name, model_class(config).eval(), sample


def _inductor_kernels(module: nn.Module, sample: torch.Tensor) -> int:
    """Return the kernels that inductor generates for a module."""
    from torch._inductor import config, scheduler

    kernels = 0
    from_libraries = (scheduler.ExternKernelSchedulerNode, scheduler.NopKernelSchedulerNode)

    def count(nodes: list[scheduler.BaseSchedulerNode]) -> list[scheduler.BaseSchedulerNode]:
        nonlocal kernels
        kernels += sum(not isinstance(node, from_libraries) for node in nodes)
        return nodes

    torch._dynamo.reset()
    with torch.no_grad(), config.patch(_post_fusion_custom_pass=count, fx_graph_cache=False):
        torch.compile(module)(sample)
    return kernels


if __name__ == "__main__":
    sys.exit(main())

"""Quantized weights and caches, compared with the bytes of tensors created by libraries."""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from fxpart.capture.api import capture_graph
from fxpart.capture.captured import captured_graph
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.symbolic.api import symbolic_graph
from fxpart.capture.symbolic.dims import SymbolicDim
from fxpart.core.few_bits import (
    WeightFormat,
    with_cache_dtype,
    with_few_bits,
    with_few_bits_at_any_size,
)
from fxpart.core.graph import OpGraph
from fxpart.core.symbolic_graph import OF_OPERATORS, OF_VALUES, SymbolicGraph
from fxpart.errors import SpecError
from runner.config.paths import conf_dir

_ROWS, _COLUMNS = 384, 256

# Bytes of the tensors of a converted nn.Linear(256, 384, bias=False), by part:
# torchao 0.18.0 (Int8Tensor: qdata, scale, zero_point; Float8Tensor; MXTensor) and bitsandbytes
# 0.50.2 (Params4bit: data, absmax, quant_map). int4, gptq and awq from their published layouts.
_MADE_BY_LIBRARIES = {
    "int8": 98_304 + 1_536 + 384,
    "fp8": 98_304 + 1_536,
    "nf4": 49_152 + 6_144 + 64,
    "mxfp4": 49_152 + 3_072,
    "int4": 49_152 + 2 * (384 * 2) * 2,
    "gptq": 49_152 + 2 * 384 * 2 + 2 * 384 // 2 + 256 * 4,
    "awq": 49_152 + 2 * 384 * 2 + 2 * 384 // 2,
}


class _Tied(nn.Module):
    """An embedding whose table also computes the scores, as in small language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, _COLUMNS)
        self.inner = nn.Linear(_COLUMNS, _COLUMNS)
        self.lm_head = nn.Linear(_COLUMNS, 32, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.lm_head(self.inner(self.embed(tokens)))
        return scores


def _linear_graph() -> OpGraph:
    with torch.device("meta"):
        module = nn.Linear(_COLUMNS, _ROWS, bias=False, dtype=torch.bfloat16)
        return capture_graph(module, (torch.empty(3, _COLUMNS, dtype=torch.bfloat16),))


def _layout(name: str, **changed: object) -> WeightFormat:
    fields = OmegaConf.to_container(OmegaConf.load(conf_dir() / "weights" / f"{name}.yaml"))
    assert isinstance(fields, dict)
    fields.pop("source")
    return WeightFormat(**{**fields, **changed})


def test_every_weight_layout_has_a_reference() -> None:
    names = {path.stem for path in (conf_dir() / "weights").glob("*.yaml")}
    assert names == {"none", *_MADE_BY_LIBRARIES}


@pytest.mark.parametrize("name", _MADE_BY_LIBRARIES)
def test_bytes_equal_those_of_the_library(name: str) -> None:
    graph = _linear_graph()
    converted = with_few_bits(graph, _layout(name, read_share=1.0, fused_rows=None))
    assert converted.weight_bytes.tolist() == [_MADE_BY_LIBRARIES[name]]
    saved_bytes = _ROWS * _COLUMNS * 2 - _MADE_BY_LIBRARIES[name]
    assert (graph.moved_bytes - converted.moved_bytes).tolist() == [saved_bytes]
    assert converted.flops.tolist() == graph.flops.tolist()
    assert converted.dtypes == graph.dtypes


def test_weights_are_converted_for_any_size_as_for_each() -> None:
    layout = _layout("int4", group_size=32, read_share=0.7)
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(_COLUMNS, _ROWS), nn.GELU(), nn.Linear(_ROWS, 64))
        symbolic = symbolic_graph(
            module.bfloat16(),
            (torch.empty(3, _COLUMNS, dtype=torch.bfloat16),),
            dims=(SymbolicDim(0, 0, "batch"),),
        )
    converted = with_few_bits_at_any_size(symbolic, layout)
    assert converted is not None
    for batch in (1, 3, 1000):
        made, one = converted.at(batch=batch), with_few_bits(symbolic.at(batch=batch), layout)
        for name in ("moved_bytes", "weight_bytes", "flops", "value_bytes"):
            assert getattr(made, name).tolist() == getattr(one, name).tolist()
        assert made.targets == one.targets


def test_a_kernel_that_reads_at_half_the_rate_counts_twice_the_bytes() -> None:
    graph = _linear_graph()
    whole, slow = (with_few_bits(graph, _layout("int8", read_share=s)) for s in (1.0, 0.5))
    assert (slow.moved_bytes - whole.moved_bytes).tolist() == slow.weight_bytes.tolist()


def test_weights_of_no_product_or_tied_to_an_embedding_are_not_converted() -> None:
    with torch.device("meta"):
        graph = capture_graph(_Tied().bfloat16(), (torch.empty(2, 3, dtype=torch.int64),))
    converted = with_few_bits(graph, _layout("int8", keep=()))
    changed = [
        name
        for name, old, new in zip(
            graph.weight_names, graph.weight_bytes, converted.weight_bytes, strict=True
        )
        if old != new
    ]
    assert changed == ["inner.weight"]


def test_a_group_size_that_does_not_divide_a_row_is_refused() -> None:
    with pytest.raises(SpecError, match=r"does not divide the 256 columns .* choose 32 or 64"):
        with_few_bits(_linear_graph(), _layout("int4", group_size=96))


def test_the_last_block_of_a_row_is_filled_up() -> None:
    """Of a shard of gpt-oss over 8 devices: 360 columns are 12 blocks, of 16 + 1 bytes each."""
    with pytest.raises(SpecError, match="fills up groups; set weights"):
        _layout("mxfp4", group_size=0)
    layout = _layout("mxfp4")
    assert layout.bytes_of(rows=10, columns=360) == 10 * 12 * 17
    assert layout.bytes_of(rows=10, columns=384) == 10 * 12 * 17


def test_a_module_to_keep_is_not_converted() -> None:
    with torch.device("meta"):
        graph = capture_graph(nn.Sequential(nn.Linear(8, 8)), (torch.empty(3, 8),))
    with pytest.raises(SpecError, match="weights=int8 quantizes no weight of this model"):
        with_few_bits(graph, _layout("int8", keep=("0",)))


@pytest.mark.parametrize("is_decomposed", [False, True])
def test_only_the_weight_of_a_product_is_converted_even_if_the_bias_is_as_long(
    is_decomposed: bool,
) -> None:
    class Product(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as of nn.Linear
            if is_decomposed:
                return torch.addmm(self.bias, input, self.weight.t())
            return super().forward(input)

    with torch.device("meta"):
        graph = capture_graph(nn.Sequential(Product(1, 64)), (torch.empty(3, 1),))
    converted = with_few_bits(graph, _layout("int8", group_size=0, keep=()))
    changed = np.flatnonzero(graph.weight_bytes != converted.weight_bytes)
    assert [graph.weight_names[weight] for weight in changed] == ["0.weight"]


def _decode(architecture: str, **config: object) -> OpGraph:
    spec = ModelSpec(
        "m",
        architecture=architecture,
        config={"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 64, **config},
        step="decode",
        cache_len=64,
        dtype="bfloat16",
    )
    return captured_graph(spec, "operator", None).graph


def _attends(graph: OpGraph) -> int:
    """Return the bytes that attention moves."""
    ops = [op for op, target in enumerate(graph.targets) if "attention" in target]
    assert ops
    return int(graph.moved_bytes[ops].sum())


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_a_decode_reads_a_one_byte_cache_in_half_the_bytes(dtype: str) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    graph = _decode("LlamaForCausalLM", **sizes)
    half = with_cache_dtype(graph, dtype)
    tensor_bytes = 2 * 64 * 8 * 2  # 2 heads, 64 tokens, 8 numbers of 2 bytes
    assert half.value_alloc_bytes[half.value_is_cache].tolist()[:2] == [tensor_bytes // 2] * 2
    # Keys and values, each half as large, and nothing else.
    assert _attends(graph) - _attends(half) == tensor_bytes
    assert int((graph.moved_bytes - half.moved_bytes).sum()) == tensor_bytes
    assert with_cache_dtype(graph, "bf16") is graph
    with pytest.raises(SpecError, match="kv_cache=fp9 does not exist"):
        with_cache_dtype(graph, "fp9")


class _RepeatsHeads(nn.Module):
    def forward(self, kv_cache_0_keys: Tensor) -> Tensor:
        return kv_cache_0_keys.expand(8, -1, -1) * 2


def test_heads_repeated_by_a_view_are_read_once() -> None:
    with torch.device("meta"):
        keys = torch.empty(1, 64, 8, dtype=torch.bfloat16)
        graph = capture_graph(_RepeatsHeads(), (), {"kv_cache_0_keys": keys})
    half = with_cache_dtype(graph, "fp8")
    assert int((graph.moved_bytes - half.moved_bytes).sum()) == 64 * 8 * 2 // 2


def test_states_of_a_recurrence_are_not_keys_and_values() -> None:
    graph = _decode("MambaForCausalLM", state_size=8)
    assert graph.value_is_cache.any()
    with pytest.raises(SpecError, match="kv_cache=fp8 converts nothing in this model"):
        with_cache_dtype(graph, "fp8")


def test_how_many_experts_are_read_depends_on_the_sizes() -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    graph = _decode("MixtralForCausalLM", **sizes, num_local_experts=4)
    fields = (*OF_OPERATORS, *OF_VALUES)
    symbolic = SymbolicGraph(
        graph,
        ("batch",),
        (1,),
        exponents=np.array([[0]]),
        coefficients={name: getattr(graph, name)[:, None] for name in fields},
        value_batch_dim=np.full(graph.n_values, -1),
    )
    layout = _layout("int8")
    assert with_few_bits(graph, layout).weight_bytes.sum() < graph.weight_bytes.sum()
    assert with_few_bits_at_any_size(symbolic, layout) is None


@pytest.mark.parametrize(("rows", "copies"), [(None, -1), (3, -1), (2, 1)])
def test_more_rows_than_a_kernel_fuses_take_a_dequantized_copy(
    rows: int | None, copies: int
) -> None:
    """It is written and read; without it, no weight of 16 bits is read any more."""
    graph = _linear_graph()  # three rows
    layout = WeightFormat("nf4", 4, fused_rows=rows)
    converted = with_few_bits(graph, layout)
    plain = _ROWS * _COLUMNS * 2
    read = int((converted.moved_bytes - graph.moved_bytes).sum())
    assert read == _ROWS * _COLUMNS // 2 + copies * plain
    allocated = converted.value_alloc_bytes.sum() - graph.value_alloc_bytes.sum()
    assert allocated == (plain if copies == 1 else 0)

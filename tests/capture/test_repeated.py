"""Graphs with more blocks, against those drawn or captured with as many."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fxpart.capture import repeated
from fxpart.capture.captured import captured_graph, captured_symbolic
from fxpart.capture.models import short_model
from fxpart.capture.models.short_model import ShortModel, shortened
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.repeated import (
    NotRepeatedError,
    Repetition,
    graph_with_more_blocks,
    with_more_blocks,
)
from fxpart.core.graph import OpGraph
from fxpart.core.phases import StepOptions
from fxpart.core.symbolic_graph import SymbolicGraph
from tests.sketch import Sketch


def _drawn(blocks: int, period: int = 1, *, odd: int = -1, reads_all: bool = False) -> OpGraph:
    """Return a model of blocks with a cache each; every `period`-th one has an operator more.

    The block `odd` has more FLOPs; with `reads_all` the last operator reads what each block made.
    """
    sketch, made = Sketch(), []
    x = sketch.input(3)
    # The cache of each block, and a count of its tokens, which no operator reads.
    caches = [(sketch.input(100), sketch.input(1))[0] for _ in range(blocks)]
    weights = [sketch.weight(50 + block % period) for block in range(blocks)]
    x = mask = sketch.op([x], 3, module="embed")
    for block in range(blocks):
        module = f"model.layers.{block}"
        y = sketch.op([x, mask], 4, [weights[block]], 8 + (block == odd), module=f"{module}.proj")
        place = len(sketch.ops)
        written = sketch.op([y, caches[block]], 0, view_of=caches[block], module=module)
        if block % period:
            written = sketch.op([written], 5, flops=2, module=f"{module}.extra", group=place)
        x = sketch.op([written, x], 3, module=module)
        made.append(x)
    result = sketch.op([*made, x] if reads_all else [x], 6, flops=7, module="head")
    graph = sketch.graph(result, *caches)
    # Python keeps the mask to the end, and what a block made until the next one made as much.
    held = np.full(graph.n_values, -1)
    held[mask] = graph.n_ops - 1
    for value, later in zip(made, [*made[1:], result], strict=True):
        held[value] = graph.value_producer[later]
    names = [f"{kind}_{block}" for block in range(blocks) for kind in ("kv_cache", "cached_tokens")]
    ops = ["op", *(f"op_{op}" for op in range(1, graph.n_ops))]
    value_names = ("v", *names, *(ops[op] for op in graph.value_producer[2 * blocks + 1 :]))
    return replace(
        graph,
        names=tuple(ops),
        value_held=held,
        value_names=value_names,
        weight_names=tuple(f"model.layers.{block}.proj.weight" for block in range(blocks)),
        attention=np.array([[op, 16, 1] for op in np.flatnonzero(graph.flops == 8)]),
    )


def _drawn_step(blocks: int) -> OpGraph:
    """Return the training step of blocks that are computed again in the backward."""
    sketch, inputs, calls = Sketch(), [], []
    weights = [sketch.weight(50) for _ in range(blocks)]
    x = sketch.op([sketch.input(3)], 3, module="embed")
    for block in range(blocks):
        inputs.append(x)
        calls.append(len(sketch.ops))
        x = sketch.op([x], 3, [weights[block]], 8, module=f"layers.{block}.proj")
    gradient = sketch.op([sketch.op([x], 1, module="head")], 3, module="head")
    gradients = []
    for block in reversed(range(blocks)):
        call, weight, module = calls[block], [weights[block]], f"layers.{block}.proj"
        again = sketch.op([inputs[block]], 3, weight, 8, module=module, backward_of=call)
        reads = [gradient, inputs[block]]
        gradients.append(sketch.op(reads, 50, flops=8, module=module, backward_of=call))
        gradient = sketch.op([gradient, again], 3, weight, 8, module=module, backward_of=call)
    graph = sketch.graph(*gradients)
    # Operators are numbered, except those computed again: three for each block, from the last.
    first_again = graph.n_ops - 3 * blocks
    is_again = [op >= first_again and (op - first_again) % 3 == 0 for op in range(graph.n_ops)]
    numbers = np.cumsum(np.logical_not(is_again)) - 1
    names = [f"op_{number}" if number else "op" for number in numbers]
    for op in np.flatnonzero(is_again).tolist():
        names[op] = f"{names[graph.forward_of[op]]}_again"
    return replace(
        graph,
        names=tuple(names),
        value_names=("v", *(names[op] for op in graph.value_producer[1:])),
        weight_names=tuple(f"layers.{block}.proj.weight" for block in range(blocks)),
        gradient_values=np.array(gradients[::-1]),
        gradient_weights=np.arange(blocks),
    )


def _symbolic(graph: OpGraph) -> SymbolicGraph:
    """Return `graph` as one of any batch, all of whose sizes grow with it."""
    fields = ("flops", "moved_bytes", "value_bytes", "value_alloc_bytes")
    coefficients = {name: getattr(graph, name)[:, None] for name in fields}
    batch_dim = np.where(graph.value_bytes == 4, 1, 0)
    return SymbolicGraph(graph, ("batch",), (1,), np.array([[1]]), coefficients, batch_dim)


def _differences(a: Any, b: Any) -> list[str]:  # noqa: ANN401
    """Return the names of the fields in which two graphs differ, but for operators' numbers."""
    return [name for name in a.__slots__ if not _is_equal(getattr(a, name), getattr(b, name))]


def _is_equal(a: Any, b: Any) -> bool:  # noqa: ANN401
    if isinstance(a, OpGraph):
        return not _differences(_without_numbers(a), _without_numbers(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)


def _without_numbers(graph: OpGraph) -> OpGraph:
    """Return the graph with operators named by their texts: torch leaves numbers out."""
    names = tuple(re.sub(r"_\d+(?=$|_again$)", "", name) for name in graph.names)
    values = tuple(
        name if op < 0 else names[op] + name.removeprefix(graph.names[op])
        for op, name in zip(graph.value_producer.tolist(), graph.value_names, strict=True)
    )
    return replace(graph, names=names, value_names=values)


@pytest.mark.parametrize(("period", "first"), [(1, 1), (2, 2), (3, 1)])
def test_more_periods_are_drawn_alike(period: int, first: int) -> None:
    few = _symbolic(_drawn(first + 4 * period, period))
    made = with_more_blocks(few, Repetition("model.layers", first, period, copies=5))
    assert _differences(made, _symbolic(_drawn(first + 9 * period, period))) == []
    assert len(set(made.graph.names)) == made.graph.n_ops


def test_more_blocks_of_a_step_are_drawn_alike() -> None:
    made = with_more_blocks(_symbolic(_drawn_step(6)), Repetition("layers", 1, 1, copies=3)).graph
    drawn = _drawn_step(9)
    assert _differences(made, drawn) == []
    assert made.names == drawn.names


def test_a_block_of_other_size_is_refused() -> None:
    with pytest.raises(NotRepeatedError, match="differ in size"):
        with_more_blocks(_symbolic(_drawn(5, odd=2)), Repetition("model.layers", 1, 1, 3))


def test_what_reads_every_block_is_refused() -> None:
    with pytest.raises(NotRepeatedError, match="far from them"):
        with_more_blocks(_symbolic(_drawn(5, reads_all=True)), Repetition("model.layers", 1, 1, 3))


def test_blocks_of_another_period_are_refused() -> None:
    with pytest.raises(NotRepeatedError):
        with_more_blocks(_symbolic(_drawn(9, 2)), Repetition("model.layers", 1, 1, 3))


_SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def _decode(blocks: int) -> ModelSpec:
    config = {
        **{"vocab_size": 90, "n_positions": 64, "n_embd": 32, "n_head": 2, "n_layer": blocks},
        "activation_function": "relu",  # GPT-2's own is eight operators
    }
    return ModelSpec(
        "small", architecture="GPT2LMHeadModel", config=config, step="decode", cache_len=32
    )


def _captured_step(spec: ModelSpec) -> SymbolicGraph:
    options = StepOptions(checkpointing="block")
    return captured_symbolic(
        spec, ("batch",), None, "training", train_mode=True, options=options
    ).symbolic


def _captured(spec: ModelSpec) -> SymbolicGraph:
    return captured_symbolic(spec, ("batch", "context_len"), None, "decode").symbolic


@pytest.fixture
def repeated_graphs(monkeypatch: pytest.MonkeyPatch) -> list[SymbolicGraph]:
    """Return the list that graphs made from a few blocks are added to."""
    graphs: list[SymbolicGraph] = []

    def recorded(symbolic: SymbolicGraph, repetition: Repetition) -> SymbolicGraph:
        graphs.append(with_more_blocks(symbolic, repetition))
        return graphs[-1]

    monkeypatch.setattr(repeated, "with_more_blocks", recorded)
    return graphs


def test_few_blocks_give_the_capture_of_all(
    repeated_graphs: list[SymbolicGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = _decode(10)
    short = shortened(spec)
    assert short is not None
    assert short.spec.config["n_layer"] == 6
    made = _captured(spec)
    assert repeated_graphs == [made]  # else it was captured whole
    monkeypatch.setattr(short_model, "shortened", lambda *_: None)
    assert _differences(made, _captured(spec)) == []


def test_few_blocks_give_the_training_step_of_all(
    repeated_graphs: list[SymbolicGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(_decode(10), step=None, cache_len=None, seq_len=32, loss="own")
    made = _captured_step(spec)
    assert repeated_graphs == [made]
    assert len(made.graph.gradient_values)
    monkeypatch.setattr(short_model, "shortened", lambda *_: None)
    assert _differences(made, _captured_step(spec)) == []


@pytest.mark.parametrize("lora", [{}, {"rank": 4, "alpha": 8, "dropout": 0.1, "targets": []}])
@pytest.mark.parametrize("phase", ["inference", "training"])
def test_few_blocks_give_the_graph_of_all(
    phase: str, lora: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first blocks of a step with adapters are unlike the others.
    spec = replace(_decode(12 if lora else 10), step=None, cache_len=None, seq_len=16, lora=lora)
    graphs: list[OpGraph] = []

    def recorded(graph: OpGraph, repetition: Repetition) -> OpGraph:
        graphs.append(graph_with_more_blocks(graph, repetition))
        return graphs[-1]

    monkeypatch.setattr(repeated, "graph_with_more_blocks", recorded)
    made = captured_graph(spec, "operator", None, phase, train_mode=True).graph
    assert graphs == [made]
    monkeypatch.setattr(short_model, "shortened", lambda *_: None)
    whole = captured_graph(spec, "operator", None, phase, train_mode=True).graph
    assert _differences(made, whole) == []
    assert made.names == whole.names


def test_blocks_that_turn_out_to_differ_are_all_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ShortModel(_decode(1), Repetition("transformer.h", 0, 1, 1))
    monkeypatch.setattr(short_model, "shortened", lambda *_: wrong)
    modules = set(_captured(_decode(2)).graph.modules)
    assert sum(module.endswith("c_fc") for module in modules) == 2


_NEO = {
    "vocab_size": 90,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "num_heads": 2,
    "num_layers": 18,
    "attention_types": [[["global", "local"], 9]],
}


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("LlamaForCausalLM", {**_SMALL, "num_hidden_layers": 5}),
        ("T5ForConditionalGeneration", {"num_layers": 12, "d_model": 64, "d_kv": 16}),
        ("GPTNeoForCausalLM", _NEO),
    ],
    ids=["few blocks", "two lists of blocks", "blocks counted twice"],
)
def test_some_models_are_not_shortened(architecture: str, config: dict[str, object]) -> None:
    assert shortened(ModelSpec("m", architecture=architecture, config=config)) is None


def test_dense_blocks_before_experts_are_kept() -> None:
    config = {
        **_SMALL,
        "num_hidden_layers": 16,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 3,
    }
    short = shortened(ModelSpec("m", architecture="DeepseekV3ForCausalLM", config=config))
    assert short is not None
    # The block after the last dense one reads a result of it, and so differs from the next.
    assert short.repetition == Repetition("model.layers", 5, 1, 7)
    assert short.spec.config["num_hidden_layers"] == 9

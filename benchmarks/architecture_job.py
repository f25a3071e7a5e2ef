"""One architecture of transformers at 2 layers: built, captured and placed, or why not."""

import inspect
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fxpart import DeviceSpec, LatencyModel, Link, make_mode, make_problem, uniform_topology
from fxpart.capture.api import capture_graph
from fxpart.capture.models.architecture import model_class
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.graph import OpGraph
from fxpart.cost.evaluate import evaluate
from fxpart.errors import FxpartError, one_line

__all__ = ["DEPTH", "Outcome", "judge"]

DEPTH = 2
"""Layers of each stack."""
_DEPTH_KEY = re.compile(r"(^|_)(n_layers?|num_layers?|layers|depth|num_blocks|n_block)$")
_NESTING = 3
_MOST_TRIES = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far one architecture got, and what stopped it."""

    architecture: str
    status: str
    """``placed``, ``captured``, or the step that refused: ``build``, ``inputs`` or ``capture``."""
    reason: str = ""
    inputs: str = ""
    operators: int = 0
    seconds: float = 0.0


def judge(architecture: str) -> Outcome:
    """Return how far `architecture` gets in this process."""
    begin = time.perf_counter()
    outcome = _judged(architecture)
    return replace(outcome, seconds=time.perf_counter() - begin)


def _judged(architecture: str) -> Outcome:
    outcome = Outcome(architecture, "build")
    ways = _configs(architecture)
    for config in ways:
        outcome = _with_config(architecture, config)
        if outcome.operators:
            return outcome
    completed: dict[str, Any] = {}
    for _ in range(_MOST_TRIES):  # one refusal hides the next
        more = _merged(completed, dict(_completed(architecture, outcome.reason)))
        if more == completed:
            break
        completed = more
        outcome = _with_config(architecture, _merged(ways[0], completed))
        if outcome.operators:
            return replace(outcome, inputs=f"{outcome.inputs} with {completed}")
    return outcome


def _with_config(architecture: str, config: dict[str, Any]) -> Outcome:
    spec = ModelSpec(architecture, architecture, config=config)
    try:
        built = build_model(spec)
    except FxpartError as error:
        at = "inputs" if f"{architecture} needs " in str(error) else "build"
        return Outcome(architecture, at, one_line(error))
    shapes = " ".join(f"{name}{list(value.shape)}" for name, value in built.kwargs.items())
    try:
        graph = capture_graph(built.module, built.args, built.kwargs)
    except FxpartError as error:
        return Outcome(architecture, "capture", one_line(error), shapes)
    return _placed(architecture, graph, shapes)


def _placed(architecture: str, graph: OpGraph, shapes: str) -> Outcome:
    device = DeviceSpec("24gb", 24 * 10**9, {"float32": 1e13, "bfloat16": 1e14}, 1e12)
    topology = uniform_topology((device,) * 4, Link(25e9, 1e-5))
    try:
        problem = make_problem(graph, topology, LatencyModel())
        evaluate(problem, make_mode("kl_based")(problem))
    except FxpartError as error:
        return Outcome(architecture, "captured", one_line(error), shapes, graph.n_ops)
    return Outcome(architecture, "placed", "", shapes, graph.n_ops)


def _configs(architecture: str) -> list[dict[str, Any]]:
    """Return `DEPTH` layers, the same with its lists cut, and at last the model as it comes."""
    ways = [_shallow(architecture, with_lists=False), _shallow(architecture, with_lists=True), {}]
    return [way for index, way in enumerate(ways) if way not in ways[:index]]


def _shallow(architecture: str, *, with_lists: bool) -> dict[str, Any]:
    try:
        config_class = model_class(architecture).config_class
        config = config_class()
    except Exception:  # what it needs is said when the model is built
        return {}
    return dict(_cut(config, with_lists, _NESTING))


def _cut(config: Any, with_lists: bool, nesting: int) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Yield the keys of a configuration that make it shallow."""
    keys = {*inspect.signature(type(config)).parameters, *config.attribute_map}
    values = {key: value for key, value in vars(config).items() if key in keys}
    depths = set()
    for key, value in values.items():
        if _DEPTH_KEY.search(key) and type(value) is int and value > DEPTH:
            depths.add(value)
            yield key, DEPTH
        elif key == "depths" and isinstance(value, list | tuple):
            yield key, [min(depth, DEPTH) for depth in value]
        elif key in config.sub_configs and hasattr(value, "sub_configs") and nesting:
            nested = dict(_cut(value, with_lists, nesting - 1))
            if nested:
                # Where the class of a part is open, its kind must be named.
                is_open = not hasattr(config.sub_configs[key], "attribute_map")
                yield key, {"model_type": value.model_type, **nested} if is_open else nested
    for key, value in values.items():
        if with_lists and isinstance(value, list | tuple) and len(value) in depths:
            yield key, list(value[:DEPTH])


_USUAL = {
    "num_experts_per_tok": 2,
    "image_token_id": 5,
    "image_token_index": 5,
    "vocab_size": 1024,
    "vocabulary_map": {"<image>": 5, "IMGIMGAZ": 6},
    "prediction_length": 24,
    "default_language": "en_XX",
}
"""Of settings that a configuration leaves out although its model needs them."""
_USUAL_HEAD = 128
_OF_AXES = r"Split sizes add up to \d+ but got the tensor's size of (\d+)"
_REMEDIES = (
    ("`is_decoder=True`", "is_decoder", True),
    ("must be divisible by num_heads", "num_cross_attention_heads", 1),
    ("stride should not be zero", "image_size", 1024),  # of pools of more patches than there are
    ("ne() received an invalid", "pad_token_id", 1),
    ("ne() received an invalid", "mask_token_id", 2),
    ("if loss is expected", "return_loss", False),
)
"""What a refusal says, and what helps where the configuration has such a setting."""


def _completed(architecture: str, reason: str) -> Iterator[tuple[str, Any]]:
    """Yield settings with which a configuration makes sense whose defaults alone make none."""
    try:
        cls = model_class(architecture)
        config = cls.config_class()
    except Exception:  # said when the model is built
        return
    reads_head = '"head_dim"' in Path(inspect.getfile(cls)).read_text(encoding="utf-8")
    yield from _settings(config, reason, reads_head, _NESTING)


def _settings(
    config: Any,  # noqa: ANN401
    reason: str,
    reads_head: bool,
    nesting: int,
) -> Iterator[tuple[str, Any]]:
    keys = {*inspect.signature(type(config)).parameters, *config.attribute_map}
    values: dict[str, Any] = {key: value for key, value in vars(config).items() if key in keys}
    yield from ((key, usual) for key, usual in _USUAL.items() if key in values and not values[key])
    yield from ((k, usual) for told, k, usual in _REMEDIES if told in reason and k in values)
    yield from _of_attention(values, reason, reads_head)
    for key in config.sub_configs if nesting else ():
        part: Any = values.get(key)
        is_part = hasattr(part, "sub_configs")
        inner = dict(_settings(part, reason, reads_head, nesting - 1)) if is_part else {}
        if inner:
            is_open = not hasattr(config.sub_configs[key], "attribute_map")
            yield key, {"model_type": part.model_type, **inner} if is_open else inner


def _of_attention(
    values: Mapping[str, Any], reason: str, reads_head: bool
) -> Iterator[tuple[str, Any]]:
    """Yield the size of heads, how many have keys, and how positions are shared among axes."""
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    if type(heads) is not int or type(width) is not int:
        return
    if "num_key_value_heads" in values and not values["num_key_value_heads"]:
        yield "num_key_value_heads", heads
    is_whole, unsplit = width % heads == 0, re.search(_OF_AXES, reason)
    if not values.get("head_dim") and ("head_dim" in values or (reads_head and not is_whole)):
        yield "head_dim", width // heads if is_whole else _USUAL_HEAD
    elif unsplit and isinstance(values.get("rope_parameters"), dict):
        pairs = int(unsplit[1])
        side = 3 * pairs // 8  # of height and of width, as Qwen2-VL: 16, 24 and 24 of 64
        sections = [pairs - 2 * side, side, side]
        yield "rope_parameters", values["rope_parameters"] | {"mrope_section": sections}


def _merged(config: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return `config` with `more` over it, nested ones too."""
    merged = dict(config)
    for key, value in more.items():
        known = merged.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            merged[key] = _merged(known, value)
        else:
            merged[key] = value
    return merged

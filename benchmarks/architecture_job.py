"""Build, capture and place one transformers architecture at 2 layers, or report what failed."""

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
"""Number of layers kept in each stack."""
_DEPTH_KEY = re.compile(r"(^|_)(n_layers?|num_layers?|layers|depth|num_blocks|n_block)$")
_MAX_NESTING = 3
_MAX_TRIES = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """The last step that one architecture completed, and the error that stopped it."""

    architecture: str
    status: str
    """``placed``, ``captured``, or the step that failed: ``build``, ``inputs`` or ``capture``."""
    reason: str = ""
    inputs: str = ""
    operators: int = 0
    seconds: float = 0.0


def judge(architecture: str) -> Outcome:
    """Build, capture and place `architecture` in this process and return the outcome."""
    begin = time.perf_counter()
    outcome = _try_configs(architecture)
    return replace(outcome, seconds=time.perf_counter() - begin)


def _try_configs(architecture: str) -> Outcome:
    outcome = Outcome(architecture, "build")
    configs = _candidate_configs(architecture)
    for config in configs:
        outcome = _try_config(architecture, config)
        if outcome.operators:
            return outcome
    added: dict[str, Any] = {}
    for _ in range(_MAX_TRIES):  # fixing one error reveals the next
        extended = _merge(added, dict(_missing_settings(architecture, outcome.reason)))
        if extended == added:
            break
        added = extended
        outcome = _try_config(architecture, _merge(configs[0], added))
        if outcome.operators:
            return replace(outcome, inputs=f"{outcome.inputs} with {added}")
    return outcome


def _try_config(architecture: str, config: dict[str, Any]) -> Outcome:
    spec = ModelSpec(architecture, architecture, config=config)
    try:
        built = build_model(spec)
    except FxpartError as error:
        step = "inputs" if f"{architecture} needs " in str(error) else "build"
        return Outcome(architecture, step, one_line(error))
    shapes = " ".join(f"{name}{list(value.shape)}" for name, value in built.kwargs.items())
    try:
        graph = capture_graph(built.module, built.args, built.kwargs)
    except FxpartError as error:
        return Outcome(architecture, "capture", one_line(error), shapes)
    return _place(architecture, graph, shapes)


def _place(architecture: str, graph: OpGraph, shapes: str) -> Outcome:
    device = DeviceSpec("24gb", 24 * 10**9, {"float32": 1e13, "bfloat16": 1e14}, 1e12)
    topology = uniform_topology((device,) * 4, Link(25e9, 1e-5))
    try:
        problem = make_problem(graph, topology, LatencyModel())
        evaluate(problem, make_mode("kl_based")(problem))
    except FxpartError as error:
        return Outcome(architecture, "captured", one_line(error), shapes, graph.n_ops)
    return Outcome(architecture, "placed", "", shapes, graph.n_ops)


def _candidate_configs(architecture: str) -> list[dict[str, Any]]:
    """Return distinct settings: `DEPTH` layers, the same with lists cut, and the defaults."""
    configs = [
        _shallow_config(architecture, with_lists=False),
        _shallow_config(architecture, with_lists=True),
        {},
    ]
    return [config for index, config in enumerate(configs) if config not in configs[:index]]


def _shallow_config(architecture: str, *, with_lists: bool) -> dict[str, Any]:
    try:
        config_class = model_class(architecture).config_class
        config = config_class()
    except Exception:  # the error is reported when the model is built
        return {}
    return dict(_shallow_settings(config, with_lists, _MAX_NESTING))


def _shallow_settings(config: Any, with_lists: bool, nesting: int) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Yield the settings that reduce a configuration to `DEPTH` layers."""
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
            nested = dict(_shallow_settings(value, with_lists, nesting - 1))
            if nested:
                # A part of unspecified class needs its model type.
                is_open = not hasattr(config.sub_configs[key], "attribute_map")
                yield key, {"model_type": value.model_type, **nested} if is_open else nested
    for key, value in values.items():
        if with_lists and isinstance(value, list | tuple) and len(value) in depths:
            yield key, list(value[:DEPTH])


_DEFAULTS = {
    "num_experts_per_tok": 2,
    "image_token_id": 5,
    "image_token_index": 5,
    "vocab_size": 1024,
    "vocabulary_map": {"<image>": 5, "IMGIMGAZ": 6},
    "prediction_length": 24,
    "default_language": "en_XX",
}
"""Values for settings that a model needs although its configuration has no default."""
_DEFAULT_HEAD_DIM = 128
_SPLIT_ERROR = r"Split sizes add up to \d+ but got the tensor's size of (\d+)"
_REMEDIES = (
    ("`is_decoder=True`", "is_decoder", True),
    ("must be divisible by num_heads", "num_cross_attention_heads", 1),
    (
        "stride should not be zero",
        "image_size",
        1024,
    ),  # pooling over more patches than the image has
    ("ne() received an invalid", "pad_token_id", 1),
    ("ne() received an invalid", "mask_token_id", 2),
    ("if loss is expected", "return_loss", False),
)
"""Part of an error message, the setting that fixes it where there is one, and its value."""


def _missing_settings(architecture: str, reason: str) -> Iterator[tuple[str, Any]]:
    """Yield settings that complete a configuration whose defaults are inconsistent."""
    try:
        cls = model_class(architecture)
        config = cls.config_class()
    except Exception:  # the error is reported when the model is built
        return
    reads_head = '"head_dim"' in Path(inspect.getfile(cls)).read_text(encoding="utf-8")
    yield from _settings_for(config, reason, reads_head, _MAX_NESTING)


def _settings_for(
    config: Any,  # noqa: ANN401
    reason: str,
    reads_head: bool,
    nesting: int,
) -> Iterator[tuple[str, Any]]:
    keys = {*inspect.signature(type(config)).parameters, *config.attribute_map}
    values: dict[str, Any] = {key: value for key, value in vars(config).items() if key in keys}
    yield from (
        (key, value) for key, value in _DEFAULTS.items() if key in values and not values[key]
    )
    yield from ((k, value) for text, k, value in _REMEDIES if text in reason and k in values)
    yield from _attention_settings(values, reason, reads_head)
    for key in config.sub_configs if nesting else ():
        part: Any = values.get(key)
        is_part = hasattr(part, "sub_configs")
        inner = dict(_settings_for(part, reason, reads_head, nesting - 1)) if is_part else {}
        if inner:
            is_open = not hasattr(config.sub_configs[key], "attribute_map")
            yield key, {"model_type": part.model_type, **inner} if is_open else inner


def _attention_settings(
    values: Mapping[str, Any], reason: str, reads_head: bool
) -> Iterator[tuple[str, Any]]:
    """Yield the head size, the number of key-value heads, and the split of positions over axes."""
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    if type(heads) is not int or type(width) is not int:
        return
    if "num_key_value_heads" in values and not values["num_key_value_heads"]:
        yield "num_key_value_heads", heads
    divides, split_error = width % heads == 0, re.search(_SPLIT_ERROR, reason)
    if not values.get("head_dim") and ("head_dim" in values or (reads_head and not divides)):
        yield "head_dim", width // heads if divides else _DEFAULT_HEAD_DIM
    elif split_error and isinstance(values.get("rope_parameters"), dict):
        pairs = int(split_error[1])
        side = 3 * pairs // 8  # of height and of width, as Qwen2-VL: 16, 24 and 24 of 64
        sections = [pairs - 2 * side, side, side]
        yield "rope_parameters", values["rope_parameters"] | {"mrope_section": sections}


def _merge(config: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return `config` updated recursively with `more`."""
    merged = dict(config)
    for key, value in more.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged

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

__all__ = ["DEPTH", "Outcome", "candidate_configs", "judge"]

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
    configs = candidate_configs(architecture)
    outcomes = []
    for config in configs:
        outcomes.append(_try_config(architecture, config))
        if outcomes[-1].operators:
            return outcomes[-1]
    # The last are the defaults; their error may be of the layers that the first lacks.
    first, last = outcomes[0], outcomes[-1]
    completed = _complete_config(architecture, configs[0], last)
    faithful = _shallow_config(architecture, with_lists=True, with_parts=True)
    for config, outcome in ((configs[0], first), (faithful, last)):
        if completed.operators:
            break
        if (config, outcome.reason) != (configs[0], last.reason):
            retried = _complete_config(architecture, config, outcome)
            completed = retried if retried.operators else completed
    return completed


def _complete_config(architecture: str, config: dict[str, Any], outcome: Outcome) -> Outcome:
    """Return the outcome with settings added to `config` that the failure of `outcome` asks for."""
    added: dict[str, Any] = {}
    for _ in range(_MAX_TRIES):  # fixing one error reveals the next
        extended = _merge(added, dict(_missing_settings(architecture, outcome.reason)))
        if extended == added:
            break
        added = extended
        outcome = _try_config(architecture, _merge(config, added))
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


def candidate_configs(architecture: str) -> list[dict[str, Any]]:
    """Return distinct settings: `DEPTH` layers, the same with lists cut, and the defaults."""
    configs = [
        _shallow_config(architecture, with_lists=False),
        _shallow_config(architecture, with_lists=True),
        {},
    ]
    return [config for index, config in enumerate(configs) if config not in configs[:index]]


def _shallow_config(
    architecture: str, *, with_lists: bool, with_parts: bool = False
) -> dict[str, Any]:
    try:
        config_class = model_class(architecture).config_class
        config = config_class()
    except Exception:  # the error is reported when the model is built
        return {}
    return dict(_shallow_settings(config, with_lists, with_parts, _MAX_NESTING))


def _shallow_settings(
    config: Any,  # noqa: ANN401
    with_lists: bool,
    with_parts: bool,
    nesting: int,
) -> Iterator[tuple[str, Any]]:
    """Yield the settings that reduce a configuration to `DEPTH` layers.

    With `with_parts`, also what the model sets in a part of unspecified class, such as the stages
    that a backbone returns: a part that is given replaces the model's.
    """
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
            nested = dict(_shallow_settings(value, with_lists, with_parts, nesting - 1))
            if nested:
                # A part of unspecified class needs its model type.
                is_open = not hasattr(config.sub_configs[key], "attribute_map")
                own = _own_settings(value) if is_open and with_parts else {}
                yield key, own | {"model_type": value.model_type, **nested} if is_open else nested
    for key, value in values.items():
        if with_lists and isinstance(value, list | tuple) and len(value) in depths:
            yield key, list(value[:DEPTH])


def _own_settings(part: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the plain settings of `part` that are not the defaults of its class."""
    default = vars(type(part)())
    keys = {*inspect.signature(type(part)).parameters, "_out_features", "_out_indices"}
    plain = (bool, int, float, str, list, tuple)
    # The stages of a backbone are set by the names of their properties.
    chosen = {
        key.removeprefix("_"): value
        for key, value in vars(part).items()
        if key in keys and isinstance(value, plain) and value != default.get(key)
    }
    if "out_features" in chosen:  # the other name for the same stages
        chosen.pop("out_indices", None)
    return chosen


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
    ("cat expects at least one tensor", "projector_scale_factors", [1.0]),
    ("k not in range", "num_queries", 100),  # fewer than the places of a small image
)
"""Part of an error message, the setting that fixes it where there is one, and its value."""
_STRIPS = {
    "reduce_channel": [1, 1, 0],
    "return_channel": [1, 1, 0],
    "vertical_long_to_small_conv_longratio": [[7, 1], [1, 1], [3, 0]],
    "vertical_long_to_small_conv_midratio": [[5, 1], [1, 1], [2, 0]],
    "vertical_long_to_small_conv_shortratio": [[3, 1], [1, 1], [1, 0]],
    "horizontal_small_to_long_conv_longratio": [[1, 7], [1, 1], [0, 3]],
    "horizontal_small_to_long_conv_midratio": [[1, 5], [1, 1], [0, 2]],
    "horizontal_small_to_long_conv_shortratio": [[1, 3], [1, 1], [0, 1]],
    "symmetric_conv_long_longratio": [[7, 7], [1, 1], [3, 3]],
    "symmetric_conv_long_midratio": [[5, 5], [1, 1], [2, 2]],
    "symmetric_conv_long_shortratio": [[3, 3], [1, 1], [1, 1]],
}
_UNSET: dict[str, dict[str, Any]] = {
    "empty(": {
        "n_routed_experts": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "top_k_experts": 2,
        "moe_intermediate_size": 1024,
        "decoder_hidden_size": 512,
        "decoder_depth": DEPTH,
        "decoder_num_heads": 8,
    },
    "'NoneType' object is not subscriptable": {
        "layer_types": ["full_attention"] * DEPTH,
        "mlp_layer_types": ["dense", "sparse"],
        "upsample_out_channels": [256, 256],
        "conv_out_channels": [256, 256],
        # As published for the detectors of PP-OCR.
        "kernel_list": [3, 2, 2],
        "scale_factor_list": [1, 2, 4, 8],
        "intraclass_block_config": _STRIPS,
    },
    "object of type 'NoneType' has no len()": {"deepstack_layer_map": [[0, 0]]},
    "unsupported operand type(s) for *: 'int' and 'NoneType'": {"n_shared_experts": 1},
    "clamp called but both min and max are none": {"clip_qkv": 8.0},
    "'NoneType' object has no attribute 'split'": {"downsample_rate": "4/8"},
    "needs past_time_features": {"num_time_features": 2},
}
"""Part of an error message, and values for the settings without one that may cause it."""


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
    for text, settings in _UNSET.items():
        if text in reason:
            yield from ((k, v) for k, v in settings.items() if k in values and not values[k])
    if "can only concatenate list" in reason:  # a default that is not of the stated type
        yield from ((k, list(v)) for k, v in values.items() if isinstance(v, tuple))
    if f"'{type(config).__name__}' object has no attribute 'rope_theta'" in reason:
        yield "rope_theta", 1e4
    yield from _attention_settings(values, reason, reads_head)
    yield from _rope_settings(values, reason)
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
        rope = values["rope_parameters"]
        yield "rope_parameters", rope | {"mrope_section": _sections(int(split_error[1]))}


def _sections(pairs: int) -> list[int]:
    """Return the numbers of pairs that rotate with the position in time, height and width."""
    side = 3 * pairs // 8  # as Qwen2-VL: 16, 24 and 24 of 64
    return [pairs - 2 * side, side, side]


def _rope_settings(values: Mapping[str, Any], reason: str) -> Iterator[tuple[str, Any]]:
    """Yield the rotary positions of a model that needs them for each kind of layer or axis."""
    rope, kinds, head = (values.get(k) for k in ("rope_parameters", "layer_types", "head_dim"))
    if not isinstance(rope, dict):
        return
    if isinstance(kinds, list) and any(f"KeyError: '{kind}'" in reason for kind in kinds):
        plain = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 1e4)}
        yield "rope_parameters", dict.fromkeys(dict.fromkeys(kinds), plain)
    elif "object of type 'NoneType' has no len()" in reason:
        pairs = (head or _DEFAULT_HEAD_DIM) // 2
        yield "rope_parameters", rope | {"mrope_section": _sections(pairs)}


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

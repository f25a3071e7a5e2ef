"""Prepare a serving step: prefill, which fills a cache from a prompt, or decode of one token.

The cache is transformers' `StaticCache`, allocated for all tokens from the start. Its contents
depend on the layer: keys and values of all heads, of fewer heads (grouped queries), of a window, or
of a latent; states of convolutions and recurrences; keys and values of an encoder's output. They
are found by a short pass on the meta device. The tensors become inputs of the step, with names that
start with `CACHE`, and the step writes into them in place.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from fxpart.capture.models.forward_failure import change_for
from fxpart.capture.models.input_shapes import positions
from fxpart.capture.models.inputs import example_inputs
from fxpart.capture.models.shape_request import PLACEHOLDERS
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.graph import CACHE, ENCODER_STATES
from fxpart.errors import CaptureError, FxpartError, SpecError, one_line
from fxpart.sharding.tensor_plan import text_config

__all__ = [
    "cache_room",
    "context_range",
    "experts_for_shapes",
    "fill_counters",
    "prepare_step",
    "prompt_range",
]

_PARAMETERS = ("past_key_values", "cache_params", "state")
"""Names of the cache among the parameters of a model's ``forward``."""
_COUNTER = "cumulative_length"
_COUNT = "cached_tokens_"
"""Prefix of inputs that count the tokens in a layer's cache."""
_EXPERTS = "_experts_implementation"
_WINDOWS = ("sliding_window", "attention_chunk_size")
"""Configuration fields that bound the tokens cached by some layers."""
_DEFAULT_ROOM = 512
_PROMPT = 2
"""Tokens of the pass that finds the cached tensors; more would only change their lengths."""
_LIMITS_OF_FAKES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
"""What fake tensors, which have no values, cannot do, though a real pass may."""


def prepare_step(model: Any, spec: ModelSpec) -> dict[str, Tensor]:  # noqa: ANN401 - untyped upstream
    """Make `model` take its cache as inputs, and return the inputs of the step of `spec`, on meta.

    For batch size B, these are

    - for ``decode``: ``input_ids`` (B, 1), or ``decoder_input_ids`` (B, 1) and the output of the
      encoder, ``encoder_states``; the cache has room for `cache_room` tokens, and the step's token
      takes the last place;
    - for ``prefill``: the model's usual inputs, with one token for the decoder of an
      encoder-decoder model; the cache is empty, and a prompt without a stated length fills it.

    The step returns the logits of the last token.

    Raises:
        SpecError: if the model has no cache, or too few positions for these tokens.
        CaptureError: if transformers has no static version of its cache.

    """
    with suppress(AttributeError):
        del model.forward  # set by an earlier call of this function
    name = _cache_parameter(model)
    room = cache_room(model, spec)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    seq_len = spec.seq_len
    if spec.step == "prefill" and not model.config.is_encoder_decoder and seq_len is None:
        seq_len = room
    usual = example_inputs(model, spec.batch_size, seq_len, dtype)
    if model.config.is_encoder_decoder:
        # A copy: a view would keep, and count, its whole base.
        usual["decoder_input_ids"] = usual["decoder_input_ids"].new_empty(spec.batch_size, 1)
    cache = _shown_cache(model, name, usual, room)
    tensors = {slot.name: slot.tensor() for slot in cache.slots}
    if not any(name.startswith(CACHE) for name in tensors):
        raise SpecError(_no_cache(model, "keeps nothing in its cache"))
    step = _Step(model, name, cache, spec.step == "decode", room)
    inputs = {**(usual if spec.step == "prefill" else _decoded(spec, cache)), **tensors}
    model.forward = _named_forward(step, inputs)
    return inputs


def _decoded(spec: ModelSpec, cache: "_Cache") -> dict[str, Tensor]:
    """Return the inputs of a decode besides its cache."""
    tokens = torch.empty((spec.batch_size, 1), dtype=torch.int64, device="meta")
    if cache.encoder_states is None:
        return {"input_ids": tokens}
    return {"decoder_input_ids": tokens, ENCODER_STATES: cache.encoder_states}


def _named_forward(step: "_Step", names: Iterable[str]) -> Callable[..., Tensor]:
    """Return the step as a function with parameters of these names, as `torch.export` requires."""

    def forward(**inputs: Any) -> Tensor:  # noqa: ANN401 - as a model of transformers is called
        return step.run(inputs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in names]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward


def cache_room(model: Any, spec: ModelSpec) -> int:  # noqa: ANN401
    """Return the tokens that fit in the cache: `ModelSpec.cache_len`, or else the prompt's length.

    Raises:
        SpecError: if the model has too few positions, or a decode has no context.

    """
    limit = _positions(model)
    prompt_len = None if model.config.is_encoder_decoder else spec.seq_len
    room = spec.cache_len or prompt_len or min(_DEFAULT_ROOM, limit or _DEFAULT_ROOM)
    if limit is not None and room > limit:
        raise SpecError(
            f"a cache of {room} tokens is more than the {limit} positions of"
            f" {type(model).__name__}; set context_len, or prompt_len + output_len of a generation,"
            f" to {limit} or less"
        )
    if spec.step == "decode" and room < _PROMPT:
        raise SpecError(
            f"context_len={room} leaves no token before the one that is decoded; set context_len to"
            f" {_PROMPT} or more"
        )
    prompt = spec.seq_len or 0
    if spec.step == "prefill" and not model.config.is_encoder_decoder and prompt > room:
        raise SpecError(
            f"a prompt of {prompt} tokens is longer than the cache, context_len={room}; set"
            f" context_len to {prompt} or more"
        )
    return room


def context_range(model: Any, context_len: int) -> tuple[int, int | None]:  # noqa: ANN401
    """Return the range of contexts in which the same cache tensors grow as at `context_len`.

    Caches of a window stop growing at its length; within the range sizes are one formula in the
    context.
    """
    upper, windows = _positions(model), _windows(model)
    least = max((n for n in windows if n <= context_len), default=0)
    ends = [n - 1 for n in windows if n > context_len]
    return max(_PROMPT, least), min([*ends, *([upper] if upper else [])], default=None)


def prompt_range(model: Any, prompt_len: int) -> tuple[int, int | None]:  # noqa: ANN401
    """Return the range of prompt lengths at which the layers that cache only the end are the same.

    It contains `prompt_len`. A prompt as long as a window still fits into it.
    """
    upper, windows = _positions(model), _windows(model)
    below = max((n for n in windows if n < prompt_len), default=0)
    ends = [n for n in windows if n >= prompt_len]
    return below + 1, min([*ends, *([upper] if upper else [])], default=None)


def _windows(model: Any) -> set[int]:  # noqa: ANN401
    config = text_config(model.config)
    return {n for name in _WINDOWS if isinstance(n := getattr(config, name, None), int) and n > 0}


def fill_counters(inputs: dict[str, Tensor], step: str, room: int) -> None:
    """Set the token counters of a cache, among `inputs` with values, to the start of `step`."""
    for name, tensor in inputs.items():
        if name.startswith(_COUNT):
            tensor.fill_(room - 1 if step == "decode" else 0)


def _positions(model: Any) -> int | None:  # noqa: ANN401
    """Return the maximum sequence length of the model, or None if it states none."""
    stated = getattr(text_config(model.config), "max_position_embeddings", None)
    within = "decoder" if model.config.is_encoder_decoder else ""
    known = [n for n in (positions(model, within), stated) if isinstance(n, int) and n > 0]
    return min(known, default=None)


def _no_cache(model: Any, why: str) -> str:  # noqa: ANN401
    return (
        f"{type(model).__name__} {why}, so there is nothing to decode against; use"
        " phase=inference, or a model that generates text"
    )


def _cache_parameter(model: Any) -> str:  # noqa: ANN401
    parameters = inspect.signature(type(model).forward).parameters
    name = next((name for name in _PARAMETERS if name in parameters), None)
    # A model of images and text passes what it does not know on to its language model.
    passes_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if name is None or not ("use_cache" in parameters or passes_on):
        raise SpecError(_no_cache(model, "has no cache"))
    return name


# The cache in transformers: objects of layers whose attributes are tensors.


@dataclass(frozen=True, eq=False, slots=True)
class _Slot:
    """One tensor of a cache."""

    name: str
    owner: Any
    """Container of the tensor: an object of transformers, a dict or a list."""
    key: str | int

    def tensor(self) -> Tensor:
        value = getattr(self.owner, self.key) if isinstance(self.key, str) else self.owner[self.key]
        assert isinstance(value, Tensor)
        return value

    def bind(self, tensor: Tensor) -> None:
        if isinstance(self.key, str):
            setattr(self.owner, self.key, tensor)
        else:
            self.owner[self.key] = tensor


@dataclass(frozen=True, eq=False, slots=True)
class _Cache:
    """A model's cache after a first pass."""

    argument: Any
    """The cache argument of the model's ``forward``."""
    layers: list[Any]
    """Layers of self-attention, then of cross-attention; empty for a plain list of states."""
    slots: list[_Slot]
    encoder_states: Tensor | None
    """Output of the encoder."""
    unfilled: frozenset[int]
    """Numbers of the layers whose window is not full yet."""

    def begin(self, device: torch.device, *, is_full: bool, room: int) -> None:
        """Set the layers' Python counters: all places but the last are taken, or none is."""
        for index, layer in enumerate(self.layers):
            layer.device = device
            if hasattr(layer, "cumulative_length_int"):
                taken = room - 1
                if index in self.unfilled:  # a size of its tensors may be a symbol
                    layer.max_cache_len = layer.keys.shape[-2]
                    taken = layer.max_cache_len - 1
                layer.cumulative_length_int = taken if is_full else 0
            elif hasattr(layer, _COUNTER):
                # With numbers, not tensors, attention to an empty cache is causal without a mask.
                if not is_full:
                    layer.get_seq_length = _zero
                if isinstance(layer.keys, Tensor):
                    layer.max_cache_len = layer.keys.shape[-2]
            if hasattr(layer, "has_previous_state"):
                layer.has_previous_state = dict.fromkeys(layer.has_previous_state, is_full)
        updated = getattr(self.argument, "is_updated", None)
        if updated is not None:
            updated.update(dict.fromkeys(updated, is_full))


def _zero() -> int:
    return 0


def _shown_cache(model: Any, name: str, usual: dict[str, Tensor], room: int) -> _Cache:  # noqa: ANN401
    """Run a short prompt through `model` on meta, and return its cache."""
    from transformers import EncoderDecoderCache, StaticCache

    short = usual if model.config.is_encoder_decoder else _short_prompt(model, usual, room)
    cache_argument: dict[str, Any] = {}
    cache: Any
    try:
        if name != "state":
            cache = StaticCache(config=model.config, max_cache_len=room)
            if model.config.is_encoder_decoder:
                length = _encoder_length(model, short)
                cross = StaticCache(config=model.config, max_cache_len=length)
                cache = EncoderDecoderCache(cache, cross)
            cache_argument[name] = cache
        result = _run_on_meta(model, {**short, **cache_argument, "use_cache": True})
    except FxpartError:
        raise
    except Exception as error:
        raise _failed_pass(model, short, error) from error
    cache = cache_argument.get(name, getattr(result, name, None))
    layers = _layers(cache)
    slots = list(_slots(cache, layers))
    unfilled = frozenset(
        index
        for index, layer in enumerate(layers)
        if hasattr(layer, "cumulative_length_int")
        and isinstance(layer.keys, Tensor)
        and layer.keys.shape[-2] >= room
    )
    states = getattr(result, "encoder_last_hidden_state", None)
    return _Cache(cache, layers, slots, states, unfilled)


def _short_prompt(model: Any, usual: dict[str, Tensor], room: int) -> dict[str, Tensor]:  # noqa: ANN401
    """Return the inputs of a short prompt, without the images that it would have places for."""
    short = {
        name: tensor[:, : min(_PROMPT, room)] if name == "input_ids" else tensor
        for name, tensor in usual.items()
    }
    takes_images = any(hasattr(model.config, name) for name in PLACEHOLDERS)
    return {"input_ids": short["input_ids"]} if takes_images and "input_ids" in short else short


def _failed_pass(model: Any, inputs: dict[str, Any], error: Exception) -> CaptureError:  # noqa: ANN401
    """Return the error for a failed pass with a cache; the model may also fail without one."""
    name = type(model).__name__
    if change := change_for(model, error):
        return CaptureError(f"the forward of {name} fails: {one_line(error)}; {change}")
    try:
        _run_without_cache(model, inputs)
    except _LIMITS_OF_FAKES:
        pass
    except Exception as alone:
        return CaptureError(
            f"the forward of {name} fails, without a cache too: {one_line(alone)}; its"
            " configuration, model.config, may be the cause"
        )
    return CaptureError(
        f"{name} cannot be captured with a static cache: {one_line(error)}; use phase=inference"
    )


def _run_without_cache(model: Any, inputs: dict[str, Any]) -> None:  # noqa: ANN401
    """Call `model` with fake tensors: on meta, masks would read values."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), experts_for_shapes(model):
        weights, fakes = (
            {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors}
            for tensors in ([*model.named_parameters(), *model.named_buffers()], inputs.items())
        )
        torch.func.functional_call(model, weights, (), {**fakes, "use_cache": False})


def _run_on_meta(model: Any, inputs: dict[str, Any]) -> Any:  # noqa: ANN401
    """Call `model` on meta, since shapes do not depend on weights."""
    meta = torch.device("meta")
    weights = {
        name: torch.empty_like(tensor, device=meta)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    with torch.no_grad(), meta, experts_for_shapes(model):
        return torch.func.functional_call(model, weights, (), inputs)


@contextmanager
def experts_for_shapes(model: Any) -> Iterator[None]:  # noqa: ANN401
    """Let a mixture of experts run on meta in any dtype; its grouped product requires bfloat16."""
    configs = {
        id(config): config for m in model.modules() if (config := getattr(m, "config", None))
    }
    chosen = {key: getattr(config, _EXPERTS, None) for key, config in configs.items()}
    for key, config in configs.items():
        if chosen[key] is not None:
            setattr(config, _EXPERTS, "batched_mm")
    try:
        yield
    finally:
        for key, config in configs.items():
            if chosen[key] is not None:
                setattr(config, _EXPERTS, chosen[key])


def _encoder_length(model: Any, inputs: dict[str, Tensor]) -> int:  # noqa: ANN401
    encoder = {name: tensor for name, tensor in inputs.items() if not name.startswith("decoder_")}
    return int(_run_on_meta(model.get_encoder(), encoder)[0].shape[1])


def _layers(cache: Any) -> list[Any]:  # noqa: ANN401
    if cache is None or isinstance(cache, list | tuple):
        return []
    if hasattr(cache, "self_attention_cache"):
        return [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return list(cache.layers)


def _slots(cache: Any, layers: list[Any]) -> Iterator[_Slot]:  # noqa: ANN401
    """Yield the tensors of a cache; names of cross-attention's contain ``cross``."""
    if isinstance(cache, list):
        yield from (_Slot(f"{CACHE}state_{i}", cache, i) for i in range(len(cache)))
    n_self_attention = (
        len(cache.self_attention_cache.layers) if hasattr(cache, "is_updated") else len(layers)
    )
    for index, layer in enumerate(layers):
        where = f"{index}" if index < n_self_attention else f"cross_{index - n_self_attention}"
        for name, value in vars(layer).items():
            if name == _COUNTER and layer.is_initialized:
                yield _Slot(f"{_COUNT}{where}", layer, name)
            elif isinstance(value, Tensor) and value.dim():
                yield _Slot(f"{CACHE}{where}_{name}", layer, name)
            elif isinstance(value, dict):
                for key, item in value.items():
                    if isinstance(item, Tensor):
                        yield _Slot(f"{CACHE}{where}_{name}_{key}", value, key)


@dataclass(frozen=True, eq=False, slots=True)
class _Step:
    """Replacement for a model's ``forward`` that takes the cache as tensors by name."""

    model: Any
    parameter: str
    cache: _Cache
    is_decode: bool
    room: int

    def run(self, inputs: dict[str, Any]) -> Tensor:
        """Return the logits of the last token."""
        tensors = {slot: inputs.pop(slot.name) for slot in self.cache.slots}
        for slot, tensor in tensors.items():
            slot.bind(tensor)
        device = next(iter(tensors.values())).device
        self.cache.begin(device, is_full=self.is_decode, room=self.room)
        if ENCODER_STATES in inputs:
            inputs["encoder_outputs"] = (inputs.pop(ENCODER_STATES),)
        forward: Callable[..., Any] = type(self.model).forward
        if "logits_to_keep" in inspect.signature(forward).parameters:
            inputs["logits_to_keep"] = 1
        cache_arguments = {
            self.parameter: self.cache.argument,
            "use_cache": True,
            "return_dict": True,
        }
        result = forward(self.model, **inputs, **cache_arguments)
        scores: Tensor = result.logits if hasattr(result, "logits") else result[0]
        return scores

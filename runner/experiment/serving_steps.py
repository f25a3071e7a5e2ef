"""The serving steps at any batch and context, each captured once with symbolic sizes."""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar

import numpy as np

from fxpart.capture.captured import captured_symbolic
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.few_bits import with_chosen_experts
from fxpart.core.graph import CACHE, OpGraph
from fxpart.core.symbolic_graph import SymbolicGraph
from fxpart.errors import CaptureError, SpecError
from fxpart.support.digest import stable_digest
from runner.config.schema import Config
from runner.experiment.runtime import held_as_run
from runner.experiment.serving import as_served, served_at_any_size, with_served_cache

__all__ = ["ServingSteps", "Sizes", "keep", "serving_steps"]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_MOST_KEPT = 4
"""Number of models whose captures stay in memory."""
_DECODE, _PREFILL = ("batch", "context_len"), ("batch", "seq_len")
_GRAPHS_KEPT = 8
"""Number of graphs kept: a search for the largest size asks several times for the same ones."""


def keep(known: dict[_Key, _Value], key: _Key, value: _Value, capacity: int) -> None:
    """Add `value` to `known`, which loses its oldest entry if it has more than `capacity`."""
    known[key] = value
    if len(known) > capacity:
        known.pop(next(iter(known)), None)


class Sizes(NamedTuple):
    """The sizes of a generation: the texts of a replica, and each one's tokens in the decoder."""

    texts: int
    prompt_len: int
    context_len: int
    """Tokens of prompt and continuation: the context of the last decode."""


@dataclass(eq=False, slots=True)
class ServingSteps:
    """Decode and prefill of one model, with its weight format.

    If a capture does not hold for a size, such as beyond an attention window, another is added.
    """

    config: Config
    spec: ModelSpec
    """The spec of the decode."""
    has_encoder: bool = False
    """Whether an encoder reads prompts of one fixed length; the decoder starts from a token."""
    seconds: float = 0.0
    """Time spent so far on captures and on reading them from the cache."""
    from_cache: bool = True
    """Whether all captures so far came from the cache."""
    _single_lengths: set[int] = field(default_factory=set)
    """Lengths of prompts that have a capture of their own, for any batch."""
    _known: dict[str, list[SymbolicGraph]] = field(default_factory=dict)
    _graphs: dict[tuple[str, int, int], OpGraph] = field(default_factory=dict)
    """The latest graphs in the formats of `config`, by step and sizes."""
    _served: dict[SymbolicGraph, SymbolicGraph | None] = field(default_factory=dict)
    """The results of `served_at_any_size`."""

    def decode(self, batch: int, context_len: int) -> OpGraph:
        """Return the decode of a token for each of `batch` texts at `context_len` tokens.

        Raises:
            FxpartError: if the model has fewer positions than tokens, or cannot be captured.

        """
        return self._laid_out("decode", _DECODE, batch, context_len)

    def unconverted(self, batch: int, context_len: int) -> OpGraph:
        """Return `decode` with weights and cache of the model's own dtype."""
        return self._at(self._piece("decode", _DECODE, batch, context_len), batch, context_len)

    def prefill(self, batch: int, prompt_len: int, decode: OpGraph) -> OpGraph:
        """Return the prefill of `batch` prompts with the cache of `decode`, perhaps of more texts.

        It attends to the prompt only, however large the cache is.
        """
        # A loop over tokens is unrolled by the capture.
        of_one_length = self.has_encoder or any(map(_is_state, decode.value_names))
        if not of_one_length and prompt_len not in self._single_lengths:
            try:
                graph = self._laid_out("prefill", _PREFILL, batch, prompt_len)
            except CaptureError:  # such as where a prompt is as long as a window
                self._single_lengths.add(prompt_len)
            else:
                return _with_cache_of(graph, decode)
        return _with_cache_of(self._laid_out("prefill", _PREFILL[:1], batch, prompt_len), decode)

    @property
    def sizes(self) -> Sizes:
        """The sizes in `config`."""
        prompt_len = 1 if self.has_encoder else self.config.prompt_len or 0
        return Sizes(self.spec.batch_size, prompt_len, prompt_len + (self.config.output_len or 0))

    @property
    def reads_text(self) -> bool:
        """Whether prompts are tokens, not sound or images: an encoder's prefill is captured."""
        if not self.has_encoder:
            return True
        texts, prompt_len, _ = self.sizes
        piece = self._piece("prefill", _PREFILL[:1], texts, prompt_len)
        return "input_ids" in piece.graph.value_names

    def end_of_range(self, batch: int, context_len: int) -> int | None:
        """Return the longest context covered by the capture for these sizes; None if unlimited."""
        *_, (_, high) = self._piece("decode", _DECODE, batch, context_len).ranges
        return high

    def _laid_out(self, step: str, symbols: tuple[str, ...], batch: int, length: int) -> OpGraph:
        key = (step, batch, length)
        graph = self._graphs.get(key)
        if graph is None:
            piece = self._piece(step, symbols, batch, length)
            if piece not in self._served:
                self._served[piece] = served_at_any_size(self.config, piece)
            served = self._served[piece]
            if served is None:
                graph = as_served(self.config, self._at(piece, batch, length))
            else:
                graph = with_served_cache(self.config, self._at(served, batch, length))
            keep(self._graphs, key, graph, _GRAPHS_KEPT)
        return graph

    def _at(self, symbolic: SymbolicGraph, batch: int, length: int) -> OpGraph:
        graph = symbolic.at(**dict(zip(symbolic.symbols, (batch, length), strict=False)))
        return with_chosen_experts(held_as_run(self.config, graph))

    def _piece(self, step: str, symbols: tuple[str, ...], batch: int, length: int) -> SymbolicGraph:
        """Return a capture that holds for these sizes, making one if necessary."""
        sizes = dict(zip(symbols, (batch, length), strict=False))
        spec = self._spec(step, batch, length)
        of_one_length = len(symbols) == 1 or self.has_encoder
        sizes_of_capture = [spec.seq_len] if of_one_length else []
        if (
            self.has_encoder and step == "prefill"
        ):  # the size of its cache is captured as a constant
            sizes_of_capture.append(spec.cache_len)
        pieces = self._known.setdefault(f"{step} {sizes_of_capture}", [])
        for piece in pieces:
            if _holds(piece, sizes):
                return piece
        cache = self.config.capture
        folder = Path(cache.cache_dir) if cache.use_cache else None
        try:
            captured = captured_symbolic(spec, symbols, folder, step)
        except CaptureError as error:
            if "cannot be symbolic" not in str(error):
                raise
            raise CaptureError(
                f"phase=generate captures a {step} once for all sizes, which"
                f" {spec.architecture or spec.name} does not allow; use phase=prefill and"
                " phase=decode"
            ) from error
        captured.symbolic.check_sizes(sizes)
        self.seconds += captured.seconds
        self.from_cache &= captured.from_cache
        pieces.append(captured.symbolic)
        return captured.symbolic

    def _spec(self, step: str, batch: int, length: int) -> ModelSpec:
        if self.has_encoder:
            context = self.sizes.context_len if step == "prefill" else length
            prompt = self.config.prompt_len
            return replace(
                self.spec, step=step, batch_size=batch, seq_len=prompt, cache_len=context
            )
        prompt, room = (length, None) if step == "prefill" else (self.spec.seq_len, length)
        return replace(self.spec, step=step, batch_size=batch, seq_len=prompt, cache_len=room)


def _is_state(name: str) -> bool:
    """Return whether a value is a cached recurrent state."""
    return name.startswith(CACHE) and "state" in name


def _holds(piece: SymbolicGraph, sizes: dict[str, int]) -> bool:
    try:
        piece.check_sizes(sizes)
    except SpecError:
        return False
    return True


def _with_cache_of(graph: OpGraph, decode: OpGraph) -> OpGraph:
    """Return `graph` with its cache inputs as large as those of `decode`."""
    room = {
        decode.value_names[value]: (
            int(decode.value_bytes[value]),
            int(decode.value_alloc_bytes[value]),
        )
        for value in np.flatnonzero(decode.value_is_cache).tolist()
    }
    value_bytes, alloc_bytes = graph.value_bytes.copy(), graph.value_alloc_bytes.copy()
    for value in np.flatnonzero(graph.value_is_cache).tolist():
        if graph.value_names[value] in room:
            value_bytes[value], alloc_bytes[value] = room[graph.value_names[value]]
    return replace(graph, value_bytes=value_bytes, value_alloc_bytes=alloc_bytes)


_pieces: OrderedDict[str, dict[str, list[SymbolicGraph]]] = OrderedDict()
"""Captures of the most recent models, by a digest of everything that decides them except sizes."""
_lock = Lock()
_SIZES = ("batch_size", "seq_len", "cache_len", "step")


_DECODERS = ("ForCausalLM", "LMHeadModel")
"""How transformers names models of a decoder alone."""


def _has_encoder(spec: ModelSpec) -> bool:
    if spec.architecture is None or spec.architecture.endswith(_DECODERS):
        return False  # without importing the model, which takes seconds where its graph is cached
    from fxpart.capture.models.architecture import has_encoder_and_decoder  # imports torch

    return has_encoder_and_decoder(spec.architecture)


def serving_steps(config: Config, spec: ModelSpec) -> ServingSteps:
    """Return the serving steps of the model of `spec`, with earlier captures of this process."""
    has_encoder = _has_encoder(spec)
    if not config.capture.use_cache:
        return ServingSteps(config, spec, has_encoder)
    model = {name: value for name, value in spec.key().items() if name not in _SIZES}
    key = stable_digest({"model": model, "cache_dir": config.capture.cache_dir})
    with _lock:
        captures = _pieces.setdefault(key, {})
        _pieces.move_to_end(key)
        while len(_pieces) > _MOST_KEPT:
            _pieces.popitem(last=False)
    return ServingSteps(config, spec, has_encoder, _known=captures)

"""A model captured once for all sizes of its batch: from the cache when it is there.

As `fxpart.captured`, with sizes that are symbols. Torch is imported only when a capture is needed.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from fxpart.captured import step_key
from fxpart.errors import SpecError, nearest_names
from fxpart.graph_cache import cache_key, cached_path
from fxpart.models.factory_source import loaded_sources
from fxpart.models.spec import ModelSpec
from fxpart.phases import StepOptions, check_phase
from fxpart.symbolic.graph import SymbolicGraph
from fxpart.symbolic.store import read_symbolic, write_symbolic

__all__ = ["SYMBOLIC", "CapturedSymbolic", "captured_symbolic", "symbols_named"]

_USUAL = StepOptions()
SYMBOLIC = {"none": (), "batch": ("batch",), "batch_and_seq_len": ("batch", "seq_len")}
"""What ``capture.symbolic`` may be, and the symbols that it names."""
_FIELDS = {"batch": "batch_size", "seq_len": "seq_len"}
"""The field of `ModelSpec` that each symbol takes the place of."""


@dataclass(frozen=True, eq=False, slots=True)
class CapturedSymbolic:
    """A graph in symbols and how it was come by."""

    symbolic: SymbolicGraph
    """Its `SymbolicGraph.value_batch_dim` is that of `fxpart.batch_dim.analyze_batch_dims`."""
    seconds: float
    """Time to read it, or to build and capture it."""
    from_cache: bool


def symbols_named(name: str) -> tuple[str, ...]:
    """Return the symbols that a choice of `SYMBOLIC` names.

    Raises:
        SpecError: for another choice.

    """
    if name not in SYMBOLIC:
        raise SpecError(f"capture.symbolic={name} does not exist; {nearest_names(name, SYMBOLIC)}")
    return SYMBOLIC[name]


def captured_symbolic(
    spec: ModelSpec,
    symbols: tuple[str, ...],
    cache_dir: Path | None,
    phase: str = "inference",
    *,
    train_mode: bool = False,
    options: StepOptions = _USUAL,
) -> CapturedSymbolic:
    """Return the graph of the model that `spec` names, for any value of `symbols`.

    The sizes of `spec` that are symbols do not matter: all of them share an entry of the cache.

    Raises:
        SpecError: for a model, a symbol or a phase that does not exist.
        CaptureError: for a model that cannot be captured with these sizes symbolic.
        CacheError: when the cache cannot be written.

    """
    check_phase(phase)
    begin = time.perf_counter()
    step = step_key(phase, train_mode=train_mode, options=options)
    path = _path(spec, symbols, cache_dir, phase, step) if cache_dir else None
    symbolic = read_symbolic(path) if path else None
    if symbolic is not None:
        return CapturedSymbolic(symbolic, time.perf_counter() - begin, from_cache=True)
    symbolic = _capture(spec, symbols, phase, train_mode=train_mode, options=options)
    if path:
        write_symbolic(path, symbolic, loaded_sources() if spec.factory else ())
    return CapturedSymbolic(symbolic, time.perf_counter() - begin, from_cache=False)


def _path(
    spec: ModelSpec,
    symbols: tuple[str, ...],
    cache_dir: Path,
    phase: str,
    step: dict[str, object],
) -> Path:
    model = {**spec.key(), **{_FIELDS[symbol]: symbol for symbol in symbols}}
    return cached_path(cache_dir, cache_key(model, "operator", phase, step))


def _capture(
    spec: ModelSpec,
    symbols: tuple[str, ...],
    phase: str,
    *,
    train_mode: bool,
    options: StepOptions,
) -> SymbolicGraph:
    # These import torch and transformers: seconds that a warm start does not pay.
    from fxpart.batch_dim import analyze_batch_dims, value_batch_dims
    from fxpart.capture.symbolic import fitted_graph, symbolic_program
    from fxpart.models.symbolic_inputs import symbolic_inputs

    found = symbolic_inputs(spec, symbols)
    built = found.built
    if phase == "training":
        built.module.train(train_mode)
    program = symbolic_program(
        built.module,
        built.args,
        built.kwargs,
        dims=found.dims,
        phase=phase,
        options=options,
        ranges=found.ranges,
    )
    symbolic = fitted_graph(program)
    report = analyze_batch_dims(program.program)
    dims = value_batch_dims(report, symbolic.graph.value_names)
    return replace(symbolic, value_batch_dim=dims)

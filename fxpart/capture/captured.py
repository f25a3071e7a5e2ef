"""Get a model's graph, concrete or symbolic: from the cache, or captured and cached.

Torch is imported only if a capture is needed; a warm start reads one file.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fxpart.capture.cache import (
    cache_key,
    cached_path,
    read_graph,
    read_symbolic,
    refuse_unwritable,
    write_graph,
    write_symbolic,
)
from fxpart.capture.models.factory_source import factory_as_imported
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.symbolic.dims import SymbolicDim
from fxpart.core.granularity import check_level
from fxpart.core.graph import OpGraph
from fxpart.core.phases import StepOptions, check_phase
from fxpart.core.symbolic_graph import SymbolicGraph, with_constant_symbol
from fxpart.errors import CaptureError, SpecError, nearest_names
from fxpart.support.call_stack import in_one_piece

if TYPE_CHECKING:
    from fxpart.capture.repeated import Repetition
    from fxpart.capture.symbolic.api import SymbolicProgram

__all__ = [
    "SYMBOLIC",
    "CapturedGraph",
    "CapturedSymbolic",
    "captured_graph",
    "captured_symbolic",
    "graph_path",
    "step_key",
    "symbols_named",
]


SYMBOLIC = {"none": (), "batch": ("batch",), "batch_and_seq_len": ("batch", "seq_len")}
"""Values of ``capture.symbolic``, and the symbols they name."""
_FIELDS = {"batch": "batch_size", "seq_len": "seq_len", "context_len": "cache_len"}
"""The field of `ModelSpec` replaced by each symbol."""
_EXAMPLE = 4
"""Value of each symbol, or near it, in the example inputs of the capture shared by all sizes."""
_EXAMPLE_CONTEXTS = (2**14, _EXAMPLE)
"""Example contexts: beyond the attention windows of most models, and below them."""
_USUAL = StepOptions()
_Graph = TypeVar("_Graph", OpGraph, SymbolicGraph)


@dataclass(frozen=True, eq=False, slots=True)
class CapturedGraph:
    """A graph, and whether it came from the cache."""

    graph: OpGraph
    seconds: float
    """Time to read it, or to build and capture it."""
    from_cache: bool


@dataclass(frozen=True, eq=False, slots=True)
class CapturedSymbolic:
    """A symbolic graph, and whether it came from the cache."""

    symbolic: SymbolicGraph
    """Its `SymbolicGraph.value_batch_dim` is that of `fxpart.analyze_batch_dims`."""
    seconds: float
    """Time to read it, or to build and capture it."""
    from_cache: bool


def step_key(phase: str, *, train_mode: bool, options: StepOptions) -> dict[str, object]:
    """Return the settings of a training step that determine its graph; empty in inference."""
    return {"train_mode": train_mode, **asdict(options)} if phase == "training" else {}


def symbols_named(name: str) -> tuple[str, ...]:
    """Return the symbols named by a choice of `SYMBOLIC`.

    Raises:
        SpecError: if there is no such choice.

    """
    if name not in SYMBOLIC:
        near = nearest_names(name, SYMBOLIC)
        raise SpecError(f"capture.symbolic={' '.join(name.split())} does not exist; {near}")
    return SYMBOLIC[name]


@in_one_piece
def captured_graph(
    spec: ModelSpec,
    level: str,
    cache_dir: Path | None,
    phase: str = "inference",
    *,
    train_mode: bool = False,
    options: StepOptions = _USUAL,
) -> CapturedGraph:
    """Return the graph of the model named by `spec`; without `cache_dir`, always captured.

    In the phase ``training`` it is the graph of `fxpart.capture.joint_capture` with `options`, for
    the model in ``train()`` or, without `train_mode`, in ``eval()`` mode.

    Raises:
        SpecError: if the model, input shape, level or phase does not exist.
        CaptureError: if the model cannot be built or captured, or its files change meanwhile.
        CacheError: if the cache cannot be written.

    """
    check_level(level)
    check_phase(phase, level)
    if spec.autocast is not None and level != "operator":
        raise SpecError(
            f"model.autocast={spec.autocast} casts the inputs of operators, got "
            f"capture.level={level}; use capture.level=operator"
        )
    begin = time.perf_counter()
    path = None
    if cache_dir:
        path = graph_path(spec, level, cache_dir, phase, train_mode=train_mode, options=options)
    graph = read_graph(path) if path else None
    if graph is not None:
        return CapturedGraph(graph, time.perf_counter() - begin, from_cache=True)
    if path:
        refuse_unwritable(path)
    with _unchanged(spec):
        graph = _capture(spec, level, phase, train_mode=train_mode, options=options)
    if path:
        write_graph(path, graph)
    return CapturedGraph(graph, time.perf_counter() - begin, from_cache=False)


def graph_path(
    spec: ModelSpec,
    level: str,
    cache_dir: Path,
    phase: str = "inference",
    *,
    train_mode: bool = False,
    options: StepOptions = _USUAL,
) -> Path:
    """Return the cache path of `captured_graph` for the same arguments."""
    step = step_key(phase, train_mode=train_mode, options=options)
    return cached_path(cache_dir, cache_key(spec.key(), level, phase, step))


@contextmanager
def _unchanged(spec: ModelSpec) -> Iterator[None]:
    """Raise `CaptureError` if a source file of the model changes inside the block."""
    original_key = spec.key() if spec.factory else None
    # Imports inside a forward happen while it is captured.
    with factory_as_imported(spec.factory, spec.depends_on):
        yield
    if original_key is not None and spec.key() != original_key:
        raise CaptureError(
            f"a source file of factory={spec.factory} changed during the capture; start again "
            "without editing it"
        )


def _capture(
    spec: ModelSpec, level: str, phase: str, *, train_mode: bool, options: StepOptions
) -> OpGraph:
    # These import torch and transformers: seconds that a warm start does not pay.
    from fxpart.capture.api import capture_graph
    from fxpart.capture.models.build import build_model
    from fxpart.capture.repeated import graph_with_more_blocks
    from fxpart.capture.training.joint import joint_graph

    def captured(spec: ModelSpec) -> OpGraph:
        built = build_model(spec)
        if phase == "training":
            built.module.train(train_mode)
            return joint_graph(built.module, built.args, built.kwargs, options)
        return capture_graph(built.module, built.args, built.kwargs, level)

    if level != "operator":
        return captured(spec)
    mode = train_mode if phase == "training" else None
    return _from_few_blocks(spec, captured, graph_with_more_blocks, mode, options)


def _from_few_blocks(
    spec: ModelSpec,
    capture: Callable[[ModelSpec], _Graph],
    repeat: "Callable[[_Graph, Repetition], _Graph]",
    train_mode: bool | None,
    options: StepOptions,
) -> _Graph:
    """Return the capture of a model, made from that of a few blocks if all of them are alike.

    `train_mode` is that of a training step, None for inference.
    """
    from fxpart.capture.models.short_model import shortened
    from fxpart.capture.repeated import NotRepeatedError

    is_same_in_all = not options.recomputed and options.backward_order == "autograd"
    short = shortened(spec, train_mode) if is_same_in_all else None
    if short is not None:
        with suppress(NotRepeatedError, CaptureError, SpecError):
            return repeat(capture(short.spec), short.repetition)
    return capture(spec)


@in_one_piece
def captured_symbolic(
    spec: ModelSpec,
    symbols: tuple[str, ...],
    cache_dir: Path | None,
    phase: str = "inference",
    *,
    train_mode: bool = False,
    options: StepOptions = _USUAL,
) -> CapturedSymbolic:
    """Return the graph of the model named by `spec`, for any value of `symbols`.

    All sizes share one capture and its cache entry. If there is none, or it is not valid for the
    sizes of `spec`, the model is captured near those, with its own entry. So the result does not
    depend on earlier captures; it may still be invalid for the sizes of `spec`, see
    `SymbolicGraph.ranges`.

    Raises:
        SpecError: if the model, a symbol or the phase does not exist.
        CaptureError: if the model cannot be captured with these sizes symbolic, or its files change
            meanwhile.
        CacheError: if the cache cannot be written.

    """
    check_phase(phase)
    begin = time.perf_counter()
    own_capture = _SymbolicCapture(spec, symbols, cache_dir, phase, train_mode, options)
    examples = _EXAMPLE_CONTEXTS if "context_len" in symbols else (_EXAMPLE,)
    missing = []
    for capture in (own_capture, *(own_capture.for_every_size(example) for example in examples)):
        cached = capture.read()
        if cached is not None and _holds(cached, spec):
            return CapturedSymbolic(cached, time.perf_counter() - begin, from_cache=True)
        if cached is None and capture is not own_capture:
            missing.append(capture)
    # No cached capture shared by all sizes is valid for `spec`.
    shared_graphs = (_shared_capture(shared, spec) for shared in missing)
    symbolic = next((graph for graph in shared_graphs if graph is not None), None)
    if symbolic is None:
        symbolic = own_capture.capture()
    return CapturedSymbolic(symbolic, time.perf_counter() - begin, from_cache=False)


@dataclass(frozen=True, slots=True)
class _SymbolicCapture:
    """A symbolic capture and its place in the cache."""

    spec: ModelSpec
    """The model, with symbolic sizes near those of the example inputs."""
    symbols: tuple[str, ...]
    cache_dir: Path | None
    phase: str
    train_mode: bool
    options: StepOptions
    shared_at: int | None = None
    """For a capture shared by all sizes: the context in its example inputs, if any."""

    def for_every_size(self, context_len: int) -> "_SymbolicCapture":
        """Return the capture shared by all sizes, with an example cache of `context_len`."""
        spec = self.spec
        if "batch" in self.symbols:
            spec = replace(spec, batch_size=_EXAMPLE)
        if "seq_len" in self.symbols and spec.seq_len is not None:
            spec = replace(spec, seq_len=_EXAMPLE)
        if "context_len" in self.symbols and spec.cache_len is not None:
            spec = replace(spec, cache_len=context_len)
        return replace(self, spec=spec, shared_at=context_len)

    def path(self) -> Path | None:
        """Return its cache path, or None without a cache."""
        if self.cache_dir is None:
            return None
        model = {**self.spec.key(), "symbols": list(self.symbols)}
        if self.shared_at is not None:
            model |= {_FIELDS[symbol]: symbol for symbol in self.symbols}
        if self.shared_at is not None and "context_len" in self.symbols:
            model |= {"example_context_len": self.shared_at}
        step = step_key(self.phase, train_mode=self.train_mode, options=self.options)
        key = cache_key(model, "operator", self.phase, step, symbolic=True)
        return cached_path(self.cache_dir, key)

    def read(self) -> SymbolicGraph | None:
        """Return the cached capture, if any."""
        path = self.path()
        return read_symbolic(path) if path else None

    def capture(self) -> SymbolicGraph:
        """Capture now, and cache the result."""
        from fxpart.capture.repeated import with_more_blocks

        path = self.path()
        if path is not None:
            refuse_unwritable(path)
        mode = self.train_mode if self.phase == "training" else None
        symbolic = _from_few_blocks(self.spec, self._captured, with_more_blocks, mode, self.options)
        if path is not None:
            write_symbolic(path, symbolic)
        return symbolic

    def _captured(self, spec: ModelSpec) -> SymbolicGraph:
        # These import torch and transformers: seconds that a warm start does not pay.
        from fxpart.capture.batch_dim.analyze import analyze_batch_dims, value_batch_dims
        from fxpart.capture.models.symbolic_inputs import symbolic_inputs
        from fxpart.capture.symbolic.api import fitted_graph, symbolic_program

        with _unchanged(spec):
            inputs = symbolic_inputs(spec, self.symbols)
            built = inputs.built
            if self.phase == "training":
                built.module.train(self.train_mode)
            program = symbolic_program(
                built.module,
                built.args,
                built.kwargs,
                dims=inputs.dims,
                phase=self.phase,
                options=self.options,
                ranges={
                    name: r for name, r in inputs.ranges.items() if name not in inputs.constant
                },
            )
        symbolic = fitted_graph(program)
        report = analyze_batch_dims(program.program, _batch_dims(program, inputs.dims))
        dims = value_batch_dims(report, symbolic.graph.value_names)
        symbolic = replace(symbolic, value_batch_dim=dims)
        for name, value in inputs.constant.items():
            symbolic = with_constant_symbol(symbolic, name, value, inputs.ranges[name])
        return symbolic


def _shared_capture(shared: _SymbolicCapture, spec: ModelSpec) -> SymbolicGraph | None:
    """Return the capture shared by all sizes if it is valid for those of `spec`."""
    try:
        symbolic = shared.capture()
    except (CaptureError, SpecError):
        # The failure may concern only the example's sizes; otherwise capturing `spec` raises it
        # too.
        return None
    return symbolic if _holds(symbolic, spec) else None


def _holds(symbolic: SymbolicGraph, spec: ModelSpec) -> bool:
    """Return whether the sizes of `spec` are within the ranges of a capture."""
    try:
        symbolic.check_sizes({name: getattr(spec, _FIELDS[name]) for name in symbolic.symbols})
    except SpecError:
        return False
    return True


def _batch_dims(program: "SymbolicProgram", dims: tuple[SymbolicDim, ...]) -> dict[str, int]:
    """Return the batch dimension of each input, by its name in the program."""
    exported = program.program if program.step is None else program.step.forward
    names = exported.graph_signature.user_inputs
    return {str(names[dim.leaf]): dim.dim for dim in dims if dim.symbol == "batch"}

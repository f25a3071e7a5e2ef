"""A model's graph, of one size or in symbols: from the cache, or captured and kept.

Torch is imported only when a capture is needed: a warm start reads one file.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
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
"""What ``capture.symbolic`` may be, and the symbols that it names."""
_FIELDS = {"batch": "batch_size", "seq_len": "seq_len", "context_len": "cache_len"}
"""The field of `ModelSpec` that each symbol takes the place of."""
_EXAMPLE = 4
"""What each symbol is, or is near, in the example inputs of the capture that all sizes share."""
_EXAMPLE_CONTEXTS = (2**14, _EXAMPLE)
"""What a context is: beyond the windows of most models, and below them."""
_USUAL = StepOptions()


@dataclass(frozen=True, eq=False, slots=True)
class CapturedGraph:
    """A graph, and whether it was captured now."""

    graph: OpGraph
    seconds: float
    """Time to read it, or to build and capture it."""
    from_cache: bool


@dataclass(frozen=True, eq=False, slots=True)
class CapturedSymbolic:
    """A graph in symbols, and whether it was captured now."""

    symbolic: SymbolicGraph
    """Its `SymbolicGraph.value_batch_dim` is that of `fxpart.analyze_batch_dims`."""
    seconds: float
    """Time to read it, or to build and capture it."""
    from_cache: bool


def step_key(phase: str, *, train_mode: bool, options: StepOptions) -> dict[str, object]:
    """Return what of a training step decides its graph beside the model; empty in inference."""
    return {"train_mode": train_mode, **asdict(options)} if phase == "training" else {}


def symbols_named(name: str) -> tuple[str, ...]:
    """Return the symbols that a choice of `SYMBOLIC` names.

    Raises:
        SpecError: for another choice.

    """
    if name not in SYMBOLIC:
        near = nearest_names(name, SYMBOLIC)
        raise SpecError(f"capture.symbolic={' '.join(name.split())} does not exist; {near}")
    return SYMBOLIC[name]


def captured_graph(
    spec: ModelSpec,
    level: str,
    cache_dir: Path | None,
    phase: str = "inference",
    *,
    train_mode: bool = False,
    options: StepOptions = _USUAL,
) -> CapturedGraph:
    """Return the graph of the model that `spec` names; without `cache_dir`, always captured.

    In the phase ``training`` that is the graph of `fxpart.capture.joint_capture` with `options`,
    of the model in ``train()`` or, without `train_mode`, in ``eval()``.

    Raises:
        SpecError: for a model, an input shape, a level or a phase that does not exist.
        CaptureError: for a model that cannot be built or captured, or whose files change meanwhile.
        CacheError: when the cache cannot be written.

    """
    check_level(level)
    check_phase(phase, level)
    if spec.autocast is not None and level != "operator":
        raise SpecError(
            f"model.autocast={spec.autocast} casts what operators read, got capture.level={level};"
            " use capture.level=operator"
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
    """Return where `captured_graph` keeps the graph that it returns for the same arguments."""
    step = step_key(phase, train_mode=train_mode, options=options)
    return cached_path(cache_dir, cache_key(spec.key(), level, phase, step))


@contextmanager
def _unchanged(spec: ModelSpec) -> Iterator[None]:
    """Raise `CaptureError` if a file that the model is made of is changed in the block."""
    before = spec.key() if spec.factory else None
    # What a forward imports, it imports while it is captured.
    with factory_as_imported(spec.factory, spec.depends_on):
        yield
    if before is not None and spec.key() != before:
        raise CaptureError(
            f"a file that factory={spec.factory} is made of changed meanwhile; leave it as it is,"
            " and start again"
        )


def _capture(
    spec: ModelSpec, level: str, phase: str, *, train_mode: bool, options: StepOptions
) -> OpGraph:
    # These import torch and transformers: seconds that a warm start does not pay.
    from fxpart.capture.api import capture_graph
    from fxpart.capture.models.build import build_model
    from fxpart.capture.training.joint import joint_graph

    built = build_model(spec)
    if phase == "training":
        built.module.train(train_mode)
        return joint_graph(built.module, built.args, built.kwargs, options)
    return capture_graph(built.module, built.args, built.kwargs, level)


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

    All sizes share one capture and its entry in the cache. Where that does not hold for the sizes
    of `spec`, or there is none, the model is captured near those, for an entry of their own. So
    what comes back is the same whatever was captured before; it still may not hold for the sizes
    of `spec`, as `SymbolicGraph.ranges` says.

    Raises:
        SpecError: for a model, a symbol or a phase that does not exist.
        CaptureError: for a model that cannot be captured with these sizes symbolic, or whose files
            change meanwhile.
        CacheError: when the cache cannot be written.

    """
    check_phase(phase)
    begin = time.perf_counter()
    near = _SymbolicCapture(spec, symbols, cache_dir, phase, train_mode, options)
    examples = _EXAMPLE_CONTEXTS if "context_len" in symbols else (_EXAMPLE,)
    missing = []
    for capture in (near, *(near.for_every_size(example) for example in examples)):
        kept = capture.read()
        if kept is not None and _holds(kept, spec):
            return CapturedSymbolic(kept, time.perf_counter() - begin, from_cache=True)
        if kept is None and capture is not near:
            missing.append(capture)
    # What is kept of those that all sizes share does not hold.
    made = (_shared_capture(shared, spec) for shared in missing)
    symbolic = next((graph for graph in made if graph is not None), None)
    if symbolic is None:
        symbolic = near.capture()
    return CapturedSymbolic(symbolic, time.perf_counter() - begin, from_cache=False)


@dataclass(frozen=True, slots=True)
class _SymbolicCapture:
    """A capture in symbols, and where it is kept."""

    spec: ModelSpec
    """Its sizes that are symbols are near those of the example inputs."""
    symbols: tuple[str, ...]
    cache_dir: Path | None
    phase: str
    train_mode: bool
    options: StepOptions
    shared_at: int | None = None
    """Of a capture that all sizes share, the context in its example inputs, if it has one."""

    def for_every_size(self, context_len: int) -> "_SymbolicCapture":
        """Return the capture that all sizes share; its example has a cache of `context_len`."""
        spec = self.spec
        if "batch" in self.symbols:
            spec = replace(spec, batch_size=_EXAMPLE)
        if "seq_len" in self.symbols and spec.seq_len is not None:
            spec = replace(spec, seq_len=_EXAMPLE)
        if "context_len" in self.symbols and spec.cache_len is not None:
            spec = replace(spec, cache_len=context_len)
        return replace(self, spec=spec, shared_at=context_len)

    def path(self) -> Path | None:
        """Return where it is kept, None without a cache."""
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
        """Return what is in the cache."""
        path = self.path()
        return read_symbolic(path) if path else None

    def capture(self) -> SymbolicGraph:
        """Capture it now, and keep it."""
        # These import torch and transformers: seconds that a warm start does not pay.
        from fxpart.capture.batch_dim.analyze import analyze_batch_dims, value_batch_dims
        from fxpart.capture.models.symbolic_inputs import symbolic_inputs
        from fxpart.capture.symbolic.api import fitted_graph, symbolic_program

        path = self.path()
        if path is not None:
            refuse_unwritable(path)
        with _unchanged(self.spec):
            inputs = symbolic_inputs(self.spec, self.symbols)
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
        if path is not None:
            write_symbolic(path, symbolic)
        return symbolic


def _shared_capture(shared: _SymbolicCapture, spec: ModelSpec) -> SymbolicGraph | None:
    """Return the capture that all sizes share if it holds for those of `spec`."""
    try:
        symbolic = shared.capture()
    except (CaptureError, SpecError):
        # Perhaps of the example's sizes alone: if not, those of `spec` are refused in its words.
        return None
    return symbolic if _holds(symbolic, spec) else None


def _holds(symbolic: SymbolicGraph, spec: ModelSpec) -> bool:
    """Return whether the sizes of `spec` are in the range of a capture."""
    try:
        symbolic.check_sizes({name: getattr(spec, _FIELDS[name]) for name in symbolic.symbols})
    except SpecError:
        return False
    return True


def _batch_dims(program: "SymbolicProgram", dims: tuple[SymbolicDim, ...]) -> dict[str, int]:
    """Return which dimension of each input is the batch, by its name in the program."""
    exported = program.program if program.step is None else program.step.forward
    names = exported.graph_signature.user_inputs
    return {str(names[dim.leaf]): dim.dim for dim in dims if dim.symbol == "batch"}

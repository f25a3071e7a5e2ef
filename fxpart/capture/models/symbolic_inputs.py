"""Find the batch and sequence dimensions of a model's inputs by comparing inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fxpart.capture.models.build import BuiltModel, architecture_inputs, build_model
from fxpart.capture.models.cached_step import context_range, prompt_range
from fxpart.capture.models.image_grids import given_grids
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.symbolic.dims import Shape, SymbolicDim, affine_dims
from fxpart.errors import CaptureError, SpecError, nearest_names

__all__ = ["SYMBOLS", "SymbolicInputs", "symbolic_inputs"]

SYMBOLS = ("batch", "seq_len", "context_len")
"""Possible symbols: `ModelSpec.batch_size`, `ModelSpec.seq_len` and `ModelSpec.cache_len`."""
_FIELDS = {"batch": "batch_size", "seq_len": "seq_len", "context_len": "cache_len"}


@dataclass(frozen=True, eq=False, slots=True)
class SymbolicInputs:
    """A model, example inputs with distinct sizes, and their symbolic dimensions."""

    built: BuiltModel
    dims: tuple[SymbolicDim, ...]
    """Symbolic dimensions, in the order of the requested symbols."""
    ranges: dict[str, tuple[int, int | None]]
    """The smallest and largest value of each symbol that the model supports."""
    constant: dict[str, int]
    """The value of a context on which no input depends, as with the state of a recurrence."""


def symbolic_inputs(spec: ModelSpec, symbols: Sequence[str] = SYMBOLS[:1]) -> SymbolicInputs:
    """Return the model of `spec`, on meta, and the sizes of its inputs that grow with `symbols`.

    The inputs are created at three values of each symbol and compared. The returned ones have the
    sizes of `spec`, or the nearest sizes of 2 or more that no weight and no other input has.

    Raises:
        SpecError: if a symbol does not exist, ``seq_len`` is not set in `spec`, the model has grids
            of images bound to it, or `build_model` raises it.
        CaptureError: if an input's size is not a multiple of a symbol plus a constant, or a
            weight's size depends on a symbol.

    """
    _check(spec, symbols)
    first = build_model(spec)
    if grids := given_grids(first.module):
        raise SpecError(
            f"images of model {spec.name} are given by number ({', '.join(grids)}), so that no size"
            f" of its inputs is symbolic, got symbolic={'+'.join(symbols)}; leave out"
            " capture.symbolic and data_parallel"
        )
    ranges: dict[str, tuple[int, int | None]] = dict.fromkeys(symbols, (1, None))
    if "seq_len" in symbols:
        ranges["seq_len"] = (1, _positions(spec, first.module))
        if spec.step == "prefill":
            ranges["seq_len"] = prompt_range(first.module, spec.seq_len or 0)
    if "context_len" in symbols:
        ranges["context_len"] = context_range(first.module, spec.cache_len or 0)
    dims: list[SymbolicDim] = []
    for name in symbols:
        values = _near(_size(spec, name), *ranges[name])
        resized = {value: _resized(spec, name, value) for value in values}
        others = {
            value: first if other == spec else _inputs(other, first.module)
            for value, other in resized.items()
        }
        _check_weights(spec, name, first, others)
        dims += affine_dims(name, {value: _shapes(other) for value, other in others.items()})
    _check_dims(spec, symbols, dims)
    sample, used_sizes = spec, _sizes(first, dims)
    for name in symbols:
        sample = _resized(sample, name, _apart(_size(spec, name), ranges[name], used_sizes))
    grows = {dim.symbol for dim in dims}
    constant = {name: _size(sample, name) for name in symbols if name not in grows}
    return SymbolicInputs(_inputs(sample, first.module), tuple(dims), ranges, constant)


def _check(spec: ModelSpec, symbols: Sequence[str]) -> None:
    for name in symbols:
        if name not in SYMBOLS:
            raise SpecError(f"symbolic={name} does not exist; {nearest_names(name, SYMBOLS)}")
    if not symbols or len(set(symbols)) != len(symbols):
        raise SpecError(f"symbols={tuple(symbols)} must be one or more of {SYMBOLS}, each once")
    if "seq_len" in symbols and spec.seq_len is None:
        raise SpecError(
            f"model {spec.name} states no sequence length that could be symbolic; set"
            " model.seq_len, or make the batch alone symbolic"
        )
    if "context_len" in symbols and (spec.step != "decode" or spec.cache_len is None):
        raise SpecError(
            f"model {spec.name} is captured without a cache of a stated length that could be"
            " symbolic; set phase=decode and context_len"
        )


def _check_dims(spec: ModelSpec, symbols: Sequence[str], dims: Sequence[SymbolicDim]) -> None:
    for name in symbols:
        if name != "context_len" and not any(dim.symbol == name for dim in dims):
            raise SpecError(f"no input of model {spec.name} grows with {name}; it is not symbolic")
    places = [(dim.leaf, dim.dim) for dim in dims]
    if len(set(places)) < len(places):
        raise SpecError(
            f"an input of model {spec.name} has one dimension that grows with both"
            f" {' and '.join(symbols)}; make one of them symbolic"
        )


def _check_weights(
    spec: ModelSpec, symbol: str, first: BuiltModel, others: Mapping[int, BuiltModel]
) -> None:
    """Refuse a factory whose weights change their shapes with the value of `symbol`."""
    weights = _weight_shapes(first)
    for value, other in others.items():
        if other.module is not first.module and _weight_shapes(other) != weights:
            raise CaptureError(
                f"{symbol} cannot be symbolic: the weights of model {spec.name} differ between "
                f"{symbol}={value} and {symbol}={_size(spec, symbol)}; set capture.symbolic=none"
            )


def _weights(built: BuiltModel) -> list[Tensor]:
    return [*built.module.parameters(), *built.module.buffers()]


def _weight_shapes(built: BuiltModel) -> list[Shape]:
    return [tuple(weight.shape) for weight in _weights(built)]


def _sizes(built: BuiltModel, dims: Sequence[SymbolicDim]) -> set[int]:
    """Return all sizes of weights and inputs, except the symbolic ones."""
    grows = {(dim.leaf, dim.dim) for dim in dims}
    sizes = {int(size) for weight in _weights(built) for size in weight.shape}
    for leaf, shape in enumerate(_shapes(built)):
        sizes |= {size for dim, size in enumerate(shape or ()) if (leaf, dim) not in grows}
    return sizes


def _leaves(built: BuiltModel) -> list[Any]:
    return tree_leaves((built.args, built.kwargs))


def _shapes(built: BuiltModel) -> list[Shape | None]:
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in _leaves(built)]


def _inputs(spec: ModelSpec, module: nn.Module) -> BuiltModel:
    """Return the model and inputs of `spec`, reusing the `module` of an architecture."""
    if spec.architecture is None:
        return build_model(spec)
    return BuiltModel(module, (), architecture_inputs(spec, module))


def _positions(spec: ModelSpec, module: nn.Module) -> int | None:
    """Return the maximum sequence length of the model's tables, or None if unlimited."""
    if spec.architecture is None:
        return None
    from fxpart.capture.models.inputs import positions

    return positions(module, "" if module.main_input_name == "input_ids" else "decoder")


def _size(spec: ModelSpec, name: str) -> int:
    return int(getattr(spec, _FIELDS[name]) or 1)


def _resized(spec: ModelSpec, name: str, value: int) -> ModelSpec:
    sizes: dict[str, Any] = {_FIELDS[name]: value}
    return replace(spec, **sizes)


def _apart(size: int, limits: tuple[int, int | None], used: set[int]) -> int:
    """Return a number near `size`, at least 2 and within `limits`, not in `used`; add it there."""
    lower, upper = max(2, limits[0]), limits[1]
    wanted = max(lower, size)
    span = range(wanted, wanted + len(used) + 1)
    below = range(wanted, lower - 1, -1)
    candidates = [v for v in (*span, *below) if v not in used and (upper is None or v <= upper)]
    chosen = candidates[0] if candidates else wanted
    used.add(chosen)
    return chosen


def _near(value: int, lower: int, upper: int | None) -> list[int]:
    """Return three values at which to compare the inputs."""
    last = value + 2 if upper is None else min(value + 2, upper)
    return [max(last - step, lower) for step in (2, 1, 0)]

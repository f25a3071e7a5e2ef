"""Which dimensions of a model's inputs are its batch or its sequence, by comparing inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fxpart.capture.models.build import BuiltModel, architecture_inputs, build_model
from fxpart.capture.models.cached_step import context_range
from fxpart.capture.models.image_grids import given_grids
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.symbolic.dims import Shape, SymbolicDim, affine_dims
from fxpart.errors import CaptureError, SpecError, nearest_names

__all__ = ["SYMBOLS", "SymbolicInputs", "symbolic_inputs"]

SYMBOLS = ("batch", "seq_len", "context_len")
"""What may be symbolic: `ModelSpec.batch_size`, `ModelSpec.seq_len`, `ModelSpec.cache_len`."""
_FIELDS = {"batch": "batch_size", "seq_len": "seq_len", "context_len": "cache_len"}


@dataclass(frozen=True, eq=False, slots=True)
class SymbolicInputs:
    """A model, example inputs of sizes that stand out, and which of these are symbolic."""

    built: BuiltModel
    dims: tuple[SymbolicDim, ...]
    """Of all the symbols that were asked for, in their order."""
    ranges: dict[str, tuple[int, int | None]]
    """The smallest and largest value of each symbol that the model has room for."""
    constant: dict[str, int]
    """The value of a context that no input grows with, as of a recurrence's state."""


def symbolic_inputs(spec: ModelSpec, symbols: Sequence[str] = SYMBOLS[:1]) -> SymbolicInputs:
    """Return the model of `spec`, on meta, and which sizes of its inputs grow with `symbols`.

    The inputs are made at three values of each symbol and compared. Those that come back have
    the sizes of `spec`, or the nearest of 2 or more that no weight and no other input has.

    Raises:
        SpecError: for symbols that do not exist, ``seq_len`` where `spec` states none, a model of
            images that is given their grids, and as `build_model`.
        CaptureError: when an input grows otherwise than in multiples of a symbol, or a weight does
            at all.

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
    if "context_len" in symbols:
        ranges["context_len"] = context_range(first.module, spec.cache_len or 0)
    dims: list[SymbolicDim] = []
    for name in symbols:
        at = _near(_size(spec, name), *ranges[name])
        others = {value: _inputs(_resized(spec, name, value), first.module) for value in at}
        _check_weights(spec, name, first, others)
        dims += affine_dims(name, {value: _shapes(other) for value, other in others.items()})
    _check_dims(spec, symbols, dims)
    sample, taken = spec, _sizes(first, dims)
    for name in symbols:
        sample = _resized(sample, name, _apart(_size(spec, name), ranges[name], taken))
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
    """Refuse a factory whose weights have other shapes at another value of `symbol`."""
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
    """Return every size of a weight or an input, except for the symbolic ones."""
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
    """Return the model and inputs of `spec`; a transformer is not built again for them."""
    if spec.architecture is None:
        return build_model(spec)
    return BuiltModel(module, (), architecture_inputs(spec, module))


def _positions(spec: ModelSpec, module: nn.Module) -> int | None:
    """Return the longest sequence that the model's tables serve, None where any will do."""
    if spec.architecture is None:
        return None
    from fxpart.capture.models.inputs import positions

    return positions(module, "" if module.main_input_name == "input_ids" else "decoder")


def _size(spec: ModelSpec, name: str) -> int:
    return int(getattr(spec, _FIELDS[name]) or 1)


def _resized(spec: ModelSpec, name: str, value: int) -> ModelSpec:
    sizes: dict[str, Any] = {_FIELDS[name]: value}
    return replace(spec, **sizes)


def _apart(size: int, limits: tuple[int, int | None], taken: set[int]) -> int:
    """Return a number near `size`, of 2 or more within `limits`, not in `taken`; add it there."""
    least, most = max(2, limits[0]), limits[1]
    wanted = max(least, size)
    span = range(wanted, wanted + len(taken) + 1)
    below = range(wanted, least - 1, -1)
    candidates = [v for v in (*span, *below) if v not in taken and (most is None or v <= most)]
    chosen = candidates[0] if candidates else wanted
    taken.add(chosen)
    return chosen


def _near(value: int, least: int, most: int | None) -> list[int]:
    """Return three values to compare the inputs at."""
    last = value + 2 if most is None else min(value + 2, most)
    return [max(last - step, least) for step in (2, 1, 0)]

"""`KnownValues`: track the values of small tensors that determine shapes during an export.

An export only knows shapes. Some models compute shapes from values, such as the image sizes of a
batch (``grid_thw``) or the positions of separators in a text. Values that follow from the inputs,
or from tensors the model creates, are computed alongside the export, on the CPU.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["KnownValues", "with_known_values"]

_MOST = 2**20
"""Maximal number of elements of a tensor whose values are tracked."""
_READS = frozenset(
    ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose")
) | {"__contains__", "is_nonzero"}
"""Functions that return a tensor's values to Python."""
_SIZED = frozenset(
    ("nonzero", "argwhere", "unique", "_unique2", "unique_consecutive", "masked_select", "bincount")
)
"""Functions whose result size depends on values."""
_OF_NUMBERS = frozenset(
    ("arange", "linspace", "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full")
) | {"view", "reshape", "expand", "narrow", "repeat", "split", "select", "tile", "unflatten"}
"""Functions that take numbers, or one-element tensors in their place."""
_MAKERS = frozenset(("arange", "linspace", "zeros", "ones", "full", "empty"))
"""Factory functions whose first argument is a number."""
_IN_PLACE = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__ior__", "__iand__"))
_UNKNOWN = object()
_BY_CHANCE = ("rand", "bernoulli", "multinomial", "normal", "uniform", "dropout", "empty")


@contextmanager
def with_known_values(module: nn.Module, known: Mapping[str, Tensor]) -> Iterator[None]:
    """Run calls of `module` under `KnownValues`, with `known` values of its inputs by name."""
    forward, is_own = module.forward, "forward" in vars(module)
    signature = inspect.signature(forward)

    @wraps(forward)
    def forward_with_values(*args: object, **kwargs: object) -> object:
        mode = KnownValues()
        for name, tensor in signature.bind(*args, **kwargs).arguments.items():
            if isinstance(tensor, Tensor) and name in known:
                with _outside():  # a copy for each call: what writes into it runs, too
                    mode.know(tensor, known[name].clone())
        with mode:
            return forward(*args, **kwargs)

    module.forward = forward_with_values
    try:
        yield
    finally:
        if is_own:
            module.forward = forward
        else:
            del module.forward


class KnownValues(TorchFunctionMode):
    """Provides the values of tensors that follow from the `known` ones.

    Data-dependent sizes then become numbers in the graph. Values that do not follow from known
    ones, such as a layer's results, stay unknown. Not thread-safe.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: Any = WeakIdKeyDictionary()
        self._shapes = FakeTensorMode(allow_non_fake_inputs=True)

    def know(self, tensor: Tensor, values: Tensor) -> None:
        """Record the `values`, on the CPU, of `tensor`."""
        self._values[tensor] = values

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call `func`, or answer in its place, and track the values of its result."""
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "size", "dim", "stride"):  # accesses to shapes and dtypes
            return func(*args, **named)
        tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        is_known = all(tensor in self._values for tensor in tensors)
        if not is_known or any(part in name for part in _BY_CHANCE):
            if _writes(name, named) and tensors:
                self._forget(_written(args, named))
            return self._called(func, args, named)
        real = self._computed(func, args, named)
        if name in _READS and real is not _UNKNOWN:
            return real
        if real is not _UNKNOWN and (name in _SIZED or self._is_sized(name, args)):
            device = tensors[0].device
            return tree_map_only(Tensor, lambda value: self._constant(value, device), real)
        if real is _UNKNOWN and _writes(name, named) and tensors:
            self._forget(_written(args, named))
        result = self._called(func, args, named)
        self._keep(result, real)
        return result

    def _called(self, func: Callable[..., Any], args: Any, named: Any) -> Any:  # noqa: ANN401
        args, named = self._sized(getattr(func, "__name__", ""), args, named)
        return func(*args, **named)

    def _computed(self, func: Callable[..., Any], args: Any, named: Any) -> Any:  # noqa: ANN401
        """Return the result of `func` on the known values.

        `_UNKNOWN` if it fails on them, or the result would be too large to track.
        """

        def real(leaf: object) -> object:
            if isinstance(leaf, Tensor):
                return self._values[leaf]
            is_place = isinstance(leaf, torch.device) or leaf in ("meta", "cuda")
            return torch.device("cpu") if is_place else leaf

        args, named = tree_map(real, (args, named))
        name = getattr(func, "__name__", "")
        with _outside():
            # What is written has its size already, and fake tensors would write into it, too.
            makes_tensors = name not in _READS and not _writes(name, named)
            if makes_tensors and self._is_large(func, args, named):
                return _UNKNOWN
            try:
                return func(*args, **named)
            except (RuntimeError, TypeError, ValueError, IndexError):  # the export reports it
                return _UNKNOWN

    def _is_large(self, func: Callable[..., Any], args: Any, named: Any) -> bool:  # noqa: ANN401
        """Return whether a result has more than `_MOST` elements, without computing it."""
        try:
            with self._shapes:
                result = func(*args, **named)
        # Includes data-dependent shapes, which are bounded since tracked tensors are small.
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError, AttributeError):
            return False
        return any(isinstance(t, Tensor) and t.numel() > _MOST for t in tree_leaves(result))

    def _keep(self, result: object, real: object) -> None:
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        values = [leaf for leaf in tree_leaves(real) if isinstance(leaf, Tensor)]
        if len(tensors) != len(values):
            return
        for tensor, value in zip(tensors, values, strict=True):
            if tensor.shape == value.shape and value.numel() <= _MOST:
                self._values[tensor] = value

    def _forget(self, written: object) -> None:
        """Forget the values of a tensor overwritten by something unknown, and of its views."""
        for tensor in tree_leaves(written):
            values = self._values.get(tensor) if isinstance(tensor, Tensor) else None
            if values is None:
                continue
            storage = values.untyped_storage().data_ptr()
            for other, same in list(self._values.items()):
                if same.untyped_storage().data_ptr() == storage:
                    del self._values[other]

    def _is_sized(self, name: str, args: tuple[Any, ...]) -> bool:
        """Return whether the result size depends on values of `args`."""
        if name == "where":
            return len(args) == 1
        if name == "repeat_interleave":
            return len(args) == 1 or isinstance(args[1], Tensor)
        return name == "__getitem__" and any(_is_mask(leaf) for leaf in tree_leaves(args[1:]))

    def _sized(
        self, name: str, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with tensors that determine the result size replaced by numbers."""
        if name in _OF_NUMBERS:
            first, rest = (args[:1], args[1:]) if name not in _MAKERS else ((), args)
            return (*first, *tree_map(self._number, rest)), tree_map(self._number, named)
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return (args[0], tuple(self._numbered(index)), *args[2:]), named
        repeats = args[1] if len(args) > 1 else named.get("repeats")
        if name == "repeat_interleave" and isinstance(repeats, Tensor) and repeats in self._values:
            total = int(self._computed(torch.sum, (repeats,), {}))
            return args, {**named, "output_size": total}
        return args, named

    def _numbered(self, index: tuple[Any, ...]) -> Iterator[Any]:
        """Yield the parts of an index, masks replaced by the positions of their true elements."""
        for part in index:
            if _is_mask(part) and part in self._values:
                with _outside():
                    where = self._values[part].nonzero(as_tuple=True)
                for positions in where:
                    yield self._constant(positions, part.device)
            elif isinstance(part, slice):
                yield slice(*map(self._number, (part.start, part.stop, part.step)))
            else:
                yield self._number(part)

    def _number(self, leaf: object) -> object:
        """Return the number in an integer one-element tensor; anything else unchanged."""
        if not isinstance(leaf, Tensor) or leaf.dim() or leaf.is_floating_point():
            return leaf
        if leaf.dtype == torch.bool or leaf not in self._values:
            return leaf
        with _outside():
            return int(self._values[leaf])

    def _constant(self, values: Tensor, device: torch.device) -> Tensor:
        """Return a constant tensor of the export with these values."""
        with _outside():
            numbers = values.tolist()
        tensors = torch.tensor(numbers, dtype=values.dtype, device=device)
        self._values[tensors] = values
        return tensors


@contextmanager
def _outside() -> Iterator[None]:
    """Compute known values outside the export's modes."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _is_mask(part: object) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool and part.dim() > 0


def _written(args: tuple[Any, ...], named: Mapping[str, Any]) -> object:
    """Return the tensor, or list of tensors, written by a call."""
    return named.get("out", args[0] if args else named)


def _writes(name: str, named: Mapping[str, Any]) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _IN_PLACE or "out" in named

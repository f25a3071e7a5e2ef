"""Export each call of a user's `torch.autograd.Function` as one call, with its backward.

`torch.export` records the operators of a Function's forward, which autograd would then
differentiate instead of using the Function's own backward. Here each call of a Function is exported
as one call of an operator that applies the Function itself, so that running the program under
autograd, whether to trace a training step or with data, runs the user's forward and backward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor, fx, nn
from torch.autograd import Function
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from fxpart.capture.calls import storage_key
from fxpart.capture.inference.export import VALUES
from fxpart.capture.models.user_code import user_line
from fxpart.capture.training.joint_labels import FORWARD
from fxpart.errors import CaptureError

__all__ = [
    "exported_functions",
    "functions_called",
    "refuse_other_weights",
    "refuse_unknown_sizes",
    "traced_functions",
]

_FORWARD, _SETUP, _BACKWARD = "forward", "setup_context", "backward"
_NAME = "fxpart_user::function"
torch.library.define(_NAME, "(Tensor[] tensors, SymInt[] sizes, int call) -> Tensor[]")


@dataclass(eq=False, slots=True)
class _Call:
    """Structure and non-tensor arguments of a Function's call, and the structure of its results."""

    function: type[Function]
    structure: TreeSpec
    """Structure of the arguments."""
    leaves: list[Any]
    """The flat arguments, with `_TENSOR` or `_SIZE` in place of tensors and symbolic sizes."""
    results: tuple[list[Any], TreeSpec] | None = None
    """The flat results, with `_TENSOR` in place of each tensor, and their structure; known once
    the Function has been applied."""


_TWO_DEVICES = "found at least two devices"
"""In torch's error for a tensor of the model, on meta, among those of the trace."""
_BY_VALUES = ("DataDependent", "PendingUnbacked", "data-dependent", ".numpy()")
"""In torch's errors, by name or message, for code that needs values which a trace does not have."""
_TENSOR = object()
_SIZE = object()
_calls: list[_Call] = []
"""All exported calls of this process; programs refer to them by index."""
_applying: list[type[Function]] = []
"""The Functions whose own forward is running, the outermost first."""


def _apply(tensors: Sequence[Tensor], sizes: Sequence[int | SymInt], call: int) -> list[Tensor]:
    """Apply the Function of a call, and return the tensors among its results.

    Raises CaptureError if it writes to an argument that it returns.
    """
    recorded = _calls[call]
    next_tensor, next_size = iter(tensors), iter(sizes)
    leaves = [
        next(next_tensor) if leaf is _TENSOR else next(next_size) if leaf is _SIZE else leaf
        for leaf in recorded.leaves
    ]
    args = tree_unflatten(leaves, recorded.structure)
    versions = [tensor._version for tensor in tensors]
    _applying.append(recorded.function)
    try:
        results, structure = tree_flatten(recorded.function.apply(*args))  # type: ignore[no-untyped-call]
    finally:
        _applying.pop()
    returned = {storage_key(result) for result in results if isinstance(result, Tensor)}
    for tensor, version in zip(tensors, versions, strict=True):
        if tensor._version != version and storage_key(tensor) in returned:
            raise CaptureError(
                f"{recorded.function.__qualname__}, a torch.autograd.Function, writes to its own"
                " input (mark_dirty), which a captured step cannot do; have its forward return a"
                " new tensor, such as x + 1 for x.add_(1)"
            )
    recorded.results = (
        [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in results],
        structure,
    )
    return [leaf for leaf in results if isinstance(leaf, Tensor)]


torch.library.impl(_NAME, "CompositeImplicitAutograd", _apply)


def _recorded(function: type[Function], args: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Call `function` as one operator, and return its results as its forward would."""
    leaves, structure = tree_flatten(args)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sizes = [leaf for leaf in leaves if isinstance(leaf, SymInt)]
    blanks = [
        _TENSOR if isinstance(leaf, Tensor) else _SIZE if isinstance(leaf, SymInt) else leaf
        for leaf in leaves
    ]
    recorded_call = _Call(function, structure, blanks)
    _calls.append(recorded_call)
    try:
        results = iter(torch.ops.fxpart_user.function(tensors, sizes, len(_calls) - 1))
    except Exception as error:
        if not _needs_values(error):
            raise
        raise _reads_values([function.__qualname__], user_line(error)) from error
    assert recorded_call.results is not None, "the operator has been run"
    flat, structure = recorded_call.results
    return tree_unflatten([next(results) if leaf is _TENSOR else leaf for leaf in flat], structure)


def _replaced(function: type[Function]) -> Callable[..., Any]:
    """Return the replacement for the forward of `function` during an export."""
    original = function.forward
    # A Function that defines `setup_context` has a forward without a context.
    first = 0 if function.setup_context is not Function.setup_context else 1

    def forward(*args: Any) -> Any:  # noqa: ANN401 - any arguments and results
        if _applying:
            return original(*args)
        return _recorded(function, args[first:])

    return forward


def _set_up_once(function: type[Function]) -> Callable[..., None]:
    """Return the replacement for the `setup_context` of `function` during an export.

    The call that is exported sets up its own context when it applies the Function.
    """
    original = function.setup_context

    def setup_context(*args: Any) -> None:  # noqa: ANN401 - a context, any arguments and results
        if _applying:
            original(*args)

    return setup_context


def _refused(function: type[Function]) -> Callable[..., Any]:
    """Return the replacement for the backward of `function` during an export."""
    original = function.backward

    def backward(*args: Any) -> Any:  # noqa: ANN401 - any arguments and results
        if _applying:
            return original(*args)
        raise CaptureError(
            f"its forward takes a gradient (torch.autograd.grad) through {function.__qualname__}, a"
            " torch.autograd.Function, which a captured step cannot do; compute with torch's own"
            " operators there"
        )

    return backward


@contextmanager
def exported_functions() -> Iterator[None]:
    """Export every call of a user's `Function` in the block as one call; not thread-safe.

    Functions of torch itself, and calls inside another Function, are not affected.
    """
    functions = [f for f in _subclasses(Function) if not f.__module__.startswith("torch.")]
    replaced = [(function, _FORWARD, _replaced(function)) for function in functions]
    replaced += [
        (function, _SETUP, _set_up_once(function))
        for function in functions
        if function.setup_context is not Function.setup_context
    ]
    replaced += [
        (function, _BACKWARD, _refused(function))
        for function in functions
        if function.backward is not Function.backward
    ]
    originals = [(function, name, vars(function).get(name)) for function, name, _ in replaced]
    for function, name, method in replaced:
        setattr(function, name, staticmethod(method))
    try:
        yield
    finally:
        for function, name, original in originals:
            if original is None:
                delattr(function, name)
            else:
                setattr(function, name, original)


@contextmanager
def traced_functions(
    module: nn.Module, functions: Sequence[str], weights: Mapping[str, Tensor]
) -> Iterator[None]:
    """Let `functions` applied in the block find `weights`, by name, in `module` and its parts.

    A Function may keep a module in its context, as reversible networks do, and read its weights in
    forward and backward. Without Functions, the module is left alone. Not thread-safe.

    Raises CaptureError if their code needs a tensor that is not known, or the values of one.
    """
    if not functions:
        yield
        return
    try:
        with _reparametrize_module(module, dict(weights)):
            yield
    except Exception as error:
        if _TWO_DEVICES in str(error):
            raise _unknown_weight(functions) from error
        if _needs_values(error):
            raise _reads_values(functions, user_line(error)) from error
        raise


def refuse_other_weights(traced: fx.GraphModule, functions: Sequence[str]) -> None:
    """Raise CaptureError if `traced`, a trace under `traced_functions`, holds a weight itself."""
    holders = (node.target for node in traced.graph.find_nodes(op="get_attr"))
    if functions and any(isinstance(getattr(traced, str(h)), nn.Parameter) for h in holders):
        raise _unknown_weight(functions)


def refuse_unknown_sizes(traced: fx.GraphModule, functions: Sequence[str]) -> None:
    """Raise CaptureError if a backward makes tensors of unknown sizes; only `functions` do."""
    tensors = (
        (node, leaf)
        for node in traced.graph.nodes
        for leaf in tree_leaves(node.meta.get("val"))
        if isinstance(leaf, Tensor)
    )
    first = next((node for node, tensor in tensors if free_unbacked_symbols(tensor)), None)
    if functions and first is not None and first.meta.get(FORWARD) is not None:
        raise _reads_values(functions)


def _needs_values(error: Exception) -> bool:
    return any(text in f"{type(error).__name__} {error}" for text in _BY_VALUES)


def _reads_values(functions: Sequence[str], line: str = "") -> CaptureError:
    return CaptureError(
        f"{', '.join(functions)}, a torch.autograd.Function{line}, needs {VALUES}, as by .item(), a"
        " branch or a mask as an index, which a captured step does not have; compute with tensors"
        " of known shapes there, such as x / x.max() or torch.where"
    )


def _unknown_weight(functions: Sequence[str]) -> CaptureError:
    return CaptureError(
        f"{', '.join(functions)}, a torch.autograd.Function, reads a tensor that is neither one of"
        " its arguments nor a weight or buffer that a module of the model has as an attribute; pass"
        " it as an argument"
    )


def functions_called(module: fx.GraphModule) -> list[str]:
    """Return the names of the Functions applied by an exported module, each once, in order."""
    calls = [
        node.args[2]
        for inner in module.modules()
        if isinstance(inner, fx.GraphModule)
        for node in inner.graph.nodes
        if node.target is torch.ops.fxpart_user.function.default
    ]
    return list(dict.fromkeys(_calls[int(call)].function.__qualname__ for call in calls))


def _subclasses(parent: type[Function]) -> list[type[Function]]:
    """Return all classes below `parent`, each once."""
    classes: dict[type[Function], None] = {}
    pending = [parent]
    while pending:
        for subclass in pending.pop().__subclasses__():
            if subclass not in classes:
                classes[subclass] = None
                pending.append(subclass)
    return list(classes)

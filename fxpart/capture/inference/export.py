"""Operator-level capture with `torch.export`, non-strict, on the meta device: no weights needed."""

import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from itertools import chain
from typing import Any

import torch
import torch.fx.config
from torch import Tensor, nn
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils._pytree import tree_leaves

from fxpart.capture.inference.eager_lifetimes import BACKWARD_CALLED, watched_export
from fxpart.capture.inference.known_values import with_known_values
from fxpart.capture.models.forward_failure import change_for
from fxpart.capture.models.user_code import user_errors, user_line, where_raised
from fxpart.errors import CaptureError, SpecError, one_line

__all__ = [
    "VALUES",
    "by_known_values",
    "capture_failure",
    "check_call",
    "export_program",
    "only_graphs",
    "quiet",
    "unmasked_attention",
    "without_transforms",
]


# A transformers model without a padding mask skips the mask if attention can be flagged as causal
# or needs none. During export it builds the mask anyway, since the export might be called with
# other lengths. Our export is only used for its captured shapes: with masks, and the per-head
# copies of keys and values that come with them, it would take more memory than a real run.

_MASKS = "transformers.masking_utils"
_ATTENTION = "transformers.integrations.sdpa_attention"
_EXPORTING = "is_torchdynamo_exporting"
_COMPILING = "is_torchdynamo_compiling"
_PACKED = "find_packed_sequence_indices"
_POSITIONS = "position_ids"
_METADATA_CHECK = torch.ops.aten._assert_tensor_metadata.default


@contextmanager
def unmasked_attention(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Let transformers models skip masks during export, as they do in a run.

    A mask whose values matter is still built: one given as input, or one that separates sequences
    packed into one row, as positions among the inputs may indicate. Other models, and versions of
    transformers without these functions, are not affected. Not thread-safe.

    Args:
        forward: the model's forward, whose signature names the positional inputs.
        args: positional inputs of the model.
        kwargs: named inputs of the model.

    """
    # One token against a cache uses grouped-query attention; compiled, it copies keys and values.
    answers: dict[tuple[str, str], Callable[..., Any]] = {
        (_MASKS, _EXPORTING): _no,
        (_ATTENTION, _COMPILING): _no,
    }
    parameters = inspect.signature(forward).parameters
    names = {*kwargs, *list(parameters)[: len(args)]}
    # Any of ``*args`` may be positions.
    is_named = not args or all(p.kind != p.VAR_POSITIONAL for p in parameters.values())
    if is_named and _POSITIONS not in names:
        # Positions counted by the model itself imply one sequence per row.
        answers[_MASKS, _PACKED] = _none
    modules = {module_name: sys.modules.get(module_name) for module_name in (_MASKS, _ATTENTION)}
    originals = {
        (module_name, name): getattr(modules[module_name], name)
        for module_name, name in answers
        if hasattr(modules[module_name], name)
    }
    for module_name, name in originals:
        setattr(modules[module_name], name, answers[module_name, name])
    try:
        yield
    finally:
        for (module_name, name), original in originals.items():
            setattr(modules[module_name], name, original)


def _no() -> bool:
    return False


def _none(position_ids: object) -> None:
    return None


VALUES = "the values of a tensor"
"""In messages of errors that an export with known values may avoid."""
_BRANCHES = f"the model branches on {VALUES}, or makes tensors whose size depends on them"
_READS = "the model reads tensor values while it runs; take its branches from shapes"
_UNPACKED = "leave out pack_padded_sequence: sequences of equal length do not need it"
_BY_GRAD = "take the gradients by torch.autograd.grad(..., create_graph=True)"
_ALL_TOKENS = (
    "; for a mixture of experts, let each expert compute all tokens, with weights of 0 for those"
    " that chose others, or as many as it has room for"
)
_HINTS = (
    ("data-dependent", _BRANCHES),
    ("DataDependent", _BRANCHES),
    ("SymInt", _BRANCHES),
    ("meta tensor", _READS),
    ("unallocated storage", _READS),
    ("PackedSequence", _UNPACKED),
    (BACKWARD_CALLED, _BY_GRAD),
    (
        "Unexpected key _export_root",
        "if it takes gradients inside its forward, turn torch.utils.checkpoint off in the model",
    ),
    (
        "saved tensor unpack_hook",
        "it calls backward inside its forward, or takes gradients inside that of a"
        f" torch.autograd.Function; {_BY_GRAD} in the forward of a module",
    ),
    ("expected scalar type", "the model mixes dtypes; set model.dtype=float32"),
    ("found at least two devices", "create every tensor on the default device, not on cpu"),
)
_EQUAL = "; torch.cov and torch.corrcoef call aten.equal: write them as a product"
_NO_HOOKS = "don't yet support saved tensor hooks"
_TRANSFORMS = "torch._functorch.predispatch"
_CHANCE = "; phase.train_mode=false leaves out random operators"
_DROPPED = {
    "layerdrop": "0",
    "encoder_layerdrop": "0",
    "decoder_layerdrop": "0",
    "apply_spec_augment": "false",
}
"""Settings of transformers that randomly drop layers, or mask spans, at run time."""
_EXPERTS = "; for a mixture of experts, set model.config.experts_implementation=grouped_mm"


def capture_failure(module: nn.Module, error: BaseException) -> CaptureError:
    """Return the error stating why `module` cannot be captured and, if known, what helps."""
    message = f"{type(error).__name__} {error}"
    if _NO_HOOKS in message:
        # These are hooks of `watched_export`, not the user's, and it would fail without them too.
        return CaptureError(
            f"{type(module).__name__} cannot be captured by torch.export{user_line(error)}: it"
            f" calls torch.func.grad, vjp, jacrev or hessian, which cannot be traced; {_BY_GRAD}"
        )
    hint = next((text for key, text in _HINTS if key in message), "")
    hint = hint or _dense_gradients(module, message) or change_for(module, error)
    if hint == _BRANCHES and type(module).__module__.startswith("transformers."):
        config = getattr(module, "config", object)
        # Every configuration names an experts implementation, but only mixtures have a number of
        # experts.
        counts = [key for key in vars(config) if "experts" in key and not key.startswith("_")]
        if any(type(getattr(config, key)) is int for key in counts):
            hint += _EXPERTS
        off = [f"model.config.{k}={v}" for k, v in _DROPPED.items() if getattr(config, k, False)]
        if module.training and off:
            hint += f"; set {' '.join(off)}, or phase.train_mode=false, to avoid random branches"
            return _failure(module, error, hint)
    elif hint == _BRANCHES and _has_experts(module):
        hint += _ALL_TOKENS
    if hint == _BRANCHES and "aten.equal" in message:
        hint += _EQUAL
    if hint == _BRANCHES and module.training:
        hint += _CHANCE
    return _failure(module, error, hint)


def _dense_gradients(module: nn.Module, message: str) -> str:
    """Return what to change if the error is that a sparse gradient has no storage."""
    if "SparseTensorImpl" not in message:
        return ""
    tables = [path or "it" for path, part in module.named_modules() if getattr(part, "sparse", 0)]
    whose = f"the sparse gradient of {', '.join(tables[:3])}" if tables else "a sparse gradient"
    return f"{whose} has no storage whose bytes could be counted; set sparse=False"


def _has_experts(module: nn.Module) -> bool:
    return any("expert" in path or "moe" in path.lower() for path, _ in module.named_modules())


def _failure(module: nn.Module, error: BaseException, hint: str) -> CaptureError:
    return CaptureError(
        f"{where_raised(error, type(module).__name__)} cannot be captured by"
        f" torch.export{user_line(error)}: {one_line(error)}" + (f"; {hint}" if hint else "")
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's warnings, logs and prints, pages of them on a failure; ours is one line."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextmanager
def only_graphs() -> Iterator[None]:
    """Let torch trace graphs without the stack of each call and without Python code.

    Torch records the call site of each node, and after each pass of an export generates the code of
    the graph, which is never run: together a third of the time of an export. A graph module traced
    in the block generates its code when it is called or printed. Not thread-safe.
    """
    config, name = torch.fx.config, "do_not_emit_stack_traces"
    before = getattr(config, name, False)  # older versions of torch do not have it
    setattr(config, name, True)
    try:
        with _use_lazy_graph_module(True):
            yield
    finally:
        setattr(config, name, before)


def without_transforms(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return `program` with ``torch.vmap`` and similar transforms expanded into operators.

    `torch.export` leaves the calls that enter and exit such a transform in the graph.
    """
    targets = (node.target for node in program.graph.nodes if node.op == "call_function")
    if any(getattr(target, "__module__", "") == _TRANSFORMS for target in targets):
        meta = program.graph_module.meta
        program = program.run_decompositions({})
        program.graph_module.meta.update(meta)
    return program


def check_call(module: object, args: object) -> None:
    """Raise `SpecError` if `module` is no module, or its inputs are no tuple."""
    if not isinstance(module, nn.Module):
        raise SpecError(f"a capture takes a torch.nn.Module, got {module!r}; make an instance")
    if not isinstance(args, tuple | list):
        raise SpecError(
            f"the inputs must be a tuple, got {type(args).__name__}; pass (input,) for one input"
        )


def export_program(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,  # noqa: ANN401 - as torch.export takes it
) -> torch.export.ExportedProgram:
    """Return `module` exported for the shapes and dtypes of the example inputs.

    Parameters, buffers and inputs may all be on the meta device; then a model of any size takes no
    memory. Tensors that the model creates on the default device are created on the device of its
    parameters, else of its buffers, else of its inputs. Every call node of the result carries the
    path of its module. `dynamic_shapes` declares symbolic input sizes, as in `torch.export.export`.
    Attention of transformers models is as in a run, see `unmasked_attention`. If shapes are
    data-dependent, the model is exported again with known values
    (`fxpart.capture.inference.known_values`): those of its tokens and of small tensors it creates.

    Raises:
        SpecError: if `module` is no module, or `args` no tuple.
        CaptureError: if the model cannot be exported; the message names the cause and, if known,
            the setting that helps.

    """
    check_call(module, args)
    inputs = dict(kwargs or {})
    export = partial(_exported, module, args, inputs, dynamic_shapes)
    return export() if dynamic_shapes is not None else by_known_values(module, inputs, export)


def by_known_values(
    module: nn.Module,
    inputs: Mapping[str, Any],
    export: Callable[[], torch.export.ExportedProgram],
) -> torch.export.ExportedProgram:
    """Return the result of `export`, called again with known values if its shapes are unknown.

    Args:
        module: the module that it exports.
        inputs: named inputs of the module.
        export: exports the module at fixed sizes.

    Raises:
        CaptureError: as `export` does, if known values do not help.

    """
    failed = program = None
    try:
        program = export()
        if not _has_unknown_sizes(program):
            return program
    except CaptureError as error:
        if not _by_values(error):
            raise
        failed = error
    try:
        with with_known_values(module, _known_inputs(module, inputs)):
            return export()
    except CaptureError:
        if program is not None:
            return program  # its sizes are refused where needed
        raise failed or AssertionError from None


def _known_inputs(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the values of integer `inputs`; for a model on meta, plausible ones."""
    whole = {
        name: value
        for name, value in inputs.items()
        if isinstance(value, Tensor) and not value.is_floating_point()
    }
    known = {name: value.cpu() for name, value in whole.items() if value.device.type != "meta"}
    if not type(module).__module__.startswith("transformers."):
        return known
    from fxpart.capture.models.inputs import ordinary_inputs

    return ordinary_inputs(module, whole) | known


def _by_values(error: CaptureError) -> bool:
    """Return whether the export failed because of data-dependent shapes."""
    return any(hint in str(error) for hint in (VALUES, _READS))


def _has_unknown_sizes(program: torch.export.ExportedProgram) -> bool:
    return any(
        isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat)
        for node in program.graph.nodes
    )


def _exported(
    module: nn.Module,
    args: tuple[Any, ...],
    inputs: dict[str, Any],
    dynamic_shapes: Any,  # noqa: ANN401
) -> torch.export.ExportedProgram:
    tensors = (t for t in tree_leaves((args, inputs)) if isinstance(t, Tensor))
    first = next(chain(module.parameters(), module.buffers(), tensors), None)
    device = torch.device("meta") if first is None else first.device
    with (
        user_errors(partial(capture_failure, module)),
        quiet(),
        only_graphs(),
        torch.no_grad(),
        device,
        unmasked_attention(module.forward, args, inputs),
    ):
        program = without_transforms(watched_export(module, args, inputs, dynamic_shapes))
    return _without_checks_of_weights(program)


def _without_checks_of_weights(
    program: torch.export.ExportedProgram,
) -> torch.export.ExportedProgram:
    """Return `program` without assertions about tensors of the module itself, which are known.

    An assertion is placed with the operator before it, whose device would hold the weight too.
    """
    signature = program.graph_signature
    own = {
        *signature.inputs_to_parameters,
        *signature.inputs_to_buffers,
        *signature.inputs_to_lifted_tensor_constants,
    }
    for node in program.graph.find_nodes(op="call_function", target=_METADATA_CHECK):
        if node.args[0].name in own:
            program.graph.erase_node(node)
    program.graph_module.recompile()
    return program

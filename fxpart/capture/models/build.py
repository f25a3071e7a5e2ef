"""`build_model`: build the module and example inputs of a `ModelSpec`, by default on meta.

A model is a transformers class (`fxpart.capture.models.architecture`) or the result of a factory,
``package.module:function``.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor, nn
from torch.export import register_dataclass
from torch.utils._pytree import tree_leaves, tree_map_only

from fxpart.capture.models.adapters import add_adapters
from fxpart.capture.models.autocast import autocast, regions_of_cuda, with_own_regions
from fxpart.capture.models.factory_source import (
    factory_as_imported,
    imported_function,
)
from fxpart.capture.models.refuse_model import refuse_inputs, refuse_module
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.models.user_code import LOSS_NOTE, user_errors, user_line
from fxpart.core.data_parallel import share_of_sequence
from fxpart.errors import CaptureError, FxpartError, SpecError, nearest_names, one_line

__all__ = ["BuiltModel", "architecture_inputs", "build_model", "factory_model"]

META = torch.device("meta")


@dataclass(frozen=True, eq=False, slots=True)
class BuiltModel:
    """A module for inference and its example inputs, all on one device."""

    module: nn.Module
    args: tuple[Any, ...]
    """Positional example inputs."""
    kwargs: dict[str, Tensor]
    """Named example inputs."""


def build_model(spec: ModelSpec, device: torch.device | None = None) -> BuiltModel:
    """Return the model that `spec` describes, with example inputs.

    Parameters, buffers and inputs are on the meta device, so a model of any size takes no memory;
    nothing is downloaded. The module is in eval mode, with parameters in the spec's dtype (a
    factory receives the dtype, and its result is not cast).

    On another `device`, weights and inputs are drawn from torch's generators: seed them first.
    Inputs returned by a factory are unchanged.

    If the user provides a loss function (`ModelSpec.loss`), the module returns the loss.

    `fxpart.capture.models.inputs.example_inputs` describes an architecture's inputs. Its
    ``use_cache`` is off. With ``config.use_cache=true``, decoder-only models can be exported too,
    and the keys and values of every layer are outputs of the graph; encoder-decoder models cannot.

    With `ModelSpec.tensor_parallel` it is the part of one device (`fxpart.sharding`).

    With `ModelSpec.autocast` its forward, including the loss, casts like CUDA's `torch.autocast`;
    autocast regions inside its forward always do.

    With `ModelSpec.lora` it has peft's adapters, and only these are trained.

    Raises:
        SpecError: if a name, configuration or shape does not exist, or the model cannot be split
            over that many devices.
        CaptureError: if a factory fails.

    """
    with regions_of_cuda():
        built = _without_loss(spec, META if device is None else device)
    if spec.lora:
        add_adapters(built.module, spec.lora)
    if spec.loss_function is not None:
        _compute_loss(built.module, spec.loss_function)
    if spec.autocast is not None:
        autocast(built.module, getattr(torch, spec.autocast))
    with_own_regions(built.module)
    return built


def _compute_loss(module: nn.Module, name: str) -> None:
    """Let `module` return the user's loss function of its result and inputs, a single number.

    Raises:
        SpecError: if the function does not exist or returns anything but a number.
        CaptureError: if importing it fails.

    """
    function = imported_function(name, "model.loss")
    forward = module.forward

    @wraps(forward)
    def forward_and_loss(*args: object, **kwargs: object) -> Tensor:
        inputs = signature.bind(*args, **kwargs).arguments
        result = forward(*args, **kwargs)
        try:
            loss = function(result, inputs)
        except Exception as error:
            error.add_note(f"{LOSS_NOTE}{name}")
            raise
        return _checked_loss(loss, module, name)

    signature = inspect.signature(forward)
    # On the module itself: a wrapper module would change the path of every submodule.
    module.forward = forward_and_loss


def _checked_loss(loss: object, module: nn.Module, name: str) -> Tensor:
    """Return `loss`, as returned by the user's function of that name for a result of `module`."""
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    if isinstance(loss, int | float | SymInt | SymFloat):
        wrong = "a number of Python; return a tensor of one number, without .item()"
    elif not isinstance(loss, Tensor):
        wrong = f"{type(loss)}; return a tensor of one number"
    elif loss.dim():
        wrong = f"a tensor of shape {tuple(loss.shape)}; return a tensor of one number"
    elif not loss.is_floating_point():
        wrong = f"a tensor of {loss.dtype}; return a floating-point one, which has a gradient"
    elif trains and not loss.requires_grad:
        wrong = (
            "a tensor that depends on no weight with a gradient; compute it from the model's"
            " result, without detach or torch.no_grad"
        )
    else:
        return loss
    raise SpecError(f"model.loss={name} returned {wrong}")


def _without_loss(spec: ModelSpec, place: torch.device) -> BuiltModel:
    if spec.architecture is None:
        module, args, kwargs = factory_model(spec, place)
        return BuiltModel(_part(module, spec), args, kwargs)
    # Imported here since transformers takes seconds to import.
    from fxpart.capture.models.architecture import architecture_model
    from fxpart.capture.models.inputs import drawn_inputs

    dtype: torch.dtype = getattr(torch, spec.dtype)
    whole = architecture_model(spec.architecture, spec.config, dtype, place)
    # Before the inputs, which include the keys and values of the part's heads.
    module = _part(_moved(whole, place), spec)
    if spec.context_parallel > 1:
        room = spec.cache_len
        tokens = share_of_sequence(spec.seq_len or room, spec.context_parallel)
        # Each device caches the keys and values of its piece of the sequence.
        room = None if room is None else -(-room // spec.context_parallel)
        spec = replace(spec, seq_len=tokens, cache_len=room)
    try:
        inputs = architecture_inputs(spec, module)
        _check_pieces(spec, module, inputs)
        if place.type != "meta":
            inputs = drawn_inputs(module, inputs, place)
            if spec.step is not None:
                from fxpart.capture.models.cached_step import cache_room, fill_counters

                fill_counters(inputs, spec.step, cache_room(module, spec))
    except (RuntimeError, OverflowError, TypeError) as error:
        if isinstance(error, FxpartError):
            raise
        raise SpecError(
            f"model {spec.name}: no tensors of model.batch_size={spec.batch_size} and"
            f" model.seq_len={spec.seq_len} can be made: {one_line(error)}; choose smaller ones"
        ) from error
    return BuiltModel(module, (), inputs)


def _part(module: nn.Module, spec: ModelSpec) -> nn.Module:
    """Return the part of `module` that one device runs."""
    is_megatron = spec.engine == "megatron"
    if is_megatron:
        from fxpart.sharding.megatron import as_megatron

        module = as_megatron(module, spec.tensor_parallel)
    if spec.tensor_parallel > 1:
        from fxpart.sharding.experts import expert_paths
        from fxpart.sharding.local_module import shard_module

        module = shard_module(
            module,
            spec.tensor_parallel,
            sequence=spec.sequence_parallel,
            megatron=is_megatron,
            loss_parallel=spec.loss_parallel,
            copies_keys=spec.loss is None,
            whole=expert_paths(module) if spec.expert_parallel > 1 else (),
        )
    if spec.context_parallel > 1:
        from fxpart.sharding.context import split_context

        module = split_context(module, spec.context_parallel)
    if spec.expert_parallel > 1:
        from fxpart.sharding.experts import spread_experts

        module = spread_experts(
            module,
            spec.expert_parallel,
            imbalance=spec.expert_imbalance,
            same_tokens=1 if spec.sequence_parallel else spec.tensor_parallel,
            trains=spec.loss is not None,
            megatron=is_megatron,
        )
    return module


def _check_pieces(spec: ModelSpec, module: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Refuse a sequence that cannot be split into equal pieces."""
    if spec.sequence_parallel and "input_ids" in inputs:
        from fxpart.sharding.sequence import check_positions

        check_positions(module, inputs["input_ids"].shape[1], spec.tensor_parallel)


def architecture_inputs(spec: ModelSpec, module: Any) -> dict[str, Tensor]:  # noqa: ANN401
    """Return the inputs of an architecture's `module`, on meta; prepare it for a step if needed.

    Raises:
        SpecError: if the model does not have these shapes or this step.
        CaptureError: if its cache cannot be captured.

    """
    from fxpart.capture.models.image_grids import grid_values, with_grids
    from fxpart.capture.models.inputs import example_inputs
    from fxpart.capture.models.labels import with_own_loss

    if spec.step is not None:
        from fxpart.capture.models.cached_step import prepare_step

        return prepare_step(module, spec)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    has_labels = spec.loss == "own"
    inputs = example_inputs(module, spec.batch_size, spec.seq_len, dtype, labels=has_labels)
    if has_labels:
        with_own_loss(module)
    if grids := grid_values(module, spec.batch_size):
        with_grids(module, grids)
    return inputs


_SPEC_FIELDS = ("batch_size", "dtype", "seq_len")
"""Arguments of a factory that are not in `ModelSpec.factory_args`."""


def factory_model(
    spec: ModelSpec, device: torch.device = META
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the module, positional and keyword inputs returned by the factory of `spec`.

    The function is called as ``function(batch_size=..., dtype=torch.dtype, **factory_args)`` with
    `device` as the default device, and with ``seq_len=...`` if the spec states one. Tensors that it
    places on other devices are moved to `device` afterwards. Modules in the working directory can
    be imported.

    Raises:
        SpecError: if the function does not exist, does not accept the arguments or returns
            something else.
        CaptureError: if importing or calling it fails, or its source changes meanwhile.

    """
    factory = spec.factory or ""
    with factory_as_imported(factory, spec.depends_on):
        result = _called(spec, factory, device)

    def failed(error: BaseException) -> CaptureError:
        return CaptureError(
            f"factory={factory}: its model cannot be prepared{user_line(error)}: {one_line(error)}"
        )

    # A model may override any method that is called here.
    with user_errors(failed):
        module, args, kwargs = _checked(factory, result)
        refuse_module(factory, module)
        refuse_inputs(factory, (args, kwargs))
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        module = _moved(module, device)
        module.eval()
        module.register_forward_hook(_known_to_torch)
    return module, args, kwargs


def _known_to_torch(module: nn.Module, args: object, result: object) -> None:
    """Register the dataclasses that a forward returns as pytrees, which an export requires."""
    for leaf in tree_leaves(result):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            register_dataclass(type(leaf))
            _known_to_torch(module, args, leaf)


def _called(spec: ModelSpec, factory: str, device: torch.device) -> object:
    """Import the factory, call it, and return what it returned."""
    function = imported_function(factory)
    arguments = _arguments(spec, function)

    def failed(error: BaseException) -> CaptureError:
        return CaptureError(f"factory={factory} failed{user_line(error)}: {one_line(error)}")

    with user_errors(failed), device:
        return function(**arguments)


def _parameters(factory: str, function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"factory={factory} has no readable signature; name a Python function that takes "
            "batch_size and dtype"
        ) from error


def _arguments(spec: ModelSpec, function: Callable[..., object]) -> dict[str, object]:
    """Return the keyword arguments for `function`, checked against its signature."""
    parameters = _parameters(spec.factory or "", function)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = [
        name
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    for name in spec.factory_args:
        if name in _SPEC_FIELDS:
            raise SpecError(f"factory_args.{name} is set by model.{name}; use that instead")
    arguments: dict[str, object] = {
        "batch_size": spec.batch_size,
        "dtype": getattr(torch, spec.dtype),
    }
    if spec.seq_len is not None:
        arguments["seq_len"] = spec.seq_len
    elif "seq_len" in parameters and parameters["seq_len"].default is inspect.Parameter.empty:
        raise SpecError(f"factory={spec.factory} needs a sequence length; set model.seq_len")
    arguments.update(spec.factory_args)
    unknown = [] if takes_any else [name for name in arguments if name not in names]
    if unknown:
        what = "model" if unknown[0] in _SPEC_FIELDS else "factory_args"
        near = nearest_names(unknown[0], names) if names else "it has no parameters"
        always = [name for name in ("batch_size", "dtype") if name in unknown]
        change = f"; let it take {' and '.join(always)}" if always else ""
        raise SpecError(
            f"factory={spec.factory} takes no {unknown[0]} ({what}.{unknown[0]}); {near}{change}"
        )
    needed = [n for n in names if parameters[n].default is inspect.Parameter.empty]
    missing = [name for name in needed if name not in arguments]
    if missing:
        raise SpecError(
            f"factory={spec.factory} also needs {', '.join(missing)};"
            f" set model.factory_args.{missing[0]}"
        )
    return arguments


def _checked(factory: str, result: object) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the factory's result after checking that it is a model with its inputs."""
    match result:
        case (nn.Module() as module, tuple() as args):
            return module, args, {}
        case (nn.Module() as module, tuple() as args, Mapping() as kwargs):
            return module, args, dict(kwargs)
        case tuple():
            got = f"({', '.join(type(item).__name__ for item in result)})"
        case _:
            got = type(result).__name__
    raise SpecError(
        f"factory={factory} returned {got}; return (module, args) or (module, args, kwargs),"
        " args a tuple and kwargs a dict of example inputs"
    )


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """Return `module` on `device`, with shared parameters still shared.

    Legacy ``torch.Tensor(n)`` ignores the default device.
    """
    if all(t.device == device for t in chain(module.parameters(), module.buffers())):
        return module
    names_of: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    module = module.to(device)
    for first, *others in names_of.values():
        for other in others:
            owner, _, attribute = other.rpartition(".")
            setattr(module.get_submodule(owner), attribute, module.get_parameter(first))
    return module

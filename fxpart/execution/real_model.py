"""`RealModel`: an exported model with random weights and inputs on a device, and its graph."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from fxpart.capture.calls import storage_key
from fxpart.capture.inference.export import capture_failure, export_program
from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.models.build import build_model
from fxpart.capture.models.inputs import drawn_inputs
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.graph import OpGraph
from fxpart.errors import SpecError, show_unequal_bytes
from fxpart.execution.device import checked_device, free_bytes, seeded
from fxpart.execution.stages.chain import Chain

__all__ = ["RealModel", "drawn_microbatches", "real_model", "real_module"]


@dataclass(frozen=True, eq=False, slots=True)
class RealModel:
    """A runnable model with real weights and inputs.

    Its export may differ by a few operators from one on the meta device, so a plan to be executed
    must be made for `graph`.
    """

    module: nn.Module
    """The model itself, in eval mode."""
    args: tuple[Any, ...]
    """Positional inputs."""
    kwargs: dict[str, Any]
    """Named inputs."""
    program: ExportedProgram
    """The exported model; its ``module()`` has the parameters of `module` and can be trained."""
    graph: OpGraph
    """The operators of `program`."""

    @property
    def device(self) -> torch.device:
        """The device of the weights or, without any, of the inputs; else the CPU."""
        inputs = pytree.tree_leaves((self.args, self.kwargs))
        tensors = [*self.module.parameters(), *self.module.buffers()]
        tensors += [leaf for leaf in inputs if isinstance(leaf, Tensor)]
        return tensors[0].device if tensors else torch.device("cpu")


def real_model(spec: ModelSpec, *, seed: int = 0, device: str | torch.device = "cpu") -> RealModel:
    """Return the model named by `spec` with random weights and inputs, and its graph.

    Weights and inputs depend on `seed` alone, and the state of torch's generators is restored. A
    factory's inputs are used as returned. Nothing is downloaded.

    Args:
        spec: the model to build.
        seed: random seed of weights and inputs.
        device: device on which the model is built and run: ``cpu``, ``cuda`` or ``cuda:1``.

    Raises:
        SpecError: if the model, device or shape does not exist, or if the weights exceed the free
            memory of the device (checked before they are allocated).
        CaptureError: if the model cannot be built or exported.

    """
    target = checked_device(device)
    _check_memory(spec, target)
    with seeded(seed, target):
        built = build_model(spec, target)
    return real_module(built.module, built.args, built.kwargs)


def real_module(
    module: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> RealModel:
    """Wrap the caller's own module and inputs, for `run_local` and `run_pipeline`.

    Raises:
        CaptureError: if the module cannot be exported.

    """
    inputs = dict(kwargs or {})
    program = export_program(module, args, inputs)
    try:
        graph = op_graph(program)
    except GuardOnDataDependentSymNode as error:
        # A data-dependent size is a symbol without a value.
        raise capture_failure(module, error) from error
    return RealModel(module, args, inputs, program, graph)


def _check_memory(spec: ModelSpec, device: torch.device) -> None:
    """Refuse weights that do not fit, sized on the meta device; tied weights count once."""
    module = build_model(spec).module
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    needed_bytes = sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())
    available_bytes = free_bytes(device)
    if needed_bytes > available_bytes:
        takes, has = show_unequal_bytes(needed_bytes, available_bytes)
        change = "model.config" if spec.factory is None else "model.factory_args"
        raise SpecError(
            f"running model {spec.name} takes {takes} for weights, and {device} has {has} left;"
            f" make the model smaller ({change}), or plan without running it (execute=none)"
        )


def drawn_microbatches(
    spec: ModelSpec, real: RealModel, chain: Chain, count: int, seed: int = 0
) -> list[tuple[torch.Tensor, ...]]:
    """Return the inputs of stage 0 of `chain` for `count` microbatches of equal shapes.

    The first has the inputs of `real`, which was built from `spec`; the others are drawn, each from
    its own seed. A factory's inputs are reused every time, since only the factory knows which
    values are valid.
    """
    calls = [real.kwargs]
    for index in range(1, count):
        if spec.architecture is None:
            calls.append(real.kwargs)
            continue
        with seeded(seed + index, real.device):
            calls.append(drawn_inputs(real.module, real.kwargs, real.device))
    return [chain.flat_inputs(real.args, kwargs) for kwargs in calls]

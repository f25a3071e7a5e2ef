"""`RealModel`: a model with random weights really on a device, exported there, and its graph."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxpart.capture.calls import storage_key
from fxpart.capture.inference.export import capture_failure, export_program
from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.models.build import build_model
from fxpart.capture.models.inputs import drawn_inputs
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.graph import OpGraph
from fxpart.errors import SpecError, show_bytes
from fxpart.execution.device import checked_device, free_bytes, seeded
from fxpart.execution.stages.chain import Chain

__all__ = ["RealModel", "drawn_microbatches", "real_model"]


@dataclass(frozen=True, eq=False, slots=True)
class RealModel:
    """A model that can be run: weights and inputs are there, not only their shapes.

    An export of real weights may have a few other operators than one of the meta device: plan for
    `graph` what is to be run.
    """

    module: nn.Module
    """The model itself, in eval mode."""
    args: tuple[Any, ...]
    """Positional inputs."""
    kwargs: dict[str, Any]
    """Named inputs."""
    program: ExportedProgram
    """The model exported; the parameters of its ``module()`` are those of `module`, and can be
    trained."""
    graph: OpGraph
    """The operators of `program`."""

    @property
    def device(self) -> torch.device:
        """Where the weights lie; the CPU for a model without any."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return tensors[0].device if tensors else torch.device("cpu")


def real_model(spec: ModelSpec, *, seed: int = 0, device: str | torch.device = "cpu") -> RealModel:
    """Return the model that `spec` names with random weights and inputs, and its graph.

    Weights and inputs depend on `seed` alone, and torch's generators are left as they were. A
    factory's inputs are as it returns them. Nothing is downloaded.

    Args:
        spec: what is built.
        seed: of weights and inputs.
        device: where they lie and the model is run: ``cpu``, ``cuda`` or ``cuda:1``.

    Raises:
        SpecError: for a model, a device or a shape that does not exist, and for weights that need
            more memory than the device has left; that is found out before they are made.
        CaptureError: for a model that cannot be built or exported.

    """
    place = checked_device(device)
    _check_memory(spec, place)
    with seeded(seed, place):
        built = build_model(spec, place)
    program = export_program(built.module, built.args, built.kwargs)
    try:
        graph = op_graph(program)
    except GuardOnDataDependentSymNode as error:
        # A size that depends on values is a symbol, and no number can be had of it.
        raise capture_failure(built.module, error) from error
    return RealModel(built.module, built.args, built.kwargs, program, graph)


def _check_memory(spec: ModelSpec, device: torch.device) -> None:
    """Refuse weights that do not fit, by their sizes on the meta device."""
    needed, free = _weight_bytes(build_model(spec).module), free_bytes(device)
    if needed > free:
        change = "model.config" if spec.factory is None else "model.factory_args"
        raise SpecError(
            f"running model {spec.name} takes {show_bytes(needed)} for weights, and"
            f" {device} has {show_bytes(free)} left; make the model smaller ({change}), or"
            " plan without running it (execute=none)"
        )


def _weight_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, tied ones once."""
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    sizes = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())


# The inputs of one step of a pipeline: as many microbatches as it takes, of equal shapes.


def drawn_microbatches(
    spec: ModelSpec, real: RealModel, chain: Chain, count: int, seed: int = 0
) -> list[tuple[torch.Tensor, ...]]:
    """Return what stage 0 of `chain` takes for `count` microbatches of `real`, made from `spec`.

    The first holds the inputs of `real`, the others are drawn anew, each from a seed of its own.
    What a factory returned as inputs is given again each time: only it knows what is valid.
    """
    calls = [real.kwargs]
    for index in range(1, count):
        if spec.architecture is None:
            calls.append(real.kwargs)
            continue
        with seeded(seed + index, real.device):
            calls.append(drawn_inputs(real.module, real.kwargs, real.device))
    return [chain.flat_inputs(real.args, kwargs) for kwargs in calls]

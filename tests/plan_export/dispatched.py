"""Accelerate's own dispatch on several pretended devices; prints the result as JSON.

`FakeTensorMode` runs a model without data, tracks devices, and refuses what a device would refuse.
The devices have a kind registered here for the whole process: hence a separate process.
``python -m tests.plan_export.dispatched 8`` runs 8 random plans of each model.
"""

import json
import sys
import warnings
from collections.abc import Callable

import torch
from accelerate import dispatch_model
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from fxpart.capture.models.build import build_model
from fxpart.plan_export import DeviceMap, device_map
from tests.plan_export.scene import SPECS, random_plan, scene

KIND = "pretended"


def _on_cpu(tensor: object) -> object:
    if not isinstance(tensor, Tensor):
        return tensor
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


def _fill(module: nn.Module) -> None:
    """Give every weight a fake tensor, as a buffer, since a parameter cannot be moved as a fake."""
    for part in module.modules():
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None:
                part._parameters.pop(name, None)
                part._buffers[name] = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


def _note(
    path: str, devices_of: dict[str, list[int]]
) -> Callable[[nn.Module, object, object], None]:
    def hook(module: nn.Module, args: object, result: object) -> None:
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if tensors:
            devices_of.setdefault(path, []).append(tensors[0].device.index)

    return hook


def dispatched(name: str, mapped: DeviceMap) -> dict[str, object]:
    """Return whether the model ran, and the device of the result of each module call."""
    built = build_model(SPECS[name])
    devices_of: dict[str, list[int]] = {}
    with torch.no_grad(), FakeTensorMode():
        _fill(built.module)
        entries = {path: f"{KIND}:{device}" for path, device in mapped.entries.items()}
        main = f"{KIND}:{mapped.main_device}"
        model = dispatch_model(built.module, entries, main_device=main, force_hooks=True)
        for path, module in model.named_modules():
            if path:
                module.register_forward_hook(_note(path, devices_of))
        try:
            model(*tree_map(_on_cpu, built.args), **tree_map(_on_cpu, built.kwargs))
        except RuntimeError as error:
            if "same device" not in str(error):
                raise
            return {"ran": False, "seen": devices_of}
    return {"ran": True, "seen": devices_of}


def main(plans: int) -> None:
    """Print a line of JSON for each model and random plan."""
    _setup_privateuseone_for_python_backend(KIND)
    warnings.simplefilter("ignore")
    for name in SPECS:
        built, graph = scene(name)
        for seed in range(plans):
            mapped = device_map(graph, random_plan(graph, seed), list(built.module.state_dict()))
            line = {"name": name, "seed": seed, **dispatched(name, mapped)}
            sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))

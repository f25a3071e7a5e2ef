"""The bytes that torch's CUDA allocator gives out for a model of ``benchmarks.memory``."""

import gc
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.optimizer import Optimizer
from fxpart.execution.device import seeded
from fxpart.execution.real_step import real_optimizer, training_step

__all__ = ["Allocated", "allocated", "recorded"]

_HOPPER = (9, 0)
_THREAD_BYTES, _OLDER_THREAD_BYTES = 32 * 2**20, 2 * 4 * 2**20 + 8 * 16 * 2**10
"""The workspace that torch gives cuBLAS in each thread, from Hopper on and before (PyTorch,
reproducibility: CUBLAS_WORKSPACE_CONFIG)."""
_RECORDED = Path(__file__).with_name("gpu") / "h100.json"


@dataclass(frozen=True, slots=True)
class Allocated:
    """``torch.cuda.max_memory_allocated``, less what was allocated before the model was created.

    The allocator rounds each tensor up to 512 bytes. Memory reserved beyond that and the context of
    the device are not included; library workspaces, such as those of cuBLAS, are.
    """

    forward_bytes: int
    step_bytes: int
    kept_bytes: int
    """Library workspaces: still allocated after model, inputs and gradients are freed. Included in
    the step, and in the forward but for `thread_bytes`."""
    thread_bytes: int = _THREAD_BYTES
    """Those of the thread that runs the backward."""

    @property
    def tensors_of_forward_bytes(self) -> int:
        """The forward without library workspaces."""
        return self.forward_bytes - max(0, self.kept_bytes - self.thread_bytes)

    @property
    def tensors_of_step_bytes(self) -> int:
        """The step without library workspaces."""
        return self.step_bytes - self.kept_bytes


def recorded(name: str) -> Allocated | None:
    """Return what an H100 allocated for a model and AdamW, or None if it was not measured.

    It was measured by ``python -m benchmarks.gpu.measure --memory``.
    """
    measured = json.loads(_RECORDED.read_text(encoding="utf-8"))["memory"].get(name)
    return None if measured is None else Allocated(**measured)


def allocated(spec: ModelSpec, optimizer: Optimizer, device: torch.device) -> Allocated:
    """Return the peaks of a forward in eval mode and of a training step in train mode.

    Each follows a warm-up run in which libraries allocate their workspaces and the optimizer
    creates its state. Torch selects the kernels of attention and dropout.
    """
    _release(device)
    before = torch.cuda.memory_allocated(device)
    forward, step = _peaks(spec, optimizer, device)
    _release(device)
    kept = torch.cuda.memory_allocated(device) - before
    is_hopper = torch.cuda.get_device_capability(device) >= _HOPPER
    thread_bytes = _THREAD_BYTES if is_hopper else _OLDER_THREAD_BYTES
    return Allocated(forward - before, step - before, kept, thread_bytes)


def _peaks(spec: ModelSpec, optimizer: Optimizer, device: torch.device) -> tuple[int, int]:
    with seeded(0, device):
        built = build_model(spec, device)
        # A factory may return its inputs on another device.
        module = built.module.to(device)
        args, kwargs = _move((built.args, built.kwargs), device)
        forward = _peak_bytes(lambda: _forward(module, args, kwargs), module, device)
        module.train()
        updates = real_optimizer(optimizer.name, module.parameters(), optimizer.implementation)
        step = _peak_bytes(
            lambda: training_step(module, args, kwargs, updates),
            module,
            device,
        )
    return forward, step


def _forward(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    with torch.no_grad():
        module(*args, **kwargs)


def _peak_bytes(work: Callable[[], None], module: nn.Module, device: torch.device) -> int:
    """Return the peak bytes allocated in the second of two runs of `work`."""
    work()
    module.zero_grad(set_to_none=True)
    _release(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device))


def _release(device: torch.device) -> None:
    """Wait for the device, and free everything that is no longer referenced."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()


def _move(value: Any, device: torch.device) -> Any:  # noqa: ANN401 - inputs are anything
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)

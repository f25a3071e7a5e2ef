"""Run a training step with FSDP2: `fully_shard` on every block and on the whole model."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

from benchmarks.sharding.observer import Observer, local_parts
from benchmarks.sharding.tensor_run import CPU, Counted
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.module_paths import block_of
from fxpart.execution.device import seeded

__all__ = ["resizing", "zero_run"]


def zero_run(
    rank: int, size: int, spec: ModelSpec, stage: int, updates: tuple[str, str | None]
) -> Counted:
    """Return the counts of this process for a step with ZeRO `stage`, 2 or 3, over the group.

    `updates` are the optimizer and the dtype in which gradients are summed, None for their own.
    """
    optimizer_name, reduce_dtype = updates
    with seeded(0, CPU):
        built = build_model(spec, CPU)
    module, mesh = built.module, init_device_mesh("cpu", (size,))
    blocks = list(dict.fromkeys(block_of(name) for name, _ in module.named_parameters()))
    reduced = MixedPrecisionPolicy(reduce_dtype=getattr(torch, reduce_dtype or "", None))
    sharded = partial(fully_shard, mesh=mesh, mp_policy=reduced)
    for name in blocks:
        if name:
            sharded(module.get_submodule(name), reshard_after_forward=stage == 3)
    sharded(module, reshard_after_forward=False)
    optimizer = None
    if optimizer_name != "none":
        optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    inputs = {**built.kwargs, "labels": built.kwargs["input_ids"]}
    loss = _step(module, inputs, optimizer)
    module.zero_grad(set_to_none=True)
    gc.collect()
    state = [] if optimizer is None else list(optimizer.state.values())
    observer = Observer([list(module.parameters()), list(module.buffers()), inputs, state])
    with observer, resizing(observer):
        _step(module, inputs, optimizer)
    weights = sum(t.nbytes for t in local_parts(list(module.parameters())))
    counted = tuple(observer.collectives)
    return Counted(weights, 0, observer.peak_bytes[0], (), counted, None, loss)


def _step(
    module: nn.Module, inputs: dict[str, torch.Tensor], updates: torch.optim.Optimizer | None
) -> float:
    loss = module(**inputs)[0]
    loss.backward()
    if updates is not None:
        updates.step()
    return float(loss.detach())


@contextmanager
def resizing(observer: Observer) -> Iterator[None]:
    """Notify `observer` of storages that FSDP frees and allocates by resizing."""
    modules: tuple[Any, ...] = (_fsdp_param, _fsdp_param_group)
    names = "alloc_storage", "free_storage"
    originals = {name: getattr(_fsdp_param, name) for name in names}

    def watched(name: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        before = storage.nbytes()
        originals[name](tensor)
        observer.resized(storage, before)

    targets = [(module, name) for module in modules for name in names if hasattr(module, name)]
    for module, name in targets:
        setattr(module, name, partial(watched, name))
    try:
        yield
    finally:
        for module, name in targets:
            setattr(module, name, originals[name])

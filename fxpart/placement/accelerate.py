"""`accelerate`: the placement by Hugging Face accelerate's `infer_auto_device_map`.

This is a baseline for comparison: accelerate's own function is called on the captured module. It
fills devices in order by the bytes of parameters and buffers only, and keeps room for the largest
layer on the first.
"""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.module_paths import covering, owner
from fxpart.core.partitions import partition_by_device
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError, SpecError, nearest_names, show_bytes
from fxpart.placement.aot_based import refuse_overfull
from fxpart.plan_export.accelerate_hooks import hooked_run

__all__ = ["AccelerateOptions", "accelerate", "inferred_device_map"]


@dataclass(frozen=True)
class AccelerateOptions:
    """Options of accelerate's function."""

    model: Callable[[], Any] | None = None
    """Returns the captured `torch.nn.Module`, possibly on the meta device. Filled in by the
    runner."""
    no_split: Sequence[str] | None = None
    """Classes of modules to keep whole. None for those named by the model, as in
    `_no_split_modules` of transformers."""
    balanced: bool = False
    """Whether to balance weights over devices (`get_balanced_memory`), as with
    ``device_map="auto"``, rather than to fill them in order."""

    def __post_init__(self) -> None:
        """Check the options and the installation before a model is captured."""
        if find_spec("accelerate") is None:
            raise SpecError("mode=accelerate needs accelerate; pip install 'fxpart[accelerate]'")
        if self.model is not None and not callable(self.model):
            raise SpecError(f"mode.model is filled in by the run, got {self.model!r}; leave it out")
        names = self.no_split
        if names is not None and (
            isinstance(names, str) or not all(isinstance(name, str) for name in names)
        ):
            raise SpecError(f"mode.no_split must be a list of classes, or null, got {names!r}")


def accelerate(problem: Problem, options: AccelerateOptions | None = None) -> Assignment:
    """Place each operator where accelerate would run it.

    Accelerate's choice is not repaired: if activations do not fit besides the weights, or modules
    would be offloaded to the CPU or a disk, it is refused.

    Raises:
        SpecError: if there is no module.
        InfeasibleError: if accelerate's choice does not fit.

    """
    model = options.model if options else None
    if options is None or model is None:
        raise SpecError("mode=accelerate needs mode.model, a function that returns the module")
    module, graph = model(), problem.graph
    entries = inferred_device_map(module, problem.topology.memory_bytes.tolist(), options)
    tensors = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    tensors += [name for name, _ in module.named_buffers(remove_duplicate=False)]
    main = next(iter(entries.values()))
    homes = {owner(name): entries.get(covering(name, entries) or "", main) for name in tensors}
    homes.update((owner(name), main) for name in graph.weight_names if owner(name) not in homes)
    device_of = hooked_run(graph, entries, homes, main).device_of
    placed = partition_by_device(graph, np.asarray(device_of[graph.group], dtype=np.int64))
    refuse_overfull(problem, placed, "accelerate")
    return placed


def inferred_device_map(
    module: Any,  # noqa: ANN401 - this room knows no torch
    memory_bytes: Sequence[int],
    options: AccelerateOptions,
) -> Mapping[str, int]:
    """Return accelerate's own device map of a `torch.nn.Module` on devices of the given sizes.

    Raises:
        SpecError: if the module has no instance of a class in `no_split`.
        InfeasibleError: if accelerate offloads modules to the CPU or a disk.

    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    kept_whole = options.no_split
    if kept_whole is None:
        named = [getattr(part, "_no_split_modules", None) or () for part in module.modules()]
        kept_whole = sorted({name for names in named for name in names})
    else:
        classes = {type(part).__name__ for part in module.modules()}
        for name in kept_whole:
            if name not in classes:
                raise SpecError(
                    f"mode.no_split: the model has no module of class {name};"
                    f" {nearest_names(name, classes)}"
                )
    memory_limits: dict[int | str, int | str] = dict(enumerate(memory_bytes))
    log = logging.getLogger("accelerate.utils.modeling")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns about devices that this machine does not have
    try:
        # It only warns about modules that do not fit, which are refused below.
        with warnings.catch_warnings(action="ignore"):
            if options.balanced:
                memory_limits = get_balanced_memory(module, memory_limits, list(kept_whole))
            entries = infer_auto_device_map(module, memory_limits, list(kept_whole))
    finally:
        log.setLevel(level)
    offloaded = [path for path, device in entries.items() if not isinstance(device, int)]
    if offloaded:
        raise InfeasibleError(
            f"accelerate leaves {offloaded[0] or 'the model'}"
            + (f" and {len(offloaded) - 1} other modules" if len(offloaded) > 1 else "")
            + f" to the CPU or a disk: devices hold {show_bytes(sum(memory_bytes))}, of which it"
            " keeps room for the largest layer on the first; take larger devices, or"
            " mode=size_based"
        )
    return dict(entries)

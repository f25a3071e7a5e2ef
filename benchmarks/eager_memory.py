"""``python -m benchmarks.eager_memory``: eager memory of 20 architectures not used in development.

They appear in no test and in no other benchmark. The prediction comes from a capture on the meta
device (``runtime=eager``) without creating weights. The measurement counts the live tensor bytes in
a run of the module itself with random weights on the CPU, by a dispatch mode over storages that is
independent of the prediction: a forward pass in eval mode, and the second training step in train
mode with labels and AdamW. The forward pass is also compared with its modules placed on 2 and 3
devices, where a storage counts on the device of the module that creates it, and on every other
device that reads it until the last call that reads it there returns: a call holds its arguments.
What a module keeps from its first call, such as a cache of position biases, counts too.

``--only NAME`` selects one architecture.
"""

import argparse
import gc
import re
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.text_table import table
from fxpart.capture.api import capture_graph
from fxpart.capture.models.build import BuiltModel, build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.training.joint import joint_capture
from fxpart.core.graph import IntArray, OpGraph, without_python
from fxpart.core.optimizer import Optimizer, with_optimizer
from fxpart.core.phases import StepOptions
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables
from fxpart.execution.device import seeded
from fxpart.execution.real_step import forward_peak_bytes, real_optimizer, step_peak_bytes

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = [
    "CPU_STEP",
    "UNSEEN",
    "counted_by_device",
    "error_percent",
    "main",
    "peak_on_one",
    "placed",
]

_CPU = torch.device("cpu")
CPU_STEP = StepOptions(fused_attention=False, fused_dropout=False)
"""A training step with the kernels of the CPU."""


def _spec(name: str, batch_size: int = 2, seq_len: int | None = 64, **config: object) -> ModelSpec:
    return ModelSpec(name, name, config, batch_size=batch_size, seq_len=seq_len, loss="own")


_LAYERS: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
_TEXT: dict[str, Any] = {**_LAYERS, "vocab_size": 500}
_IMAGE: dict[str, Any] = {"image_size": 64, "num_labels": 10}

UNSEEN = (
    _spec("MobileNetV2ForImageClassification", 4, None, **_IMAGE),
    _spec(
        "SwinForImageClassification",
        4,
        None,
        **_IMAGE,
        embed_dim=24,
        depths=[1, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    _spec(
        "Mamba2ForCausalLM",
        vocab_size=500,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=1,
        chunk_size=16,
    ),
    _spec("DebertaV2ForTokenClassification", **_TEXT),
    _spec("AlbertForMaskedLM", **_TEXT, embedding_size=32),
    _spec("ElectraForQuestionAnswering", **_TEXT, embedding_size=32),
    _spec(
        "ConvNextV2ForImageClassification",
        4,
        None,
        **_IMAGE,
        num_stages=2,
        hidden_sizes=[16, 32],
        depths=[1, 2],
    ),
    _spec("GPTNeoXForCausalLM", **_TEXT),
    _spec(
        "FalconForCausalLM",
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=500,
    ),
    _spec("PhiForCausalLM", **_TEXT),
    _spec("Qwen2ForCausalLM", **_TEXT, num_key_value_heads=2),
    _spec("GemmaForCausalLM", **_TEXT, num_key_value_heads=2, head_dim=16),
    _spec("MPNetForSequenceClassification", **_TEXT),
    _spec(
        "PegasusForConditionalGeneration",
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        vocab_size=500,
    ),
    _spec("BeitForImageClassification", 4, None, **_LAYERS, **_IMAGE),
    _spec("LevitForImageClassification", 4, None, **_IMAGE, hidden_sizes=[32, 64, 96]),
    _spec(
        "RegNetForImageClassification", 4, None, num_labels=10, hidden_sizes=[16, 32], depths=[1, 2]
    ),
    _spec("MobileViTForSemanticSegmentation", 2, None, **_IMAGE),
    _spec(
        "HubertForSequenceClassification",
        2,
        8000,
        **_LAYERS,
        num_labels=4,
        conv_dim=[16, 16],
        conv_stride=[10, 8],
        conv_kernel=[10, 8],
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        layerdrop=0.0,
        apply_spec_augment=False,
    ),
    _spec(
        "Dinov2ForImageClassification",
        4,
        None,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        **_IMAGE,
    ),
)


# Modules placed on devices, predicted and measured.


def placed(module: nn.Module, devices: int) -> dict[str, int]:
    """Return the device of each outermost numbered module by path, in equal consecutive groups.

    All other modules are on device 0.
    """
    paths = [path for path, part in module.named_modules() if re.search(r"\.\d+$", path) and part]
    depth = min(path.count(".") for path in paths)
    blocks = [path for path in paths if path.count(".") == depth]
    return {path: index * devices // len(blocks) for index, path in enumerate(blocks)}


def _device_of(path: str, place: Mapping[str, int]) -> int:
    parts = path.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((place[prefix] for prefix in prefixes if prefix in place), 0)


@dataclass(eq=False)
class _Storage:
    """A storage created in a run."""

    size: int
    device: int
    born: int
    died: int | None = None
    read_until: dict[int, tuple[int, int]] = field(default_factory=dict)
    """For each other device, the bytes sent there and the time of the last read."""


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record when each storage is created, freed and read, and by which device's modules."""

    def __init__(self, resident: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.here = -1, 0
        self._resident = list(resident)  # kept alive: a call may replace some
        self.storages: list[_Storage] = []
        self._known: dict[int, _Storage | None] = {
            t.untyped_storage()._cdata: None for t in resident
        }
        self._references: list[weakref.ref[Any]] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - as torch calls it
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        self.now += 1
        self.read((args, kwargs))
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._make(leaf)
        return result

    def read(self, operands: object) -> None:
        """Record a read of all tensors in `operands`, on the present device and at this time."""
        for leaf in tree_leaves(operands):
            if isinstance(leaf, Tensor):
                self._read(leaf)

    def _read(self, tensor: Tensor) -> None:
        storage = self._known.get(tensor.untyped_storage()._cdata)
        if storage is not None and storage.device != self.here:
            size = tensor.numel() * tensor.element_size()
            before = storage.read_until.get(self.here, (0, 0))[0]
            storage.read_until[self.here] = max(before, size), self.now

    def _make(self, tensor: Tensor) -> None:
        untyped = tensor.untyped_storage()
        key = untyped._cdata
        if key in self._known:
            return
        storage = _Storage(untyped.nbytes(), self.here, self.now)
        self._known[key] = storage
        self.storages.append(storage)

        def freed(_: object) -> None:
            storage.died = self.now
            self._known.pop(key, None)

        self._references.append(weakref.ref(untyped, freed))

    def peaks(self, devices: int) -> list[int]:
        """Return the peak bytes on each device over all calls."""
        change = np.zeros((devices, self.now + 2), dtype=np.int64)
        for storage in self.storages:
            died = self.now if storage.died is None else storage.died
            change[storage.device, storage.born] += storage.size
            change[storage.device, died + 1] -= storage.size
            for device, (size, last) in storage.read_until.items():
                change[device, storage.born] += size
                change[device, last + 1] -= size
        return [int(row.max()) for row in np.cumsum(change, axis=1)]


class _Arguments(TorchFunctionMode):
    """Record that a call holds its arguments until it returns, after the last kernel in it."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 - as torch calls it
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        begun = self._counter.now
        result = func(*args, **(kwargs or {}))
        if self._counter.now > begun:  # it ran a kernel, and was no look at a shape
            self._counter.read((args, kwargs))
        return result


def counted_by_device(built: BuiltModel, place: Mapping[str, int], devices: int) -> list[int]:
    """Return the measured peak bytes of each device in two forwards, less weights and inputs."""
    module = built.module
    inputs = [x for x in tree_leaves((built.args, built.kwargs)) if isinstance(x, Tensor)]
    counter = _Counter([*module.parameters(), *module.buffers(), *inputs])
    path_of = {part: path for path, part in module.named_modules()}
    outer: list[int] = []

    def enter(part: nn.Module, *_: object) -> None:
        outer.append(counter.here)
        counter.here = _device_of(path_of[part], place)

    def leave(*_: object) -> None:
        counter.here = outer.pop()

    handles: list[RemovableHandle] = []
    for part in path_of:
        handles += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]
    with torch.no_grad(), counter, _Arguments(counter):
        # The first call fills the caches of the module, which the second has from its start.
        module(*built.args, **built.kwargs)
        gc.collect()
        module(*built.args, **built.kwargs)
    for handle in handles:
        handle.remove()
    return counter.peaks(devices)


def predicted_by_device(graph: OpGraph, place: Mapping[str, int], devices: int) -> list[int]:
    """Return the peak bytes that fxpart predicts for the same."""
    device_of = np.array([_device_of(path, place) for path in graph.modules], dtype=np.int64)
    memory = memory_tables(graph)
    memory = memory._replace(
        weight_bytes=np.zeros_like(memory.weight_bytes),
        alloc_bytes=np.where(memory.producer < 0, 0, memory.alloc_bytes),
    )
    return [int(peak) for peak in peak_bytes(memory, device_of, devices)]


# The table.

_HEADS = (
    "architecture",
    "forward kB",
    "counted",
    "error %",
    "as a graph %",
    "step kB",
    "counted",
    "error %",
    "2 devices %",
    "3 devices %",
)


def peak_on_one(graph: OpGraph) -> int:
    """Return the predicted peak bytes with all operators on one device."""
    on_one: IntArray = np.zeros(graph.n_ops, dtype=np.int64)
    return int(peak_bytes(memory_tables(graph), on_one, 1)[0])


def error_percent(predicted: int, counted: int) -> float:
    """Return by how many percent of `counted` the prediction is too high."""
    return 100.0 * (predicted / counted - 1.0)


def _worst_device_error(graph: OpGraph, real: BuiltModel, devices: int) -> float:
    """Return the largest relative error of any device in percent."""
    place = placed(real.module, devices)
    pairs = zip(
        predicted_by_device(graph, place, devices),
        counted_by_device(real, place, devices),
        strict=True,
    )
    return max(
        (error_percent(predicted, counted) for predicted, counted in pairs if counted), key=abs
    )


def _row(spec: ModelSpec) -> tuple[str, ...]:
    without_labels = replace(spec, loss=None)
    planned, trained = build_model(without_labels), build_model(spec)
    graph = capture_graph(planned.module, planned.args, planned.kwargs)
    step = joint_capture(trained.module.train(), trained.args, trained.kwargs, CPU_STEP).graph
    with seeded(0, _CPU):
        # A module that was called has its caches, so each measurement has its own.
        real = build_model(without_labels, _CPU)
        forward = forward_peak_bytes(real.module, real.args, real.kwargs)
        split_errors = [
            _worst_device_error(graph, build_model(without_labels, _CPU), devices)
            for devices in (2, 3)
        ]
        real = build_model(spec, _CPU)
        updates = real_optimizer("adamw", real.module.parameters())
        counted = step_peak_bytes(real.module.train(), real.args, real.kwargs, updates).peak_bytes
    predicted, predicted_step = (
        peak_on_one(graph),
        peak_on_one(with_optimizer(step, Optimizer("adamw"))),
    )
    errors = [
        error_percent(predicted, forward),
        error_percent(peak_on_one(without_python(graph)), forward),
    ]
    return (
        spec.name,
        f"{predicted / 1e3:.0f}",
        f"{forward / 1e3:.0f}",
        *(f"{error:+.2f}" for error in errors),
        f"{predicted_step / 1e3:.0f}",
        f"{counted / 1e3:.0f}",
        f"{error_percent(predicted_step, counted):+.2f}",
        *(f"{error:+.2f}" for error in split_errors),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=[spec.name for spec in UNSEEN])
    chosen = parser.parse_args(arguments).only
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [_row(spec) for spec in UNSEEN if chosen in (None, spec.name)]
    print(table(_HEADS, rows))


if __name__ == "__main__":
    main()

"""`shortened`: shorten a model to a few blocks whose graph determines that of the whole model.

A capture takes time for every block, although the blocks of a transformer are alike. To check that,
the whole model is run on the meta device, which takes a tenth of the time of a capture, and every
operator of a block is recorded with its operands and their origins. If the blocks are periodic, a
few periods are captured, and `fxpart.capture.repeated` repeats them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fxpart.capture.inference.export import quiet, unmasked_attention
from fxpart.capture.models.architecture import model_class, model_config
from fxpart.capture.models.build import BuiltModel, build_model
from fxpart.capture.models.cached_step import experts_for_shapes
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.repeated import Repetition
from fxpart.errors import FxpartError
from fxpart.sharding.tensor_plan import text_config

__all__ = ["ShortModel", "shortened"]

_COUNT = "num_hidden_layers"
_PERIODS = 4
"""Captured periods: one to compare with the next, and one on each side of these."""
_LONGEST_PERIOD = 8
_WORTHWHILE = 0.6
"""Largest share of the blocks to capture."""
_OUTSIDE = -1
"""Block number of operators and tensors outside all blocks."""


@dataclass(frozen=True, slots=True)
class ShortModel:
    """A model with few blocks."""

    spec: ModelSpec
    repetition: Repetition
    """Blocks to repeat to obtain the whole model."""


def shortened(spec: ModelSpec, train_mode: bool | None = None) -> ShortModel | None:
    """Return the model of `spec` with the fewest blocks that represent all of them.

    `train_mode` is that of a training step, None for inference. None if there is no such model, or
    it is not much smaller.
    """
    if spec.architecture is None:
        return None
    # Most models that have too few blocks, or others, are not even built for this.
    config = model_config(model_class(spec.architecture), spec.config)
    key = config.attribute_map.get(_COUNT, _COUNT)
    count = getattr(config, key, None)
    if not isinstance(count, int) or _WORTHWHILE * count < _PERIODS + 1:
        return None
    whole = build_model(spec)
    path = _only_list(whole.module)
    has_parts = text_config(config) is not config
    if path is None or has_parts or len(_blocks(whole.module, path)) != count:
        return None
    run = _run(whole, path, train_mode)
    repetition = _repetition(path, run.blocks) if run else None
    if run is None or repetition is None:
        return None
    n_kept = count - repetition.copies * repetition.period
    settings = {
        name: value[:n_kept] if isinstance(value, list | tuple) and len(value) == count else value
        for name, value in spec.config.items()
        if name != _COUNT
    }
    short = replace(spec, config={**settings, key: n_kept})
    try:
        few = build_model(short)
    except FxpartError:  # some configurations state the number of blocks in more than one way
        return None
    expected = _Run(run.outside, run.blocks[:n_kept])
    return ShortModel(short, repetition) if _run(few, path, train_mode) == expected else None


def _only_list(module: nn.Module) -> str | None:
    """Return the path of the only outermost list of modules, or None if there are none or more."""
    paths: list[str] = []
    for path, inner in module.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in paths)
        if isinstance(inner, nn.ModuleList) and len(inner) > 1 and not is_inside:
            paths.append(path)
    return paths[0] if len(paths) == 1 else None


def _blocks(module: nn.Module, path: str) -> list[nn.Module]:
    return list(module.get_submodule(path).children())


def _repetition(path: str, blocks: Sequence[object]) -> Repetition | None:
    """Return the shortest repetition of blocks up to the last one."""
    count = len(blocks)
    for period in range(1, _LONGEST_PERIOD + 1):
        alike = [blocks[n] == blocks[n + period] for n in range(count - period)]
        if not alike or not alike[-1]:
            continue
        # The first of its kind may create tensors that the others share.
        first = max((n + 1 for n, is_alike in enumerate(alike) if not is_alike), default=0) + 1
        first += (count - first) % period
        copies = (count - first) // period - _PERIODS
        if copies > 0 and count - copies * period <= _WORTHWHILE * count:
            return Repetition(path, first, period, copies)
    return None


# Recording of a run.


@dataclass(frozen=True, slots=True)
class _Run:
    """The operators of a run, as values that are equal for models that do the same."""

    outside: tuple[object, ...]
    """Calls outside of all blocks."""
    blocks: tuple[object, ...]
    """Settings and calls of each block; other blocks are named by their distance."""


def _run(built: BuiltModel, path: str, train_mode: bool | None) -> _Run | None:
    """Return the recorded run of a model on meta, or None if it cannot run there.

    `train_mode` is that of a training step, None for inference.
    """
    if train_mode is not None:
        built.module.train(train_mode)
    blocks = _blocks(built.module, path)
    recorder = _Recorder(len(blocks))
    # With fake tensors, models take the same code paths as in a capture.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    named = [*built.module.named_parameters(), *built.module.named_buffers()]
    weights: dict[str, Tensor] = {name: fake.from_tensor(tensor) for name, tensor in named}
    args, kwargs = tree_map_only(Tensor, fake.from_tensor, (built.args, built.kwargs))
    for name, tensor in weights.items():
        inside = name.removeprefix(f"{path}.") if name.startswith(f"{path}.") else ""
        number, _, rest = inside.partition(".")
        recorder.add(tensor, int(number) if number.isdigit() else _OUTSIDE, rest or name)
    experts = experts_for_shapes(built.module)
    try:
        with (
            quiet(),
            unmasked_attention(built.module.forward, args, kwargs),
            torch.set_grad_enabled(train_mode is not None),
            fake,
            recorder,
            recorder.following(blocks),
            experts,
        ):
            torch.func.functional_call(built.module, weights, args, kwargs)
    # A model may fail in any way on a tensor without values; its capture reports the error.
    except Exception:
        return None
    settings = _settings(blocks)
    recorded = tuple((own, tuple(recorder.calls[n])) for n, own in enumerate(settings))
    return _Run(tuple(recorder.calls[_OUTSIDE]), recorded)


def _settings(blocks: Sequence[nn.Module]) -> list[tuple[object, ...]]:
    """Return the settings of the modules of each block, except the block's own number.

    The calls of a block at other sizes may depend on them.
    """
    settings = [
        {
            (path, name): (type(module), value)
            for path, module in block.named_modules()
            for name, value in vars(module).items()
            if _is_plain(value) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))
        }
        for block in blocks
    ]
    is_number = {
        key
        for key in settings[0]
        if all(setting.get(key, (None, None))[1] == n for n, setting in enumerate(settings))
    }
    return [
        tuple((key, setting[key]) for key in setting if key not in is_number)
        for setting in settings
    ]


def _is_plain(value: object) -> bool:
    return isinstance(value, str | bool | int | float | torch.dtype | None)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the called operators, and the origins of their operands."""

    def __init__(self, n_blocks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[int, list[object]] = {n: [] for n in range(_OUTSIDE, n_blocks)}
        self._block, self._last = _OUTSIDE, n_blocks - 1
        self._origins: dict[int, tuple[int, object]] = {}
        """The block of each tensor, and its name there, by the tensor's `id`."""
        self._inputs: Counter[int] = Counter()
        self._seen: list[Tensor] = []
        """Tensors kept alive so that their ids are not reused."""

    @contextmanager
    def following(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Assign calls to the block that is running."""
        with ExitStack() as hooks:
            for number, block in enumerate(blocks):
                enter, leave = partial(self._go_to, number), partial(self._go_to, _OUTSIDE)
                hooks.callback(block.register_forward_pre_hook(enter).remove)
                hooks.callback(block.register_forward_hook(leave).remove)
            yield

    def _go_to(self, block: int, *_: object) -> None:
        self._block = block

    def add(self, tensor: Tensor, block: int, name: object) -> None:
        """Record the origin of a tensor."""
        self._origins[id(tensor)] = block, name
        self._seen.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        calls = self.calls[self._block]
        result = func(*args, **kwargs)
        operands = tuple(
            self._described(leaf) if isinstance(leaf, Tensor) else repr(leaf)
            for leaf in tree_leaves((args, kwargs))
        )
        for place, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, Tensor) and id(leaf) not in self._origins:
                self.add(leaf, self._block, (len(calls), place))
        calls.append((str(func), operands))
        return result

    def _described(self, tensor: Tensor) -> tuple[object, ...]:
        if id(tensor) not in self._origins:
            # An input; it belongs to the block that uses it first.
            self._inputs[self._block] += 1
            self.add(tensor, self._block, ("input", self._inputs[self._block]))
        block, name = self._origins[id(tensor)]
        # Blocks are named by their distance from the calling block, or else from the last one.
        distance = _OUTSIDE if block == _OUTSIDE else self._reference_block() - block
        return block == _OUTSIDE, distance, name, tuple(tensor.shape), tensor.stride(), tensor.dtype

    def _reference_block(self) -> int:
        return self._last if self._block == _OUTSIDE else self._block

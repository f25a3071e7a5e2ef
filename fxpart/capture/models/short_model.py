"""`shortened`: a model of few blocks, from whose graph that of the whole model is made.

A capture takes time for every block, although the blocks of a transformer are alike. Whether they
are is read off a run of the whole model on the meta device, which takes a tenth of the time of a
capture: every operator that a block calls, with its operands and where these come from. Blocks that
do the same in turn are captured a few times, and `fxpart.capture.inference.repeated` does the rest.
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

from fxpart.capture.inference.repeated import Repetition
from fxpart.capture.models.build import BuiltModel, build_model
from fxpart.capture.models.cached_step import experts_for_shapes
from fxpart.capture.models.input_shapes import text_config
from fxpart.capture.models.spec import ModelSpec

__all__ = ["ShortModel", "shortened"]

_COUNT = "num_hidden_layers"
_PERIODS = 4
"""Captured periods: one to compare with the next, and one on each side of these."""
_LONGEST_PERIOD = 8
_WORTHWHILE = 0.75
"""Largest share of the blocks to capture."""
_OUTSIDE = -1
"""Number of what is in no block."""


@dataclass(frozen=True, slots=True)
class ShortModel:
    """A model of few blocks."""

    spec: ModelSpec
    repetition: Repetition
    """What to repeat to get the whole model."""


def shortened(spec: ModelSpec) -> ShortModel | None:
    """Return the model of `spec` with as few blocks as stand for all of them.

    None if there is no such model, or it is not much smaller.
    """
    if spec.architecture is None or spec.lora or spec.loss is not None:
        return None
    whole = build_model(spec)
    config: Any = whole.module.config
    path = _only_list(whole.module)
    key = config.attribute_map.get(_COUNT, _COUNT)
    if path is None or text_config(config) is not config:
        return None
    count = len(_blocks(whole.module, path))
    run = _run(whole, path) if getattr(config, key, None) == count else None
    repetition = _repetition(path, run.blocks) if run else None
    if run is None or repetition is None:
        return None
    kept = count - repetition.copies * repetition.period
    settings = {
        name: value[:kept] if isinstance(value, list | tuple) and len(value) == count else value
        for name, value in spec.config.items()
        if name != _COUNT
    }
    short = replace(spec, config={**settings, key: kept})
    expected = _Run(run.outside, run.blocks[:kept])
    return ShortModel(short, repetition) if _run(build_model(short), path) == expected else None


def _only_list(module: nn.Module) -> str | None:
    """Return the path of the only list of modules outside of others, if there is just one."""
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
        # The first one of a kind may have something that others share.
        first = max((n + 1 for n, is_alike in enumerate(alike) if not is_alike), default=0) + 1
        first += (count - first) % period
        copies = (count - first) // period - _PERIODS
        if copies > 0 and count - copies * period <= _WORTHWHILE * count:
            return Repetition(path, first, period, copies)
    return None


# What a model does.


@dataclass(frozen=True, slots=True)
class _Run:
    """What a model does in a run, in values that compare equal for models that do the same."""

    outside: tuple[object, ...]
    """What it calls outside of its blocks."""
    blocks: tuple[object, ...]
    """What each block is set to and calls; other blocks are named by their distance."""


def _run(built: BuiltModel, path: str) -> _Run | None:
    """Return what a model on meta does; None if it cannot run there."""
    blocks = _blocks(built.module, path)
    recorder = _Recorder(len(blocks))
    # Fake tensors lead models through the code that a capture goes through.
    fake = FakeTensorMode()
    named = [*built.module.named_parameters(), *built.module.named_buffers()]
    weights: dict[str, Tensor] = {name: fake.from_tensor(tensor) for name, tensor in named}
    args, kwargs = tree_map_only(Tensor, fake.from_tensor, (built.args, built.kwargs))
    for name, tensor in weights.items():
        inside = name.removeprefix(f"{path}.") if name.startswith(f"{path}.") else ""
        number, _, rest = inside.partition(".")
        recorder.add(tensor, int(number) if number.isdigit() else _OUTSIDE, rest or name)
    experts = experts_for_shapes(built.module)
    try:
        with torch.no_grad(), fake, recorder, recorder.following(blocks), experts:
            torch.func.functional_call(built.module, weights, args, kwargs)
    # A model may do anything with a tensor without values; a capture of it then says so.
    except Exception:
        return None
    settings = _settings(blocks)
    blocks_do = zip(settings, (recorder.calls[n] for n in range(len(blocks))), strict=True)
    return _Run(
        tuple(recorder.calls[_OUTSIDE]),
        tuple((setting, tuple(calls)) for setting, calls in blocks_do),
    )


def _settings(blocks: Sequence[nn.Module]) -> list[tuple[object, ...]]:
    """Return what the modules of each block are set to, but for the block's own number.

    What a block does at other sizes may depend on it.
    """
    settings = [
        {
            (path, name): (type(module), value)
            for path, module in block.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, str | bool | int | float | None)
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


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators called, and what made their operands."""

    def __init__(self, n_blocks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[int, list[object]] = {n: [] for n in range(_OUTSIDE, n_blocks)}
        self._block, self._last = _OUTSIDE, n_blocks - 1
        self._origins: dict[int, tuple[int, object]] = {}
        """By a tensor's identity: the block that it belongs to, and its name there."""
        self._inputs: Counter[int] = Counter()
        self._seen: list[Tensor] = []
        """Tensors whose identities must not be given to others."""

    @contextmanager
    def following(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Record calls for the block that is running."""
        with ExitStack() as hooks:
            for number, block in enumerate(blocks):
                enter, leave = partial(self._go_to, number), partial(self._go_to, _OUTSIDE)
                hooks.callback(block.register_forward_pre_hook(enter).remove)
                hooks.callback(block.register_forward_hook(leave).remove)
            yield

    def _go_to(self, block: int, *_: object) -> None:
        self._block = block

    def add(self, tensor: Tensor, block: int, name: object) -> None:
        """Take note of where a tensor comes from."""
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
            # An input; which block it belongs to shows in its first use.
            self._inputs[self._block] += 1
            self.add(tensor, self._block, ("input", self._inputs[self._block]))
        block, name = self._origins[id(tensor)]
        # Blocks are named by distance: from the block that calls, or else from the last one.
        distance = _OUTSIDE if block == _OUTSIDE else self._from() - block
        return block == _OUTSIDE, distance, name, tuple(tensor.shape), tensor.stride(), tensor.dtype

    def _from(self) -> int:
        return self._last if self._block == _OUTSIDE else self._block

"""The repeated blocks of a model, such as a transformer's layers, by their paths."""

from collections import Counter

from torch import nn

from fxpart.errors import SpecError

__all__ = ["repeated_blocks"]

_LISTS = (nn.ModuleList, nn.Sequential)


def repeated_blocks(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the blocks that `module` repeats, in the order of its tree.

    A block is a member of a list (`ModuleList`, `Sequential`) that has another member of the same
    class. It is no single layer of torch, such as a Linear: a module with parts, or of a class of
    the model's own. Blocks do not lie in one another: the outermost are taken. A member that is
    nothing but a list of such blocks, as the stages of a ResNet are, gives way to what is in it.

    Raises:
        SpecError: when there are none.

    """
    found: list[str] = []
    waiting = [("", module)]
    while waiting:
        path, here = waiting.pop()
        inner: list[tuple[str, nn.Module]] = []
        alike = _repeated(here)
        for name, part in here.named_children():
            place = f"{path}.{name}" if path else name
            if name not in alike:
                inner.append((place, part))
            else:
                found += _unwrapped(place, part)
        waiting += reversed(inner)
    if not found:
        raise SpecError(
            f"checkpointing=block found no repeated blocks in {type(module).__name__}: no"
            " ModuleList or Sequential of it has two members of one class; set checkpointing=none"
        )
    order = {name: place for place, (name, _) in enumerate(module.named_modules())}
    return tuple(sorted((path for path in found if path in order), key=order.__getitem__))


def _repeated(module: nn.Module) -> dict[str, nn.Module]:
    """Return the members of a list that are of a class of which there are several."""
    if not isinstance(module, _LISTS):
        return {}
    parts = dict(module.named_children())
    count = Counter(type(part) for part in parts.values())
    return {name: part for name, part in parts.items() if count[type(part)] > 1 and _is_whole(part)}


def _is_whole(part: nn.Module) -> bool:
    """Tell whether `part` is more than a single layer of torch."""
    return next(part.children(), None) is not None or not type(part).__module__.startswith("torch.")


def _unwrapped(path: str, block: nn.Module) -> list[str]:
    """Return the path of `block`, or those of its members where it is nothing but their list."""
    while True:
        parts = dict(block.named_children())
        name, only = next(iter(parts.items()), ("", block))
        if isinstance(block, _LISTS) or len(parts) != 1 or not isinstance(only, _LISTS):
            return [path]
        members = dict(only.named_children())
        if len({type(member) for member in members.values()}) != 1:
            return [path]
        if not all(_is_whole(member) for member in members.values()):
            return [path]
        path = f"{path}.{name}"
        if len(members) > 1:
            return [f"{path}.{inner}" for inner in members]
        inner, block = next(iter(members.items()))
        path = f"{path}.{inner}"

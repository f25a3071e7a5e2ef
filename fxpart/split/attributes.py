"""What a graph fetches from its module by path, and how submodules call the modules they need."""

import operator
from typing import Any

from torch import nn
from torch.fx import GraphModule

from fxpart.errors import CaptureError

__all__ = ["HeldModules", "fetched"]


def fetched(module: nn.Module, path: str) -> Any:  # noqa: ANN401 - an attribute may be anything
    """Return the attribute of `module` at a dotted path.

    Raises:
        CaptureError: when there is none.

    """
    try:
        return operator.attrgetter(path)(module)
    except AttributeError as error:
        raise CaptureError(
            f"the graph uses {path}, which its {type(module).__name__} does not have; give the"
            " module that was traced"
        ) from error


class HeldModules:
    """What one submodule holds of the modules and attributes of the whole."""

    def __init__(self, module: GraphModule, *, rename: bool) -> None:
        self._module = module
        self._rename = rename
        self._names: dict[str, str] = {}
        self.held: dict[str, Any] = {}
        """What the submodule holds under each name."""
        self.paths: dict[str, str] = {}
        """Path in the whole module, by name."""

    def keep(self, path: str) -> str:
        """Hold what is at `path` under that same path."""
        if path not in self.held:
            self.held[path] = fetched(self._module, path)
            self.paths[path] = path
        return path

    def call(self, path: str) -> str:
        """Hold the module at `path` under a name without dots, and return that.

        ``a.b`` becomes ``a_b``; where that is taken by another module, ``a_b_1`` and so on.
        """
        if not self._rename:
            return self.keep(path)
        if path not in self._names:
            name, count = path.replace(".", "_"), 0
            while self.paths.get(name, path) != path:
                count += 1
                name = f"{path.replace('.', '_')}_{count}"
            self._names[path] = name
            self.paths[name] = path
            self.held[name] = fetched(self._module, path)
        return self._names[path]

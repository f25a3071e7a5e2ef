"""What a graph fetches from its module by path, and how submodules call the modules they need."""

import operator
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

from fxpart.errors import CaptureError

__all__ = ["DeferredGraphModule", "HeldModules", "fetched", "is_guard"]


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


# The check of its inputs that an exported module begins with: it is kept, but not placed.
#
# ``ExportedProgram.module()`` calls a module ``_guards_fn`` on all inputs and uses no result. It
# runs on the host, before any partition.


def is_guard(node: Node) -> bool:
    """Return whether `node` checks the inputs of an exported module."""
    return (
        node.op == "call_module"
        and node.target == "_guards_fn"
        and not node.users
        and all(operand.op == "placeholder" for operand in node.all_input_nodes)
    )


# A graph module whose Python code is written when it is first needed, not when it is made.
#
# Writing and compiling code takes most of the time of a cut, and many a submodule is only looked
# at, cut again or compiled from its graph. torch has such a class, and its tools know that; but its
# first call runs twice through the module's hooks, and torch.compile cannot look into it before
# that.


def _write_code(module: _LazyGraphModule) -> None:
    module.real_recompile()


# What torch.compiler.assume_constant_result sets: torch.compile then calls this instead of looking
# into it. That function itself would import the whole compiler.
_write_code._dynamo_marked_constant = True  # type: ignore[attr-defined]


class DeferredGraphModule(_LazyGraphModule):
    """As ``torch.fx.GraphModule``; `code` is written when it is read or the module first runs.

    After a change of the graph, ``recompile()`` only notes that the code is out of date.
    """

    def _lazy_forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the graph has it
        _write_code(self)
        # Not through __call__: hooks have run by now.
        return type(self).forward(self, *args, **kwargs)

    forward = _lazy_forward

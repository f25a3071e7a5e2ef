"""Parts of graph modules: attributes by path, modules owned by a submodule, guards, lazy code."""

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
        CaptureError: if there is no such attribute.

    """
    try:
        return operator.attrgetter(path)(module)
    except AttributeError as error:
        raise CaptureError(
            f"the graph uses {path}, which its {type(module).__name__} does not have; give the"
            " module that was traced"
        ) from error


class HeldModules:
    """The modules and attributes of the original module owned by one submodule."""

    def __init__(self, module: GraphModule, *, rename: bool) -> None:
        self._module = module
        self._rename = rename
        self._names: dict[str, str] = {}
        self.attributes: dict[str, Any] = {}
        """Modules and attributes by their name in the submodule."""
        self.paths: dict[str, str] = {}
        """Path in the original module, by name."""

    def keep(self, path: str) -> str:
        """Add the module or attribute at `path` under the same path, and return the path."""
        if path not in self.attributes:
            self.attributes[path] = fetched(self._module, path)
            self.paths[path] = path
        return path

    def call(self, path: str) -> str:
        """Add the module at `path` under a name without dots, and return the name.

        ``a.b`` becomes ``a_b``, or ``a_b_1`` and so on if that name is taken.
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
            self.attributes[name] = fetched(self._module, path)
        return self._names[path]


def is_guard(node: Node) -> bool:
    """Return whether `node` checks the inputs of an exported module.

    ``ExportedProgram.module()`` first calls a module ``_guards_fn`` on all inputs and ignores its
    result. A cut keeps that call in the outer module, before all partitions.
    """
    return (
        node.op == "call_module"
        and node.target == "_guards_fn"
        and not node.users
        and all(operand.op == "placeholder" for operand in node.all_input_nodes)
    )


def _write_code(module: _LazyGraphModule) -> None:
    module.real_recompile()


# Torch.compile calls this function instead of tracing it. `torch.compiler.assume_constant_result`
# sets the same, but would import the whole compiler.
_write_code._dynamo_marked_constant = True  # type: ignore[attr-defined]


class DeferredGraphModule(_LazyGraphModule):
    """A ``torch.fx.GraphModule`` that generates `code` when first read or run.

    Generating and compiling code takes most of the time of a cut, and many submodules are only
    inspected, cut again or compiled from their graph. ``recompile()`` only marks the code as out of
    date.

    Torch's own lazy class runs its hooks twice in the first call, and torch.compile cannot trace it
    before that.
    """

    def _lazy_forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the graph has it
        _write_code(self)
        # Not through __call__, since hooks have already run.
        return type(self).forward(self, *args, **kwargs)

    forward = _lazy_forward

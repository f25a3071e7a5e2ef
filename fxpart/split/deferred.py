"""A graph module whose Python code is written when it is first needed, not when it is made.

Writing and compiling code takes most of the time of a cut, and many a submodule is only looked at,
cut again or compiled from its graph. torch has such a class, and its tools know that; but its first
call runs twice through the module's hooks, and torch.compile cannot look into it before that.
"""

from typing import Any

from torch.fx._lazy_graph_module import _LazyGraphModule

__all__ = ["DeferredGraphModule"]


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

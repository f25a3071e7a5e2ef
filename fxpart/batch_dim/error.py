"""What is wrong with a question about the batch dimension."""

from fxpart.errors import FxpartError

__all__ = ["BatchDimError"]


class BatchDimError(FxpartError, RuntimeError):
    """A batch size, dimension, node or mesh about which nothing can be said.

    Also a ``RuntimeError``: that is what torch's analyzer raised up to version 2.2.
    """

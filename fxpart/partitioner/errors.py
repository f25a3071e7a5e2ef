"""What is wrong with a configuration: a `SpecError` that torch's callers can catch too."""

from fxpart.errors import SpecError

__all__ = ["ConfigError"]


class ConfigError(SpecError, RuntimeError):
    """A `PartitionerConfig`, device or mapping that cannot be used as it is.

    Also a ``RuntimeError``: that is what callers of torch's partitioner catch.
    """

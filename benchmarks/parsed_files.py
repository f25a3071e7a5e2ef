"""Keep the shipped files of the configuration, and Hydra's own, as they were parsed.

For commands that are forked from a process which has parsed them (`benchmarks.fork_server`): a
third of a short command's time. A single command would lose by it. Files of the user are not kept,
as they may change meanwhile.
"""

import pickle
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from runner.config.paths import conf_dir

if TYPE_CHECKING:
    from hydra.plugins.config_source import ConfigResult, ConfigSource

__all__ = ["keep_parsed_files"]

_Load = Callable[["ConfigSource", str], "ConfigResult"]

_parsed: dict[tuple[object, ...], bytes] = {}
"""The pickled files, by source, path, size and time of the last change."""


def keep_parsed_files() -> None:
    """Let Hydra parse each shipped file once in this process and its children. Idempotent."""
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins

    Plugins.instance()  # loads the classes that read files
    for scheme in ("file", "pkg"):
        source: Any = SourcesRegistry.instance().resolve(scheme)
        if not hasattr(source.load_config, "__wrapped__"):
            source.load_config = _kept(source.load_config)


def _kept(load: _Load) -> _Load:
    @wraps(load)
    def kept(source: "ConfigSource", config_path: str) -> "ConfigResult":
        version = _version(source, config_path)
        if version is None:
            return load(source, config_path)
        key = (source.scheme(), source.provider, source.path, config_path, *version)
        if key not in _parsed:
            _parsed[key] = pickle.dumps(load(source, config_path))
        # Hydra changes what it loads.
        result: ConfigResult = pickle.loads(_parsed[key])
        return result

    return kept


def _version(source: "ConfigSource", config_path: str) -> tuple[int, ...] | None:
    """Return what changes with the content of a file; None if the file must be read again."""
    if source.scheme() == "pkg":
        return () if source.path.startswith("hydra.") else None
    folder = conf_dir()
    if source.path != str(folder):
        return None
    try:
        status = (folder / source._normalize_file_name(config_path)).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size

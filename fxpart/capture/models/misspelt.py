"""Detect misspelt transformers classes and configuration keys without importing transformers.

Importing transformers, and torch with it, takes seconds. Instead its sources are read as text: a
name that is missing in all files of a class and its configuration does not exist. A name found
there may still be wrong; `fxpart.capture.models.architecture` reports it when it builds the model.
"""

import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fxpart.errors import SpecError, nearest_names

__all__ = ["COMMON_KEYS", "refuse_misspelt"]

_LISTED = re.compile(r'"([A-Z]\w*[a-z]\w*)"')
"""A class name; names of tables have no lower-case letter."""
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
"""A string, such as the license, which contains its own name."""
_SETTING = re.compile(r"^    ([a-z]\w*)\s*:", re.MULTILINE)
"""A key declared in the body of a configuration class."""
_ELSEWHERE = re.compile(r"from \.\.(\w+)\.configuration_\w+ import")
_SHARED = ("configuration_utils.py", "modeling_rope_utils.py")
"""Sources of the base classes of all configurations."""
COMMON_KEYS = (
    "attn_implementation",
    "experts_implementation",
    "num_labels",
    "output_attentions",
    "tie_word_embeddings",
)
"""Keys that every configuration class accepts although its signature does not list them."""


def refuse_misspelt(architecture: str, config: Mapping[Any, object]) -> None:
    """Refuse an `architecture` that transformers does not have, and unknown keys of its `config`.

    Does nothing if transformers is not installed, or already imported, since building the model
    then reports the mistake as quickly.

    Raises:
        SpecError: if a name does not exist; the message has the nearest ones.

    """
    if "transformers" in sys.modules or (root := _root()) is None:
        return
    home = _home(root, architecture)
    if home is None:
        if architecture in _listed(root / "__init__.py"):
            return  # it exists, whatever it is
        listed = _listed(root / "models" / "auto" / "modeling_auto.py")
        raise SpecError(
            f"architecture={architecture} is not in transformers {version('transformers')};"
            f" {nearest_names(architecture, listed)}"
        )
    words, settings = _words(root, home)
    for key in config:
        if isinstance(key, str) and key not in words and key not in COMMON_KEYS:
            raise SpecError(
                f"config.{key} is not a key of {architecture}'s configuration;"
                f" {nearest_names(key, settings)}"
            )


@lru_cache(maxsize=1)
def _root() -> Path | None:
    """Return the folder of transformers."""
    spec = find_spec("transformers")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@lru_cache(maxsize=256)
def _home(root: Path, architecture: str) -> Path | None:
    """Return the folder of the model whose source defines class `architecture`."""
    name = re.compile(rf"^class {re.escape(architecture)}\(", re.MULTILINE)
    folders = sorted(path for path in (root / "models").iterdir() if path.is_dir())
    # Most classes are named like the folder; finding others takes a tenth of a second.
    folders.sort(key=lambda folder: not _begins(architecture, folder.name))
    for folder in folders:
        if any(name.search(_text(path)) for path in sorted(folder.glob("modeling_*.py"))):
            return folder
    return None


def _begins(architecture: str, folder: str) -> bool:
    return architecture.lower().startswith(folder.replace("_", ""))


@lru_cache(maxsize=64)
def _words(root: Path, home: Path) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return all words in the sources of the configurations in `home`, and their keys."""
    configurations = [_text(path) for path in sorted(home.glob("configuration_*.py"))]
    models = [_text(path) for path in sorted(home.glob("modeling_*.py"))]
    others = {name for text in (*configurations, *models) for name in _ELSEWHERE.findall(text)}
    beside = [
        _text(path)
        for name in sorted(others)
        for path in sorted((home.parent / name).glob("configuration_*.py"))
    ]
    shared = [_text(root / name) for name in _SHARED]
    text = "\n".join((*configurations, *models, *beside, *shared))
    settings = dict.fromkeys(_SETTING.findall("\n".join((*configurations, *beside))))
    return frozenset(re.findall(r"[A-Za-z_]\w*", text)), tuple(settings)


def _listed(path: Path) -> list[str]:
    return _LISTED.findall(_COMMENT.sub("", _text(path)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # another version has other files
        return ""

"""Misspelt classes of transformers and keys of their configurations, told without importing it.

transformers, and torch with it, take seconds to import. Their sources are read as text instead:
what no file names that a class or its configuration is made of does not exist. What they name may
still be wrong; that is told by `fxpart.capture.models.architecture`, once it is built.
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
"""A class; names of tables have no lower-case letter."""
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
"""Such as the license, which quotes its own name."""
_SETTING = re.compile(r"^    ([a-z]\w*)\s*:", re.MULTILINE)
"""A key of a configuration class, as its body declares it."""
_ELSEWHERE = re.compile(r"from \.\.(\w+)\.configuration_\w+ import")
_SHARED = ("configuration_utils.py", "modeling_rope_utils.py")
"""What the configurations of all models are made of."""
COMMON_KEYS = (
    "attn_implementation",
    "experts_implementation",
    "num_labels",
    "output_attentions",
    "tie_word_embeddings",
)
"""Keys that every configuration class takes although its signature does not list them."""


def refuse_misspelt(architecture: str, config: Mapping[Any, object]) -> None:
    """Refuse an `architecture` that transformers does not have, and unknown keys of its `config`.

    Nothing is said where transformers is not installed, or imported already: then who builds the
    model says it as quickly.

    Raises:
        SpecError: with the nearest names.

    """
    if "transformers" in sys.modules or (root := _root()) is None:
        return
    home = _home(root, architecture)
    if home is None:
        if architecture in _listed(root / "__init__.py"):
            return  # whatever it is, it exists
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
    # Most are called like the folder; others take a tenth of a second.
    folders.sort(key=lambda folder: not _begins(architecture, folder.name))
    for folder in folders:
        if any(name.search(_text(path)) for path in sorted(folder.glob("modeling_*.py"))):
            return folder
    return None


def _begins(architecture: str, folder: str) -> bool:
    return architecture.lower().startswith(folder.replace("_", ""))


@lru_cache(maxsize=64)
def _words(root: Path, home: Path) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return all words of what the configurations in `home` are made of, and their keys."""
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

"""JSON files that say which schema and version they follow, read with every doubt named."""

import json
import re
from pathlib import Path
from typing import Any

from fxpart.errors import SpecError
from fxpart.support.regular_file import read_regular

__all__ = ["read_document", "what_is_wrong"]


_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""How JSON writes one half of a character beyond the first 65,536."""


def read_document(path: Path, schema: str, version: int) -> dict[str, Any]:
    """Return what a JSON file of `schema` says, once it is known to be one that we can read.

    `version` is the latest of the schema; a writer raises it when a reader of the version before
    would misunderstand the file.

    Raises `SpecError` when the file is missing, damaged, of another kind, or newer than this code.
    """
    try:
        text = read_regular(path).decode()
        document = json.loads(text)
        if _HALF.search(text):
            json.dumps(document, ensure_ascii=False).encode()  # half a character cannot be written
    except FileNotFoundError:
        raise SpecError(f"there is no file {path}; give the path of a {schema} file") from None
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8, or nested too deep
        raise SpecError(
            f"{path} is not a {schema} file, or it is damaged ({what_is_wrong(error)});"
            " write it again, or name another"
        ) from error
    schema_found = document.get("schema") if isinstance(document, dict) else None
    if schema_found != schema:
        raise SpecError(f"{path} is not a {schema} file, its schema is {schema_found!r}")
    number = document.get("version")
    # True is an int to Python.
    if type(number) is not int or not 1 <= number <= version:
        raise SpecError(
            f"{path} has version {number!r}, this fxpart reads up to {version}; upgrade fxpart"
        )
    return dict(document)


def what_is_wrong(error: Exception) -> str:
    """Return in a few words what an error says about the file that is read."""
    return f"no {error.args[0]}" if isinstance(error, KeyError) else str(error).splitlines()[0]

"""Read JSON files that name their schema and version, with an error for every problem."""

import json
import re
from pathlib import Path
from typing import Any

from fxpart.errors import SpecError
from fxpart.support.regular_file import read_regular

__all__ = ["read_document", "what_is_wrong"]


_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""A JSON escape of a UTF-16 surrogate."""


def read_document(path: Path, schema: str, version: int) -> dict[str, Any]:
    """Read a JSON file of `schema` and check its version.

    `version` is the latest of the schema, which is incremented whenever a reader of the previous
    one would misunderstand the file.

    Raises:
        SpecError: if the file is missing, damaged, of another kind, or newer than this code.

    """
    try:
        text = read_regular(path).decode()
        document = json.loads(text)
        if _HALF.search(text):
            json.dumps(document, ensure_ascii=False).encode()  # a lone surrogate cannot be encoded
    except FileNotFoundError:
        raise SpecError(f"there is no file {path}; give the path of a {schema} file") from None
    except OSError as error:
        raise SpecError(
            f"cannot read {path}: {error.strerror or error}; name a {schema} file"
        ) from error
    except (ValueError, RecursionError) as error:  # bad JSON or UTF-8, or too deeply nested
        raise SpecError(
            f"{path} is not a {schema} file, or it is damaged ({what_is_wrong(error)});"
            " write it again, or name another"
        ) from error
    schema_found = document.get("schema") if isinstance(document, dict) else None
    if schema_found != schema:
        raise SpecError(
            f"{path} is not a {schema} file, its schema is {schema_found!r}; name one that is"
        )
    number = document.get("version")
    # bool is a subclass of int.
    if type(number) is not int or not 1 <= number <= version:
        raise SpecError(
            f"{path} has version {number!r}, this fxpart reads up to {version}; upgrade fxpart"
        )
    return dict(document)


def what_is_wrong(error: Exception) -> str:
    """Summarize an error from reading a file in a few words."""
    return f"no {error.args[0]}" if isinstance(error, KeyError) else str(error).splitlines()[0]

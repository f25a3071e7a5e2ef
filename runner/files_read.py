"""Files that a job's model read beside its sources: its result stands as long as they do.

They are known only once the model was made, so they are no part of a job's key; they are kept with
its result, and asked for when a sweep meets it again.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from fxpart.file_digest import file_digest
from fxpart.models.files_read import files_read_by
from runner.sections import Config

__all__ = ["FILES_TAG", "changed_file", "files_of", "files_tag", "job_files_read"]

FILES_TAG = "files_read"
_MOST_CHARS = 7900
"""Of a tag: a store keeps 8,000."""
_TOO_MANY = "more files than a tag can name"
_DIGITS = 16


def job_files_read(config: Config | None, root: Path) -> dict[str, str]:
    """Return a digest of each file that the job's model has read, by its path.

    Paths below `root`, where the command was given, are as from there.
    """
    found = files_read_by(config.model.factory) if config else {}
    return {_shown(path, root): digest[:_DIGITS] for path, digest in found.items()}


def _shown(path: Path, root: Path) -> str:
    whole = root.resolve()
    return str(path.relative_to(whole) if path.is_relative_to(whole) else path)


def files_tag(files: Mapping[str, str]) -> dict[str, str]:
    """Return the tag that keeps `files` with a run, none where it read none."""
    text = json.dumps(files)
    if len(text) > _MOST_CHARS:
        text = json.dumps({_TOO_MANY: ""})
    return {FILES_TAG: text} if files else {}


def files_of(tags: Mapping[str, str]) -> dict[str, str]:
    """Return what `files_tag` kept; of a tag that somebody else wrote, what never stands."""
    try:
        found = json.loads(tags.get(FILES_TAG, "{}"))
        return {str(path): str(digest) for path, digest in found.items()}
    except (ValueError, AttributeError):
        return {FILES_TAG: ""}


def changed_file(files: Mapping[str, str], root: Path) -> str | None:
    """Return one of the files that does not say what it did, or is gone; None if all stand."""
    for path, digest in files.items():
        try:
            if file_digest((root / path).resolve())[:_DIGITS] == digest:
                continue
        except OSError:
            pass
        return path
    return None

"""Files that a job's model read beside its sources: its result stands as long as they do.

They are known only once the model was made, so they are no part of a job's key; they are kept with
its result, and asked for when a sweep meets it again.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from fxpart.capture.models.files_read import files_read_by
from fxpart.support.digest import file_digest
from runner.config.sections import Config

__all__ = ["FILES_TAG", "changed_file", "files_of", "files_tags", "job_files_read"]

FILES_TAG = "files_read"
_MOST_TAGS = 40
_FILES_A_TAG = 50
_MOST_CHARS = 7900
"""Of a tag: a store keeps 8,000."""
_TOO_MANY = "more files than tags can name"
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


def files_tags(files: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that keep `files` with a run, none where it read none."""
    names = list(files)
    stretches = [names[at : at + _FILES_A_TAG] for at in range(0, len(names), _FILES_A_TAG)]
    texts = [json.dumps({name: files[name] for name in some}) for some in stretches]
    if len(texts) > _MOST_TAGS or any(len(text) > _MOST_CHARS for text in texts):
        texts = [json.dumps({_TOO_MANY: ""})]
    return {_tag(index): text for index, text in enumerate(texts)}


def _tag(index: int) -> str:
    return f"{FILES_TAG}.{index}" if index else FILES_TAG


def files_of(tags: Mapping[str, str]) -> dict[str, str]:
    """Return what `files_tags` kept; of a tag that somebody else wrote, what never stands."""
    found: dict[str, str] = {}
    try:
        for text in (tags[_tag(index)] for index in range(_MOST_TAGS) if _tag(index) in tags):
            found |= {str(path): str(digest) for path, digest in json.loads(text).items()}
    except (ValueError, AttributeError):
        return {FILES_TAG: ""}
    return found


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

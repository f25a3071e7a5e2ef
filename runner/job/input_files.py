"""Files that a configuration names and its job reads, kept with the run to repeat it.

They lie in the folder `inputs` of the job and of its run in the tracker, each called after the key
that names it; a tag of the run says what each was.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from fxpart.core.saved_assignment import assignment_path
from fxpart.errors import SpecError
from fxpart.support.whole_file import write_whole
from runner.config.sections import Config
from runner.tracking.tracker import INPUTS_FOLDER

__all__ = [
    "INPUTS_TAG",
    "InputFile",
    "inputs_of",
    "inputs_tag",
    "kept_name",
    "named_files",
    "read_inputs",
    "with_file",
    "write_inputs",
]

INPUTS_TAG = "inputs"

_ASSIGNMENT, _CALIBRATION = "mode.assignment", "latency.file"
_KEYS = (_ASSIGNMENT, _CALIBRATION)


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file, as it was when the job began."""

    key: str
    """Of the configuration, such as ``latency.file``."""
    content: bytes

    @property
    def digest(self) -> str:
        """Its SHA-256, in hex."""
        return sha256(self.content).hexdigest()


def named_files(config: Config) -> dict[str, Path]:
    """Return the files that decide the result of `config`, by the keys that name them.

    The same that `runner.job.identity` knows a job by.
    """
    files: dict[str, Path] = {}
    saved = config.mode.options.get("assignment")
    if config.mode.name == "aot_based" and isinstance(saved, str) and saved:
        files[_ASSIGNMENT] = assignment_path(saved)
    if config.latency.file:
        files[_CALIBRATION] = Path(config.latency.file)
    return files


def with_file(config: Config, key: str, place: str) -> Config:
    """Return `config` with another file under a key of `named_files`."""
    if key == _CALIBRATION:
        return replace(config, latency=replace(config.latency, file=place))
    options = {**config.mode.options, "assignment": place}
    return replace(config, mode=replace(config.mode, options=options))


def read_inputs(config: Config) -> tuple[InputFile, ...]:
    """Return what the files of `config` say; mostly there are none.

    One that cannot be read is left out: the job refuses it, in words of its own.
    """
    found = []
    for key, place in named_files(config).items():
        with suppress(OSError):
            found.append(InputFile(key, place.read_bytes()))
    return tuple(found)


def kept_name(key: str) -> str:
    """Return where the file of that key is kept, as from the folder of the job or its run."""
    return f"{INPUTS_FOLDER}/{key}.json"


def write_inputs(files: Sequence[InputFile], folder: Path) -> None:
    """Keep `files` in the folder of a job, and none that an earlier attempt there has left.

    Raises `CacheError` when the place cannot be written.
    """
    kept = {one.key: one.content for one in files}
    for key in _KEYS:
        path = folder / kept_name(key)
        if key in kept:
            write_whole(path, kept[key], str(path), "choose another output folder")
        else:
            with suppress(OSError):
                path.unlink()


def inputs_tag(files: Sequence[InputFile]) -> dict[str, str]:
    """Return the tag that says what the files of a run were; none where it has none."""
    return {INPUTS_TAG: json.dumps({one.key: one.digest for one in files})} if files else {}


def inputs_of(run_id: str, tags: Mapping[str, str]) -> dict[str, str]:
    """Return the digests that `inputs_tag` kept, by key; none for a run from before there were any.

    Raises:
        SpecError: for a tag that somebody else wrote, in one line.

    """
    text = tags.get(INPUTS_TAG, "{}")
    try:
        return {str(key): str(digest) for key, digest in json.loads(text).items()}
    except (ValueError, AttributeError) as error:
        raise SpecError(
            f"the tag {INPUTS_TAG} of run {run_id} is damaged ({text[:40]!r}), so the files that it"
            " read are not known; run it again from its overrides"
        ) from error

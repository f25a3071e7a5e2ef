"""The files that a logged run has read, for the same run again: as they are, or as it kept them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from fxpart.errors import SpecError
from runner.input_files import (
    InputFile,
    inputs_of,
    kept_name,
    named_files,
    with_file,
    write_inputs,
)
from runner.paths import shown_path
from runner.sections import Config
from runner.tracking import LoggedRun, Tracker

__all__ = ["Restored", "restored"]

_PLAIN = re.compile(r"[\w./+-]+", re.ASCII)
"""What Hydra reads as it stands."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A configuration whose files say what they said to the run that is repeated."""

    config: Config
    places: Mapping[str, str]
    """By key, where a file now lies that is not what it was; mostly none."""
    notes: tuple[str, ...]
    """What was taken from where, a line for each."""

    def overrides(self, asked: Sequence[str]) -> tuple[str, ...]:
        """Return what the run was `asked` for, with these files."""
        return tuple(_override(one, self.places) for one in asked)


def restored(config: Config, run: LoggedRun, tracker: Tracker, folder: Path) -> Restored:
    """Return `config`, which `run` was logged with, so that it reads what the run has read.

    A file that still says the same is named as before. Another is written to the `folder` of the
    job as the tracker has kept it, and named there. A run from before files were kept names them
    as before.

    Raises:
        SpecError: for a file that is not what it was, and was not kept or is damaged.
        TrackingError: when the store fails.
        CacheError: when `folder` cannot be written.

    """
    named, found, notes = named_files(config), [], []
    for key, digest in inputs_of(run.run_id, run.tags).items():
        was = named.get(key)
        if was is None:
            raise SpecError(
                f"run {run.run_id} has read a file {key}, which its configuration does not name;"
                " run it again from its overrides"
            )
        state = _unlike(was, digest)
        if state is not None:
            found.append(InputFile(key, _kept(run, tracker, key, digest, f"{key}={was} {state}")))
            notes.append(f"{key}={was} {state}; read as the run has kept it")
    if not found:
        return Restored(config, {}, ())
    write_inputs(found, folder)
    places = {one.key: shown_path(folder / kept_name(one.key)) for one in found}
    for key, place in places.items():
        config = with_file(config, key, place)
    return Restored(config, places, tuple(notes))


def _unlike(place: Path, digest: str) -> str | None:
    """Return in what a file is not what it was, None where it is."""
    try:
        return None if sha256(place.read_bytes()).hexdigest() == digest else "has changed since"
    except FileNotFoundError:
        return "is gone"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


def _kept(run: LoggedRun, tracker: Tracker, key: str, digest: str, what: str) -> bytes:
    """Return what the run has kept of a file; `what` says which, and why it is asked for."""
    name = kept_name(key)
    content = tracker.read_artifact(run.run_id, name)
    if content is not None and sha256(content).hexdigest() == digest:
        return content
    state = "missing" if content is None else "damaged"
    raise SpecError(
        f"rerun={run.run_id}: {what}, and the run's own copy of it in the store, {name}, is"
        f" {state}; put the file back, or leave out rerun= and give another {key}="
    )


def _override(asked: str, places: Mapping[str, str]) -> str:
    """Return an override with the file that is read in its place."""
    key = asked.partition("=")[0]
    place = places.get(key.lstrip("+"))
    if place is None:
        return asked
    return f"{key}={place}" if _PLAIN.fullmatch(place) else f"{key}={_quoted(place)}"


def _quoted(text: str) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    return str(QuotedString(text, Quote.single).with_quotes())

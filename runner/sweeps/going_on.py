"""How a sweep that was interrupted is gone on with."""

from pathlib import Path

from runner.paths import shown_path

__all__ = ["how_to_go_on"]


def how_to_go_on(*, resumes: bool, needs_folder: Path | None) -> str:
    """Return what to type, in words that follow a semicolon.

    `resumes` is whether the command takes up what is settled; `needs_folder` is where the results
    lie that a command is to be told of, since no store keeps them.
    """
    changes = [] if resumes else ["without resume=false"]
    if needs_folder is not None:
        changes.append(f"with hydra.sweep.dir={shown_path(needs_folder)}")
    said = " and ".join(changes)
    return f"the same command{' ' if said else ''}{said} goes on"

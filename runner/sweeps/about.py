"""What a sweep is, beside its jobs, and the tags that say it in the store."""

import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["About", "sweep_tags"]


@dataclass(frozen=True, slots=True)
class About:
    """What a sweep is, beside its jobs."""

    title: str
    key: str
    """The sweep's identity: the same command finds what it began."""
    swept: tuple[str, ...]
    """The keys that have several values, in their order."""
    overrides: tuple[str, ...]
    total: int
    """How many jobs there will be."""
    command: str
    """What to type to run it again."""
    question: str = ""
    experiment: str = ""
    """The named experiment, where it is one."""


def sweep_tags(about: About, sweep: str, folder: Path) -> dict[str, str]:
    """Return the tags of the run that stands for the sweep whose id is `sweep`."""
    from runner.provenance import environment_tags

    tags = {
        "kind": "sweep",
        "sweep_id": sweep,
        "sweep_key": about.key,
        "swept": json.dumps(about.swept),
        "folder": str(folder),
        "overrides": json.dumps(about.overrides),
        "command": about.command,
        "question": about.question,
        "experiment": about.experiment,
        **environment_tags(),
    }
    return {name: text for name, text in tags.items() if text}

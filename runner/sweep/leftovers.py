"""What a sweep finds when it is started again: half-written files, and results that are gone."""

from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.errors import FxpartError
from fxpart.support.whole_file import remove_abandoned
from runner.config.paths import shown_path
from runner.job.job import RESULT_FILE
from runner.output.result_files import read_result
from runner.output.terminal import counted
from runner.sweep.about import job_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omegaconf import DictConfig

    from runner.job.swept_job import Job, JobEnd

__all__ = ["lost_results", "remove_half_written"]


def remove_half_written(config: "DictConfig", folder: Path, root: Path) -> None:
    """Remove what processes that were killed were writing where the sweep `folder` is at work.

    In the folders of its jobs each job does that itself, where it runs.
    """
    from omegaconf import OmegaConf

    cache = OmegaConf.select(config, "capture.cache_dir", throw_on_resolution_failure=False)
    for place in (folder, root / "outputs", *([Path(str(cache))] if cache else [])):
        remove_abandoned(place)


def lost_results(
    folder: Path,
    jobs: "Mapping[str, Job]",
    ends: "Mapping[str, JobEnd]",
    config: "DictConfig",
    parent_run: str | None,
) -> list[str]:
    """Return a line about jobs that the sweep has settled, and whose own file says nothing.

    The store is believed: it has all that the tables show. Nothing is said of a job that has no
    folder, whose files were thrown away on purpose, nor of one that another sweep has settled.
    """
    lost = []
    for key, end in ends.items():
        if not (end.known and end.run_id and end.parent_run == parent_run):
            continue
        place = folder / job_folder(jobs[key], config)
        if place.is_dir() and not _is_sound(place / RESULT_FILE):
            lost.append((place, end.run_id))
    if not lost:
        return []
    place, run_id = lost[0]
    which = f"{shown_path(place)}, run {run_id}" + (", ..." if len(lost) > 1 else "")
    return [
        f"files:     {RESULT_FILE} of {counted(len(lost), 'settled job')} is damaged or not there"
        f" ({which}); what is shown is from MLflow, which has those runs whole"
    ]


def _is_sound(path: Path) -> bool:
    try:
        read_result(path)
    except FxpartError:
        return False
    return True

"""A sweep as its report sees it, wherever it was read from."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["SweepData", "SweepRow"]


@dataclass(frozen=True, slots=True)
class SweepRow:
    """A job of a sweep, and what came of it."""

    name: str
    settings: Mapping[str, str]
    """Parameters as text, by key: the choices bare, others dotted."""
    metrics: Mapping[str, float]
    """By the names that MLflow shows; units are in the names."""
    status: str
    """``finished``, ``infeasible``, ``failed``, ``lost`` (its process was killed), ``cut_off`` or
    ``running``."""
    error: str | None
    """Why there is no result, in one line."""
    run_id: str | None
    """Of the run in MLflow, None where none is kept."""
    folder: str | None
    """Where its files are, None where that is not known."""


@dataclass(frozen=True, slots=True)
class SweepData:
    """A sweep and its jobs."""

    title: str
    question: str
    """What the sweep was to answer; empty if nobody said."""
    swept: tuple[str, ...]
    """The keys that have several values, in the order of the command."""
    rows: tuple[SweepRow, ...]
    started_ms: int | None
    """Since 1970 UTC."""
    command: str | None
    """What to type to run the sweep again."""

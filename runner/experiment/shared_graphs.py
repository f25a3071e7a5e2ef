"""What the jobs of one process share: captured graphs, and what follows from a graph alone.

A sweep places one model hundreds of times. Here a few are kept in memory, the latest that were
used; nothing else grows with the number of jobs.
"""

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock

from fxpart.capture.cache import cache_key, cached_path, entry_sources
from fxpart.capture.captured import step_key
from fxpart.capture.models.factory_source import factory_place
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.granularity import group_operators
from fxpart.core.graph import OpGraph
from fxpart.core.reserve import rounded
from fxpart.support.digest import file_stamp, stable_digest
from runner.config.sections import Config
from runner.experiment.subject import Subject, subject_of, symbols_of
from runner.experiment.training import step_options

__all__ = ["MOST", "placed_graph", "shared_subject"]

MOST = 4
"""Graphs of each sort that are kept."""

_Stamps = Mapping[Path, tuple[int, ...]]
"""By file, what changes whenever somebody writes to it."""


@dataclass(frozen=True, eq=False, slots=True)
class _Kept:
    subject: Subject
    sources: _Stamps
    """The user's own files that decided the graph."""


_kept: OrderedDict[str, _Kept] = OrderedDict()
"""The latest used last."""
_lock = Lock()


def shared_subject(config: Config, spec: ModelSpec) -> Subject:
    """Return what `subject_of` does, from memory if this process has had it before.

    What is run, and what is captured without a cache, is made anew each time; so is a model of the
    user's own with symbolic sizes, of which it is not known here what files it is made of.

    Raises:
        FxpartError: for a model that cannot be built, captured or held.

    """
    begin = time.perf_counter()
    key = _key(config, spec)
    if key is None:
        return subject_of(config, spec)
    with _lock:
        found = _kept.get(key)
        if found is not None:
            _kept.move_to_end(key)
    if found is not None and _stamps(found.sources) == found.sources:
        seconds = time.perf_counter() - begin
        captured = replace(found.subject.captured, seconds=seconds, from_cache=True)
        return replace(found.subject, captured=captured)
    subject = subject_of(config, spec)
    sources = _sources(config, spec)
    with _lock:
        _kept.pop(key, None)
        if sources is not None:
            _kept[key] = _Kept(subject, sources)
        while len(_kept) > MOST:
            _kept.popitem(last=False)
    return subject


def _key(config: Config, spec: ModelSpec) -> str | None:
    """Return the hash of all that decides the subject but the user's files, None for no sharing."""
    if config.execute.name != "none" or not config.capture.use_cache:
        return None
    if spec.factory is not None and symbols_of(config):
        return None
    parts = {
        "model": spec.key(),
        "place": factory_place(spec.factory),
        "capture": asdict(config.capture),
        "phase": asdict(config.phase),
        "optimizer": asdict(config.optimizer),
        "checkpointing": config.checkpointing,
        "data_parallel": config.data_parallel,
        "all_reduce": asdict(config.all_reduce),
    }
    return stable_digest(parts)


def _sources(config: Config, spec: ModelSpec) -> _Stamps | None:
    """Return the user's files that the graph in the cache is made of.

    None where they have changed since, or where the entry is gone already.
    """
    if spec.factory is None:
        return {}
    phase = config.phase.name
    step = step_key(phase, train_mode=config.phase.train_mode, options=step_options(config))
    key = cache_key(spec.key(), config.capture.level, phase, step)
    entry = cached_path(Path(config.capture.cache_dir), key)
    stamps = _stamps(entry_sources(entry) or {})
    # Asked again, so that no change slips in between what is compared and what is stamped.
    return None if entry_sources(entry) is None else stamps


def _stamps(files: Mapping[Path, object]) -> _Stamps:
    found: dict[Path, tuple[int, ...]] = {}
    for path in files:
        try:
            found[path] = file_stamp(path)
        except OSError:
            found[path] = (-1,)
    return found


@lru_cache(maxsize=MOST)
def placed_graph(graph: OpGraph, rounding_bytes: int, granularity: str) -> OpGraph:
    """Return `graph` as it is placed: sizes as the allocator rounds them, operators in groups.

    Raises:
        SpecError: for a multiple below 1, or a granularity that does not exist.

    """
    return group_operators(rounded(graph, rounding_bytes), granularity)

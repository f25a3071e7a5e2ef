"""The limits of an MLflow store: names, lengths, numbers and batch sizes. No MLflow here."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from runner.tracking.tracker import Series

__all__ = ["Batch", "batches", "finite_metrics", "legal_names", "param_texts", "tag_texts", "thin"]

SERIES_POINTS = 100
"""Most points of a series: each is a row of the database, the bulk of what a job writes. MLflow's
charts draw up to 320, so they show all of these."""

_NAME_CHARS, _PARAM_CHARS, _TAG_CHARS = 250, 6000, 8000
_REFUSED = re.compile(r"[^\w\-./: ]", re.ASCII)
# Limits of one request to a server; a database accepts more.
_BATCH, _BATCH_PARAMS, _BATCH_TAGS = 1000, 100, 100


class Batch(NamedTuple):
    """The content of one request."""

    metrics: Sequence[Any]
    params: Sequence[Any]
    tags: Sequence[Any]


def legal_names(names: Iterable[str]) -> dict[str, str]:
    """Map each name to a legal one: other characters become ``_``, empty path parts are dropped.

    Names that collide get ``_2``, ``_3`` and so on, in order.
    """
    legal: dict[str, str] = {}
    used_names: set[str] = set()
    for name in names:
        parts = [part for part in _REFUSED.sub("_", name).split("/") if part.strip(".")]
        base = "/".join(parts)[:_NAME_CHARS].rstrip("/") or "_"
        candidate, count = base, 1
        while candidate in used_names:
            count += 1
            candidate = f"{base[: _NAME_CHARS - 6]}_{count}"
        used_names.add(candidate)
        legal[name] = candidate
    return legal


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the finite metrics, since an infinite one would flatten every chart."""
    names = legal_names(metrics)
    return {names[k]: float(v) for k, v in metrics.items() if math.isfinite(v)}


def param_texts(params: Mapping[str, object]) -> dict[str, str]:
    """Return parameters as text, with YAML's spelling where it differs from Python's."""
    names = legal_names(params)
    return {names[key]: _cut(_text(value), _PARAM_CHARS) for key, value in params.items()}


def tag_texts(tags: Mapping[str, str]) -> dict[str, str]:
    """Return tags with legal names and lengths of text."""
    names = legal_names(tags)
    return {names[key]: _cut(value, _TAG_CHARS) for key, value in tags.items()}


def _text(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cut(text: str, width: int) -> str:
    # No database accepts lone surrogates, and PostgreSQL no NUL characters.
    text = text.encode(errors="replace").decode().replace("\0", "?")
    return text if len(text) <= width else text[: width - 1] + "…"


def thin(series: Series, max_points: int = SERIES_POINTS) -> list[tuple[int, float]]:
    """Return at most `max_points` finite points: the maxima of equal stretches, and the last one.

    The last one is what MLflow shows as the value of the series.
    """
    points = [(int(step), float(value)) for step, value in series if math.isfinite(value)]
    if len(points) <= max_points:
        return points
    *points, last = points
    stretches = max_points - 1
    edges = [index * len(points) // stretches for index in range(stretches + 1)]
    maxima = [max(points[begin:end], key=lambda point: point[1]) for begin, end in pairwise(edges)]
    return [*maxima, last]


def batches(metrics: Sequence[Any], params: Sequence[Any], tags: Sequence[Any]) -> Iterator[Batch]:
    """Yield all values in as few requests as MLflow's limits allow, parameters first, tags last.

    A run with the last tag therefore has all its values.
    """
    while metrics or params or tags:
        now_params, params = params[:_BATCH_PARAMS], params[_BATCH_PARAMS:]
        space = _BATCH - len(now_params)
        now_metrics, metrics = metrics[:space], metrics[space:]
        space = 0 if metrics or params else min(space - len(now_metrics), _BATCH_TAGS)
        now_tags, tags = tags[:space], tags[space:]
        yield Batch(now_metrics, now_params, now_tags)

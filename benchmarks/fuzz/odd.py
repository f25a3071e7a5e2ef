"""Odd values, and documents in which odd values replace valid ones."""

import copy
import math
from random import Random
from typing import Any

__all__ = ["changed_document", "damaged_bytes", "is_never_a_size", "odd_number", "odd_value"]

_NUMBERS: tuple[float, ...] = (
    -1,
    0,
    -(2**63),
    2**31,
    2**52 + 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**400,
    math.nan,
    math.inf,
    -math.inf,
    1e-320,
    1e300,
    -0.0,
    -1e-9,
    0.5,
)
_OTHERS: tuple[object, ...] = (
    None,
    True,
    "",
    "nan",
    "\ud800",
    "\0",
    "a\nb",
    "a" * 5000,
    "../../..",
    "/dev/zero",
    [],
    {},
    [[]],
    {"": 1},
    "__import__('os')",
)


def odd_number(rnd: Random) -> float:
    """Return a number that is rarely intended."""
    if rnd.random() < 0.2:
        return rnd.randint(-(10**6), 10**6)
    return rnd.choice(_NUMBERS)


def odd_value(rnd: Random) -> object:
    """Return a value that is rarely valid anywhere."""
    return odd_number(rnd) if rnd.random() < 0.6 else copy.deepcopy(rnd.choice(_OTHERS))


def is_never_a_size(value: object) -> bool:
    """Return whether a value is negative or NaN."""
    return isinstance(value, int | float) and not value >= 0


def changed_document(rnd: Random, document: Any) -> tuple[Any, str]:  # noqa: ANN401 - any JSON
    """Return `document` with one entry changed or removed, and a description of the change."""
    document = copy.deepcopy(document)
    places = _places(document)
    holder, key = rnd.choice(places)
    action = rnd.random()
    if action < 0.2:
        del holder[key]
        return document, f"without {key!r}"
    value = odd_value(rnd)
    if action < 0.3 and isinstance(holder, list):
        holder.insert(key, value)
    elif action < 0.3:
        key = rnd.choice(("extra", "", "name"))
        holder[key] = value
    else:
        holder[key] = value
    return document, f"{key!r} = {value!r:.60}"


def _places(document: object) -> list[tuple[Any, Any]]:
    """Return the location of every entry in a document: its list or mapping, and the key."""
    places: list[tuple[Any, Any]] = []
    items: list[tuple[Any, Any]] = []
    if isinstance(document, dict):
        items = list(document.items())
    elif isinstance(document, list):
        items = list(enumerate(document))
    for key, value in items:
        places.append((document, key))
        places += _places(value)
    return places


def damaged_bytes(rnd: Random, content: bytes) -> bytes:
    """Return `content` truncated, or with some bytes changed or inserted."""
    data = bytearray(content)
    action = rnd.random()
    position = rnd.randrange(len(data) + 1)
    if action < 0.2:
        return bytes(data[:position])
    if action < 0.4:
        data[position:position] = rnd.choice(
            (b"[" * 100_000, b"\0", b"\xff\xfe", b"-", b"9" * 400, b"NaN")
        )
        return bytes(data)
    for _ in range(rnd.randint(1, 8)):
        data[rnd.randrange(len(data))] = rnd.randrange(256)
    return bytes(data)

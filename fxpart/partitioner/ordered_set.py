"""A set that remembers the order in which its members came, so that results never vary."""

from collections.abc import Iterable, Iterator, MutableSet
from typing import TypeVar

__all__ = ["OrderedSet"]

T = TypeVar("T")


class OrderedSet(MutableSet[T]):
    """A set with the methods of ``set`` that code for torch's partitions calls.

    `changes` counts how often members came or went: who derives a number from the members can tell
    whether it still holds.
    """

    def __init__(self, members: Iterable[T] = ()) -> None:
        self._members: dict[T, None] = dict.fromkeys(members)
        self.changes = 0

    def __contains__(self, member: object) -> bool:
        return member in self._members

    def __iter__(self) -> Iterator[T]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        return f"OrderedSet({list(self._members)!r})"

    def add(self, value: T) -> None:
        """Add a member at the end, unless it is one."""
        if value not in self._members:
            self._members[value] = None
            self.changes += 1

    def discard(self, value: T) -> None:
        """Take a member out, if it is one."""
        if value in self._members:
            del self._members[value]
            self.changes += 1

    def update(self, *others: Iterable[T]) -> None:
        """Add the members of all `others`."""
        for other in others:
            for member in other:
                self.add(member)

    def copy(self) -> "OrderedSet[T]":
        """Return a set with the same members in the same order."""
        return OrderedSet(self)

    def union(self, *others: Iterable[T]) -> "OrderedSet[T]":
        """Return the members of this set, then the new ones of `others`."""
        joined = OrderedSet(self)
        joined.update(*others)
        return joined

    def intersection(self, *others: Iterable[T]) -> "OrderedSet[T]":
        """Return the members that all `others` have too, in the order of this set."""
        held = [set(other) for other in others]
        return OrderedSet(m for m in self if all(m in other for other in held))

    def difference(self, *others: Iterable[T]) -> "OrderedSet[T]":
        """Return the members that none of `others` has, in the order of this set."""
        held = {member for other in others for member in other}
        return OrderedSet(m for m in self if m not in held)

    def issubset(self, other: Iterable[T]) -> bool:
        """Return whether `other` has every member of this set."""
        held = set(other)
        return all(member in held for member in self)

    def issuperset(self, other: Iterable[T]) -> bool:
        """Return whether this set has every member of `other`."""
        return all(member in self for member in other)

"""Run tasks of a search in other processes, ahead of their turn.

A task depends on nothing but its arguments, and its result counts only at its turn. So the number
of processes decides how long a search takes, not what it finds.
"""

import signal
import sys
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fxpart.errors import FxpartError
from runner.output.terminal import without_progress

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

__all__ = ["Ahead", "Task"]

_T = TypeVar("_T")
_HERE = 0
"""Number of this process among those that compute."""


@dataclass(frozen=True, slots=True)
class Task(Generic[_T]):
    """Something to compute."""

    key: Hashable
    graph: Hashable
    """The graph that it needs. A process keeps the graphs that it has loaded."""
    work: Callable[[], _T]
    """Picklable; it returns a picklable value, or raises `FxpartError`."""


@dataclass(frozen=True, slots=True)
class _Result:
    value: Any = None
    error: FxpartError | None = None


def _result_of(work: Callable[[], object]) -> _Result:
    try:
        return _Result(work())
    except FxpartError as error:
        return _Result(error=error)


class Ahead:
    """Computes tasks in this process and `processes` - 1 others.

    The others start with the first task for them, each with a thread here that gives it one task
    after the other, and end with the block.
    """

    def __init__(self, processes: int) -> None:
        """Start no process yet."""
        self._to_start = processes - 1
        self._others: list[SpawnProcess] = []
        self._changed = Condition()
        """Held to use what follows."""
        self._has_ended = False
        self._asked: dict[Hashable, Task[Any]] = {}
        """Tasks that no process has begun, the first one first."""
        self._begun: set[Hashable] = set()
        self._owners: dict[Hashable, int] = {}
        """The number of the process that first loaded each graph. Loading takes as long as placing
        a plan, so others leave that graph to it while they have something else to do."""
        self._results: dict[Hashable, _Result] = {}
        self._faulty: set[Hashable] = set()
        """Tasks that failed ahead of their turn for another reason than a user's error."""

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._has_ended, self._asked = True, {}
            self._changed.notify_all()
        for process in self._others:
            process.terminate()

    @property
    def has_others(self) -> bool:
        """Whether there are other processes to ask."""
        return bool(self._to_start or self._others)

    def ask(self, tasks: Iterable[Task[Any]]) -> None:
        """Replace the tasks that other processes may begin, the most urgent first."""
        with self._changed:
            known = self._begun | self._results.keys() | self._faulty
            self._asked = {task.key: task for task in tasks if task.key not in known}
            self._changed.notify_all()
        while self._to_start > 0 and self._asked:
            self._to_start -= 1
            self._start()

    def result(self, task: Task[_T]) -> _T:
        """Return the result of a task, run here unless another process has begun it.

        Raises:
            FxpartError: if the task does.

        """
        with self._changed:
            if task.key not in self._begun and task.key not in self._results:
                self._asked = {task.key: task, **self._asked}
                self._changed.notify_all()
        while (following := self._to_run_here(task)) is not None:
            if following is task:
                return task.work()
            try:
                with without_progress():
                    result = _result_of(following.work)
            except Exception:  # a fault, raised if the turn of that task comes
                with self._changed:
                    self._faulty.add(following.key)
                continue
            with self._changed:
                self._results[following.key] = result
        with self._changed:
            known = self._results.pop(task.key)
        if known.error is not None:
            raise known.error
        value: _T = known.value
        return value

    def _to_run_here(self, task: Task[Any]) -> Task[Any] | None:
        """Return a task to run here before `task` is known, perhaps itself; None once it is."""
        with self._changed:
            while task.key not in self._results:
                is_begun = task.key in self._begun
                others = (other for other in self._asked.values() if other is not task)
                if is_begun or self._owner(task) != _HERE:
                    following = next((o for o in others if self._owner(o) == _HERE), None)
                else:
                    following = task
                if following is None and not is_begun:
                    following = task
                if following is not None:
                    self._asked.pop(following.key, None)
                    self._owners.setdefault(following.graph, _HERE)
                    return following
                self._changed.wait()
        return None

    def _owner(self, task: Task[Any]) -> int:
        return self._owners.get(task.graph, _HERE)

    def _start(self) -> None:
        """Start another process, and the thread that gives it tasks."""
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._others.append(process)
        Thread(target=self._attend, args=(len(self._others), ours), daemon=True).start()

    def _attend(self, number: int, connection: Connection) -> None:
        """Give another process its tasks until it ends, such as for want of memory.

        What it does not return is run here.
        """
        with connection:
            while (task := self._next_for(number)) is not None:
                result, has_ended = None, False
                try:
                    connection.send(task.work)
                    result = connection.recv()
                except Exception:  # it has ended, or the task or its result cannot be pickled
                    has_ended = True
                with self._changed:
                    self._begun.remove(task.key)
                    if result is None:
                        self._faulty.add(task.key)
                    else:
                        self._results[task.key] = result
                    if has_ended:
                        owned = [graph for graph, owner in self._owners.items() if owner == number]
                        for graph in owned:
                            del self._owners[graph]
                    self._changed.notify_all()
                if has_ended:
                    return

    def _next_for(self, number: int) -> Task[Any] | None:
        """Return a task for another process, if possible of a graph it has; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._asked or self._has_ended)
            if self._has_ended:
                return None
            tasks = self._asked.values()
            owned = (task for task in tasks if self._owner(task) == number)
            free = (task for task in tasks if task.graph not in self._owners)
            task = next(chain(owned, free, tasks))
            del self._asked[task.key]
            self._begun.add(task.key)
            self._owners.setdefault(task.graph, number)
            return task


def _exit(*_: object) -> None:
    """Exit as at the end of a program, so that what libraries have opened is cleaned up."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # multiprocessing sends it again at exit
    sys.exit()


def _serve(connection: Connection) -> None:
    """Run the tasks that come, until there is no one to ask for more.

    None is the answer to a task that fails for another reason than a user's error: it is run again
    by the process that asked, which reports that.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asked ends this one
    signal.signal(signal.SIGTERM, _exit)
    with suppress(EOFError, OSError), without_progress():
        while True:
            try:
                connection.send(_result_of(connection.recv()))
            except (EOFError, OSError):
                raise
            except Exception:  # a fault, or what cannot be pickled
                connection.send(None)

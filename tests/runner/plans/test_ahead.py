"""Tasks of a search that other processes run ahead of their turn."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from fxpart.errors import InfeasibleError
from runner.plans.ahead import Ahead, Task

_PATIENCE_S = 60.0


def _process_of(value: int) -> tuple[int, int]:
    return value, os.getpid()


def _unfit() -> int:
    raise InfeasibleError(lambda: ("too large", 3), needed_bytes=2, available_bytes=1)


def _faulty(folder: Path) -> int:
    """Note which process runs it, and fail as no user error does."""
    (folder / str(os.getpid())).touch()
    raise ZeroDivisionError


def _ended() -> int:
    """End a process that another one has started, as a lack of memory would."""
    if os.getppid() == int(os.environ["FXPART_TEST_PARENT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def _begun(ahead: Ahead, *tasks: Task[int]) -> None:
    """Ask for tasks, and wait until another process has begun them all."""
    ahead.ask(tasks)
    end_s = time.monotonic() + _PATIENCE_S
    while ahead._asked and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not ahead._asked


def test_results_are_those_of_one_process_in_any_order() -> None:
    tasks = [Task(number, number % 2, partial(_process_of, number)) for number in range(9)]
    with Ahead(1) as alone, Ahead(3) as ahead:
        assert not alone.has_others
        assert ahead.has_others
        alone.ask(tasks)
        assert [alone.result(task) for task in tasks] == [(n, os.getpid()) for n in range(9)]
        ahead.ask(tasks)
        results = [ahead.result(task) for task in reversed(tasks)]
    assert [value for value, _ in results] == [*reversed(range(9))]


def test_what_another_process_has_begun_is_not_run_again() -> None:
    with Ahead(2) as ahead:
        task = Task("key", "graph", partial(_process_of, 7))
        _begun(ahead, task)  # type: ignore[arg-type]
        ahead.ask([])
        value, process = ahead.result(task)
        assert value == 7
        assert process != os.getpid()
        # Its result counts once.
        assert ahead.result(task) == (7, os.getpid())


def test_user_errors_come_back_and_faults_are_raised_here(tmp_path: Path) -> None:
    unfit = Task("unfit", 0, _unfit)
    faulty = Task("faulty", 0, partial(_faulty, tmp_path))
    with Ahead(2) as ahead:
        _begun(ahead, unfit)
        with pytest.raises(InfeasibleError, match="too large") as error:
            ahead.result(unfit)
        assert (error.value.needed_bytes, error.value.devices_that_fit) == (2, 3)
        _begun(ahead, faulty)
        with pytest.raises(ZeroDivisionError):
            ahead.result(faulty)
    assert len(list(tmp_path.iterdir())) == 2


def test_what_cannot_be_sent_is_run_here() -> None:
    with Ahead(2) as ahead:
        unsendable = Task("lambda", 0, lambda: 3)
        ahead.ask([unsendable])
        assert ahead.result(unsendable) == 3
        after = Task("after", 0, os.getpid)
        ahead.ask([after])
        assert ahead.result(after) == os.getpid()


def test_a_fault_in_another_task_is_raised_at_its_turn(tmp_path: Path) -> None:
    slow = Task("slow", 1, partial(time.sleep, 2.0))
    faulty = Task("faulty", 0, partial(_faulty, tmp_path))
    with Ahead(2) as ahead:
        _begun(ahead, slow)  # type: ignore[arg-type]
        ahead.ask([faulty])
        ahead.result(slow)
        with pytest.raises(ZeroDivisionError):
            ahead.result(faulty)


def test_the_tasks_of_a_process_that_ended_are_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPART_TEST_PARENT", str(os.getpid()))
    with Ahead(2) as ahead:
        ended, after = Task("ended", 0, _ended), Task("after", 0, os.getpid)
        _begun(ahead, ended)
        assert ahead.result(ended) == os.getpid()
        ahead.ask([after])
        assert ahead.result(after) == os.getpid()


def test_other_processes_end_with_the_block() -> None:
    with Ahead(3) as ahead:
        _begun(ahead, *(Task(number, 0, os.getpid) for number in range(2)))
        processes = list(ahead._others)
        assert len(processes) == 2
    for process in processes:
        process.join(_PATIENCE_S)
        assert process.exitcode is not None

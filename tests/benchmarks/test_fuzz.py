"""A small share of ``python -m benchmarks.fuzz``: nothing crashes, nothing wrong is accepted."""

import subprocess
import time
from pathlib import Path
from typing import IO

import pytest

from benchmarks import fork_server
from benchmarks.fork_server import fork_command
from benchmarks.fuzz import judge
from benchmarks.fuzz.__main__ import fuzz
from benchmarks.fuzz.judge import Tally
from benchmarks.time_limit import OverLimitError, limited
from fxpart.capture.models.user_code import user_errors
from fxpart.errors import SpecError


@pytest.mark.parametrize(
    ("kind", "cases"), [("specs", 300), ("files", 200), ("configurations", 200), ("models", 300)]
)
@pytest.mark.filterwarnings("ignore")
def test_odd_input_is_accepted_or_refused_in_one_line(
    tmp_path: Path, kind: str, cases: int
) -> None:
    (tally,) = fuzz(cases, 1, [kind], tmp_path)
    assert (tally.tracebacks, tally.hangs, tally.wrong) == ([], [], [])
    assert tally.refused > 0


def _refuses() -> None:
    raise SpecError("a quoted\nline break")


def _hangs() -> None:
    # As a capture runs a model.
    with user_errors(lambda error: SpecError(str(error))):
        time.sleep(30)  # the case takes longer than its limit


def test_a_model_that_hangs_is_not_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "WAIT_LIMIT_S", 0.1)
    tally = Tally("x")
    tally.attempt("hangs", _hangs, lambda _: None)
    assert (tally.hangs, tally.refused) == (["hangs"], 0)


def _raises() -> None:
    raise RuntimeError("a bug")


def test_failures_are_counted_and_printed_when_they_occur(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tally = Tally("x")
    tally.attempt("bug", _raises, lambda _: None)
    assert capsys.readouterr().out.startswith("x: tracebacks: bug: RuntimeError('a bug')")
    tally.attempt("negative", lambda: -1, lambda size: f"size {size}")
    assert capsys.readouterr().out == "x: wrong: negative: size -1\n"
    tally.attempt("taken", lambda: 1, lambda _: None, must_fail=True)
    tally.attempt("right", lambda: 1, lambda _: None)
    tally.attempt("refused", _refuses, lambda _: None)
    assert (tally.cases, tally.taken, len(tally.tracebacks), len(tally.wrong)) == (5, 1, 1, 2)
    assert tally.refused == 1


def test_an_abandoned_command_leaves_no_answer_to_the_next(tmp_path: Path) -> None:
    assert fork_command(tmp_path, ("-c", "print(1)"), [], 60)[:2] == (0, "1\n")
    with pytest.raises(OverLimitError), limited(0.5):
        fork_command(tmp_path, ("-c", "import time; time.sleep(30)"), [], 60)
    assert fork_command(tmp_path, ("-c", "print(2)"), [], 60)[:2] == (0, "2\n")


def test_a_hang_is_measured_by_cpu_time_and_not_by_the_clock(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        fork_command(tmp_path, ("-c", "while True: pass"), [], 60, 1)
    waits = ("-c", "import time; time.sleep(1.5); print(1)")
    assert fork_command(tmp_path, waits, [], 60, 1)[:2] == (0, "1\n")


class _LosesOne:
    """Reads lines of a server; the first is lost to an interrupt that arrives at that moment."""

    def __init__(self, lines: IO[str]) -> None:
        self.lines, self.is_first = lines, True

    def readline(self) -> str:
        line = self.lines.readline()
        if self.is_first:
            self.is_first = False
            raise OverLimitError
        return line


def test_a_lost_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = fork_server._server()
    monkeypatch.setattr(server, "answers", _LosesOne(server.answers))
    with limited(300), pytest.raises(OverLimitError):
        fork_command(tmp_path, ("-c", "print(1)"), [], 60)
    assert fork_command(tmp_path, ("-c", "print(2)"), [], 60)[:2] == (0, "2\n")

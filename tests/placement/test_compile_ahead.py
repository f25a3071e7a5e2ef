"""Loops are compiled in other processes during a capture, and include all that a run calls."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fxpart.placement import compile_ahead
from fxpart.placement.compile_ahead import compiled_ahead, missing_parts

ROOT = Path(__file__).resolve().parents[2]
_CALLED = """
import json, sys

def called():
    return sorted(
        f"{name}.{key}{signature}"
        for name, module in sys.modules.items() if name.startswith("fxpart.")
        for key, loop in vars(module).items() if getattr(loop, "__module__", "") == name
        for signature in getattr(loop, "signatures", ())
    )
"""
"""Defines a function that returns the loops called so far, with the types of their arguments."""


def _run(code: str, *arguments: str, folder: Path = ROOT) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_a_run_calls_only_what_is_compiled_ahead(tmp_path: Path) -> None:
    ahead = _run(
        f"{_CALLED}\n"
        "from fxpart.placement.compile_ahead import _PARTS\n"
        "for part in _PARTS.values(): part.compile('kl_based', 'latency')\n"
        "print(json.dumps(called()))"
    )
    run = _run(
        f"{_CALLED}\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from runner.app import main\n"
        "code = main()\n"
        "print(json.dumps(called()))\n"
        "sys.exit(code)",
        *("model=gpt2_xl", "mode=kl_based", "devices=2x6gb", "tracking=none"),
        folder=tmp_path,
    )
    calls = set(json.loads(run.splitlines()[-1]))
    assert len(calls) > 5
    assert calls <= set(json.loads(ahead))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list["subprocess.Popen[bytes]"]:
    """The processes that compile."""
    processes: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[call-overload]
            processes.append(self)

    monkeypatch.setattr(compile_ahead, "Popen", Recorded)
    return processes


@pytest.mark.parametrize(
    ("mode", "parts"), [("kl_based", ["search", "cost"]), ("pipeline", ["cost"])]
)
def test_parts_are_missing_until_their_last_loop_is_compiled(
    mode: str, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_ahead, "is_kept", _always(kept=False))
    assert missing_parts(mode) == parts
    monkeypatch.setattr(compile_ahead, "is_kept", _always(kept=True))
    assert missing_parts(mode) == []


def _always(*, kept: bool) -> Callable[..., bool]:
    return lambda _loop: kept


def test_processes_are_waited_for(started: list["subprocess.Popen[bytes]"]) -> None:
    with compiled_ahead(["cost", "search"], "size_based", "latency") as wait:
        wait()
        assert [process.poll() for process in started] == [0, 0]


def test_processes_end_with_the_block(started: list["subprocess.Popen[bytes]"]) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        compiled_ahead(["cost", "search"], "size_based", "latency"),
    ):
        raise KeyboardInterrupt
    assert [process.returncode for process in started] == [-9, -9]


def test_a_process_that_cannot_be_started_is_done_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(compile_ahead, "Popen", refuse)
    with compiled_ahead(["cost"], "size_based", "latency") as wait:
        wait()


def test_a_process_ends_with_the_one_that_started_it() -> None:
    endless = (
        "import time; from fxpart.placement import compile_ahead as c\n"
        "def sleep(*_): print('ready', flush=True); time.sleep(600)\n"
        "c._PARTS['cost'] = c._Part(None, sleep); c.serve('cost', 'single', 'latency')"
    )
    command = [sys.executable, "-c", endless]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            process.stdin.close()
            assert process.wait(60) == 0
        finally:
            process.kill()

import contextlib
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from runner.output.terminal import (
    device_table,
    progress,
    rate_text,
    reserve_text,
    show,
    summary_line,
)
from tests.cost.training_step import step
from tests.runner.scene import fork, long_chain, scene
from tests.runner.shown import shown
from tests.sketch import devices


def test_summary_is_one_line() -> None:
    evaluation = replace(fork().evaluation, lower_bound_s=10.0)
    assert summary_line(evaluation, rate_text(0.125)) == (
        "latency 15.00 s, 0.125 examples/s, 3 partitions on 2 of 3 devices (device 2 idle),"
        " 4 B transferred, lower bound for whole operators 10.00 s (gap 50.0%)"
    )
    assert summary_line(evaluation, rate_text(1.0), with_gap=False).endswith(
        "(device 2 idle), 4 B transferred"
    )
    tokens = rate_text(12.5, "tokens")
    assert "15.00 s, 12.5 tokens/s, 3" in summary_line(evaluation, tokens)
    # A schedule reports a throughput of its own.
    assert "15.00 s, 3 partitions" in summary_line(evaluation, None)
    of_a_token = summary_line(evaluation, None, replicas=4, subject=" of the last token")
    assert of_a_token.startswith(
        "latency of the last token 15.00 s, 3 partitions on 2 of 3 devices"
    )
    assert "(device 2 idle) in each of 4 replicas, 4 B" in of_a_token


def test_summary_names_devices_that_take_turns() -> None:
    what = fork()
    copied = scene(what.graph, what.topology, [0, 1, 2, 2], [(0, 2), (1,), (1,)])
    line = summary_line(copied.evaluation, rate_text(1.0))
    assert "3 partitions on 3 of 3 devices, up to 2 replicas in turn, 4 B transferred" in line
    assert "replicas" not in summary_line(what.evaluation, rate_text(1.0))


def test_devices_in_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(device_table(fork().evaluation), 80, monkeypatch, capsys)
    weights = shown(device_table(fork().evaluation, with_memory=False), 80, monkeypatch, capsys)
    assert [word in " ".join(weights) for word in ("weights", "peak", "free")] == [
        True,
        *[False] * 2,
    ]
    assert "peak" in " ".join(lines)
    assert lines[0] == "3 devices"
    numbers = {line.split()[0]: line.split() for line in lines if line.split()[0] in {"0", "1"}}
    # id, accelerator, partitions, operators, weights, ..., load s, load %, received
    assert numbers["0"][:5] == ["0", "d0", "0", "1", "10"]
    assert numbers["1"][:5] == ["1", "d1", "1-2", "3", "50"]
    assert numbers["1"][-3:] == ["8.00", "53", "4"]
    assert any(line.split()[:4] == ["2", "d2", "-", "0"] for line in lines)


def test_state_and_reserves_are_shown_where_they_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = DeviceSpec("d0", 150, {"float32": 1.0}, 1.0, reserved_bytes=50)
    trained = scene(step(), uniform_topology((spec,) * 2, Link(1.0)), [0] * 6, [(0,)])
    lines = shown(device_table(trained.evaluation), 80, monkeypatch, capsys)
    assert lines[0] == "2 devices, d0, 50 B of each reserved"
    (row,) = [line.split() for line in lines if line.split()[0] == "0"]
    # id, parts, ops, weights, state, peak, memory, free
    assert row[:8] == ["0", "0", "6", "30", "25", "79", "200", "71"]
    assert any("state" in line for line in lines)
    plain = shown(device_table(fork().evaluation), 80, monkeypatch, capsys)
    assert not any("state" in line or "reserved" in line for line in plain)


@pytest.mark.parametrize(
    ("reserved", "expected"),
    [
        ([0, 0], ""),
        ([5], "5 B reserved"),
        ([2**20, 2**20], "1.00 MiB of each reserved"),
        ([0, 3 * 2**19], "0.00 to 1.50 MiB of each reserved"),
    ],
)
def test_reserves_in_words(reserved: list[int], expected: str) -> None:
    assert reserve_text(reserved) == expected


@pytest.mark.parametrize("state_bytes", [0, 246 * 2**30])
@pytest.mark.parametrize("columns", [80, 100, 160])
def test_device_table_fits_without_losing_a_digit(
    columns: int,
    state_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The hardest row: wide numbers everywhere, a long name, many partitions."""
    evaluation = long_chain(900, 300, 3).evaluation
    use = evaluation.devices[1]
    hard = {
        "name": "rtx_pro_6000_blackwell",
        "operators": 12345,
        "weight_bytes": 123 * 2**30 + 2**29,
        "state_bytes": state_bytes,
        "peak_bytes": 188 * 2**30,
        "memory_bytes": 192 * 10**9,
        "load_s": 9.87654,
        "received_bytes": 999 * 2**30,
    }
    for field, value in hard.items():
        object.__setattr__(use, field, value)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = shown(device_table(evaluation), columns, monkeypatch, capsys)
    (line,) = [line for line in lines if line.split()[0] == "1"]
    assert {"rtx_pro_6000_blackwell", "123.50", "188.00", "-9.19", "9.88"} <= set(line.split())
    hidden = next((line for line in lines if "not shown" in line), "")
    of_heading = {"ops": "12345", "received GiB": "999.00", "memory GiB": "178.81"}
    for heading, number in of_heading.items():
        assert (number in line.split()) is (heading not in hidden)
    assert bool(hidden) is (columns == 80 or (columns == 100 and state_bytes > 0))


def test_names_shared_by_all_are_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = long_chain(30, 3, 3).evaluation
    for use in evaluation.devices:
        object.__setattr__(use, "name", "a100_80gb[x]")
    lines = shown(device_table(evaluation), 80, monkeypatch, capsys)
    assert lines[0] == "3 devices, a100_80gb[x]"
    assert sum("a100" in line for line in lines) == 1


def test_many_idle_devices_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    what = fork()
    wide = devices(*range(100, 120))

    spread = scene(what.graph, wide, [0, 0, 0, 0], [(0,)])
    lines = shown(device_table(spread.evaluation), 80, monkeypatch, capsys)
    assert "and 19 idle devices" in lines
    assert not any("d19" in line for line in lines)


def test_a_log_has_no_trailing_blanks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show(device_table(fork().evaluation))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [line.rstrip() for line in lines]


def test_a_long_line_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show("word " * 60 + "[end]")
    assert capsys.readouterr().out == "word " * 60 + "[end]\n"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that `progress` reads, in its only item."""
    now = [100.0]
    monkeypatch.setattr("runner.output.terminal.monotonic", lambda: now[0])
    return now


def test_short_stage_prints_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress("quick"):
        clock[0] += 0.9
    assert capsys.readouterr().err == ""


def test_long_stage_prints_one_line_in_a_log(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("capturing gpt2"):
        clock[0] += 62.34
    assert capsys.readouterr().err == "capturing gpt2 took 62.3 s\n"


def _raise_after(clock: list[float], wait_s: float, error: type[BaseException]) -> None:
    with progress("placing"):
        clock[0] += wait_s
        raise error


@pytest.mark.parametrize(
    ("error", "outcome"), [(KeyError, "failed"), (KeyboardInterrupt, "interrupted")]
)
def test_an_unfinished_stage_is_reported(
    error: type[BaseException],
    outcome: str,
    clock: list[float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(error):
        _raise_after(clock, 1.5, error)
    assert capsys.readouterr().err == f"placing {outcome} after 1.5 s\n"


def on_terminal(wait_s: float, patience_s: float) -> str:
    """Return the terminal output of a stage of that length; check that stdout is empty.

    The stage sleeps, since the output depends on its duration.
    """
    parent, child = pty.openpty()
    code = (
        f"import time, runner.output.terminal as t; t.PATIENCE_S = {patience_s}\n"
        "with t.progress('capturing [gpt2]'):\n"
        f"    time.sleep({wait_s})\n"
        "    print('result')\n"
    )
    environment = {key: value for key, value in os.environ.items() if key not in {"CI", "COLUMNS"}}
    environment["TERM"] = "xterm"
    command = [sys.executable, "-c", code]
    written = b""
    with subprocess.Popen(
        command, stderr=child, stdout=subprocess.PIPE, env=environment
    ) as running:
        os.close(child)
        with contextlib.suppress(OSError):  # how Linux reports that a terminal has ended
            while part := os.read(parent, 4096):
                written += part
        os.close(parent)
        assert running.stdout is not None
        assert running.stdout.read() == b"result\n"
    assert running.returncode == 0
    return written.decode()


def test_terminal_gets_a_spinner_but_only_late() -> None:
    assert on_terminal(0.5, 60.0) == ""
    late = on_terminal(3.0, 0.1)
    assert "capturing [gpt2]" in late
    assert re.search(r"0:00:\d\d", late)
    assert "\x1b[2K" in late
    assert re.search(r"capturing \[gpt2\] took \d+\.\d s\s*$", late)

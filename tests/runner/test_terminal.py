import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from runner.terminal import device_table, progress, show, summary_line, sweep_reasons, sweep_table
from tests.runner.scene import fork, long_chain, scene
from tests.sketch import devices

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table


def shown(table: "Table", columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines of a table in a log (no terminal) of that width."""
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = io.StringIO()
    show(table, stream=stream)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert max(len(line) for line in lines) <= columns
    assert "…" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    return [line for line in lines if line]


def row(mode: str, latency_ms: float | None, **more: object) -> dict[str, object]:
    return {
        "mode": mode,
        "devices": "2x80gb+4x16gb",
        "transfer_rate": "25GB/s",
        "model": "gpt2",
        "latency_ms": latency_ms,
        "peak_memory_gib": 1.5,
        "partitions": 4,
        "gap": 0.25,
        "feasible": latency_ms is not None,
        "reason": None,
        **more,
    }


def test_summary_is_one_line() -> None:
    evaluation = replace(fork().evaluation, lower_bound_s=10.0)
    assert summary_line(evaluation) == (
        "latency 15.00 s, 0.125 inputs/s, 3 partitions on 2 of 3 devices, 4 B transferred,"
        " lower bound 10.00 s (gap 50.0%)"
    )


def test_devices_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(device_table(fork().evaluation), 80, monkeypatch)
    assert lines[0] == "3 devices"
    numbers = {line.split()[0]: line.split() for line in lines if line.split()[0] in {"0", "1"}}
    # id, accelerator, partitions, operators, weights, ..., load s, load %, received
    assert numbers["0"][:5] == ["0", "d0", "0", "1", "10"]
    assert numbers["1"][:5] == ["1", "d1", "1-2", "3", "50"]
    assert numbers["1"][-3:] == ["8.00", "53", "4"]
    assert any(line.split()[:4] == ["2", "d2", "-", "0"] for line in lines)


def test_sizes_say_which(monkeypatch: pytest.MonkeyPatch) -> None:
    what = long_chain(30, 3, 3)
    binary = "\n".join(shown(device_table(what.evaluation), 80, monkeypatch))
    decimal = "\n".join(shown(device_table(what.evaluation, binary=False), 80, monkeypatch))
    assert "976.56" in binary  # 10^6 bytes
    assert "KiB" in binary
    assert "1.00" in decimal
    assert "MB" in decimal


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_device_table_fits_without_losing_a_digit(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hardest row: wide numbers everywhere, a long name, many partitions."""
    evaluation = long_chain(900, 300, 3).evaluation
    use = evaluation.devices[1]
    hard = {
        "name": "rtx_pro_6000_blackwell",
        "operators": 12345,
        "weight_bytes": 123 * 2**30 + 2**29,
        "peak_bytes": 188 * 2**30,
        "memory_bytes": 192 * 10**9,
        "load_s": 9.87654,
        "received_bytes": 999 * 2**30,
    }
    for field, value in hard.items():
        object.__setattr__(use, field, value)
    lines = shown(device_table(evaluation), columns, monkeypatch)
    (line,) = [line for line in lines if line.split()[0] == "1"]
    for number in ("12345", "123.50", "188.00", "178.81", "-9.19", "999.00"):
        assert number in line.split()


def test_names_that_all_share_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = long_chain(30, 3, 3).evaluation
    for use in evaluation.devices:
        object.__setattr__(use, "name", "a100_80gb[x]")
    lines = shown(device_table(evaluation), 80, monkeypatch)
    assert lines[0] == "3 devices, a100_80gb[x]"
    assert sum("a100" in line for line in lines) == 1


def test_many_idle_devices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    what = fork()
    wide = devices(*range(100, 120))

    spread = scene(what.graph, wide, [0, 0, 0, 0], [(0,)])
    lines = shown(device_table(spread.evaluation), 80, monkeypatch)
    assert lines[-1].strip() == "and 19 idle devices"
    assert not any("d19" in line for line in lines)


def test_sweep_is_ranked_with_the_infeasible_last(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        row("single", None, reason="needs 90 GB, the largest device has 80 GB"),
        row("size_based", 12.5),
        row("cost_aware", 1012.25),
        row("optimal", 12.25),
        row("kl_based", 12.25, devices="6x24gb"),
        row("aot_based", None, feasible=None, reason="KeyError"),
    ]
    lines = shown(sweep_table(rows), 80, monkeypatch)
    assert lines[0] == "6 runs, model=gpt2, transfer_rate=25GB/s"
    table = [line.split() for line in lines[4:-1]]
    assert [cells[:4] if cells[0] == "*" else cells[:3] for cells in table] == [
        ["*", "kl_based", "6x24gb", "12.250"],
        ["*", "optimal", "2x80gb+4x16gb", "12.250"],
        ["size_based", "2x80gb+4x16gb", "12.500"],
        ["cost_aware", "2x80gb+4x16gb", "1,012.250"],
        ["single", "2x80gb+4x16gb", "infeasible"],
        ["aot_based", "2x80gb+4x16gb", "failed"],
    ]
    assert table[0][-3:] == ["25.0", "1.500", "4"]
    assert lines[-1] == "* lowest latency"
    assert sweep_reasons(rows) == [
        "model=gpt2 mode=single devices=2x80gb+4x16gb transfer_rate=25GB/s:"
        " needs 90 GB, the largest device has 80 GB",
        "model=gpt2 mode=aot_based devices=2x80gb+4x16gb transfer_rate=25GB/s: KeyError",
    ]


def test_each_model_has_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("a", 5.0), row("b", 3.0), row("a", 50.0, model="llama"), row("b", 60.0, model="x")]
    lines = shown(sweep_table(rows), 100, monkeypatch)
    starred = [line.split()[1:3] for line in lines[:-1] if line.split()[0] == "*"]
    assert starred == [["gpt2", "b"], ["llama", "a"], ["x", "b"]]
    assert lines[-1] == "* lowest latency for its model"


def test_sweep_of_nothing_and_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(sweep_table([]), 80, monkeypatch)[0] == "0 runs"
    alone: list[Mapping[str, object]] = [{"mode": "single", "feasible": False}]
    lines = shown(sweep_table(alone), 80, monkeypatch)
    assert "infeasible" in lines[-1]
    assert sweep_reasons(alone) == ["mode=single: infeasible"]


def test_a_long_line_stays_one_line() -> None:
    stream = io.StringIO()
    show("word " * 60 + "[end]", stream=stream)
    assert stream.getvalue() == "word " * 60 + "[end]\n"


def test_short_stage_says_nothing() -> None:
    stream = io.StringIO()
    with progress("quick", stream=stream):
        pass
    assert stream.getvalue() == ""


def test_long_stage_says_one_line_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.terminal.PATIENCE_S", 0.05)
    stream = io.StringIO()
    with progress("capturing gpt2", stream=stream):
        time.sleep(0.1)
    assert re.fullmatch(r"capturing gpt2 took 0\.[1-9] s\n", stream.getvalue())


def test_stage_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.terminal.PATIENCE_S", 0.0)
    stream = io.StringIO()
    with pytest.raises(KeyError), progress("placing", stream=stream):
        raise KeyError
    assert re.fullmatch(r"placing failed after 0\.\d s\n", stream.getvalue())


def on_terminal(wait_s: float, patience_s: float) -> str:
    """Return what a stage of that length writes to a real terminal; check that stdout is left."""
    parent, child = pty.openpty()
    code = (
        f"import time, runner.terminal as t; t.PATIENCE_S = {patience_s}\n"
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
        with contextlib.suppress(OSError):  # how Linux says that a terminal has ended
            while part := os.read(parent, 4096):
                written += part
        os.close(parent)
        assert running.stdout is not None
        assert running.stdout.read() == b"result\n"
    assert running.returncode == 0
    return written.decode()


def test_terminal_gets_a_spinner_but_only_late() -> None:
    assert on_terminal(0.5, 60.0) == ""
    late = on_terminal(1.2, 0.1)
    assert "capturing [gpt2]" in late
    assert "0:00:0" in late
    assert "\x1b[2K" in late
    assert re.search(r"capturing \[gpt2\] took 1\.\d s\s*$", late)

"""The command run once, in a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.runner.command import COMMAND, OWN, SMALL, run, tracked_runs


def test_one_run_leaves_files_and_a_finished_run(folder: Path) -> None:
    done = run(folder, *OWN, SMALL, "mode=kl_based", "hydra.run.dir=outputs/one")
    assert done.code == 0, done.err
    assert "on 2 of 2 devices" in done.out
    out = folder / "outputs" / "one"
    expected = {
        "assignment.json",
        "result.json",
        "memory.svg",
        "partition_graph.svg",
        "trace.json",
        "config",
    }
    assert expected <= {path.name for path in out.iterdir()}
    result = json.loads((out / "result.json").read_text())
    assert result["status"] == "finished"
    (tracked,) = tracked_runs(folder, "tags.kind = 'run'")
    assert tracked.info.status == "FINISHED"
    for name, value in result["metrics"].items():
        assert tracked.data.metrics[name] == pytest.approx(value), name
    headline = {
        "latency_ms",
        "examples_per_s",
        "partitions",
        "devices_used",
        "peak_memory_gib",
        "transfer_gib",
        "lower_bound_ms",
        "optimality_gap_pct",
        "feasible",
        "capture_s",
        "partition_s",
    }
    assert headline <= set(tracked.data.metrics)
    assert tracked.data.params["model"] == "tiny"
    assert tracked.data.params["devices"] == "2x0.06mb"
    assert tracked.data.params["mode"] == "kl_based"
    assert tracked.data.params["transfer_rate"] == "pcie4"
    assert len(tracked.data.tags["config_key"]) == 16
    assert max(d["peak_bytes"] for d in result["devices"]) <= 60_000


def test_a_second_run_takes_the_graph_from_the_cache(folder: Path) -> None:
    once = [*OWN, SMALL, "tracking=none", f"capture.cache_dir={folder}/cache"]
    assert run(folder, *once, "mode=size_based").code == 0
    (entry,) = (folder / "cache").iterdir()
    before = entry.stat().st_mtime_ns
    done = run(folder, *once, "mode=kl_based")
    assert done.code == 0, done.err
    assert list((folder / "cache").iterdir()) == [entry]
    assert entry.stat().st_mtime_ns == before
    assert "dashboard" not in done.out


@pytest.mark.usefixtures("store")
def test_a_model_that_does_not_fit_gets_a_hint(folder: Path) -> None:
    done = run(folder, *OWN, "devices=1x0.06mb", "mode=size_based", "hydra.run.dir=outputs/big")
    assert done.code == 2
    assert "the smallest number of such devices found to hold it is 2" in done.error
    assert "the devices have 1 x 60.00 kB (60000 bytes)" in done.error
    result = json.loads((folder / "outputs" / "big" / "result.json").read_text())
    assert result["status"] == "infeasible"
    assert not (folder / "outputs" / "big" / "assignment.json").exists()


def test_help_is_printed_by_hydra(folder: Path) -> None:
    ours = run(folder, "--help", "mode=single")
    hydras = run(folder, "--help", "--run", "mode=single")  # with a flag: its own help
    assert ours == hydras
    assert ours.code == 0
    assert "mode=kl_based " in ours.out
    assert "name: single" in ours.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mode=kl_base"], "mode=kl_base does not exist; nearest: kl_based"),
        (["model=gpt3"], "model=gpt3 does not exist; nearest: gpt2"),
        (["devices=4x16"], "size '16' has no unit"),
        (["transfer_rate=pcie9"], "nearest: pcie5"),
        (["model.batch=3"], "model.batch does not exist; in model, nearest: batch_size"),
        (["model.batch_size=abc"], "model.batch_size=abc must be a whole number"),
        (["mode.max_pass=3"], "no option 'max_pass'; nearest: max_passes"),
        (["+speed=3"], "speed does not exist"),
        (
            ["saturate_host=true"],
            "saturate_host does not exist; did you mean devices.saturate_host?",
        ),
        (["model=transformers"], "neither an architecture nor a factory"),
        (["latency.compute_efficiency=2"], "must be in (1e-06, 1], got 2.0"),
        (
            ["++devices.pools.0.efficiency={gem: {float32: 1}}"],
            "devices.pools: rtx_a4000: efficiency.gem does not exist; nearest: gemm",
        ),
        (["devices=4x16gb,8x16gb"], "add -m for a sweep"),
        (["latency.op_overhead_s=nan"], "latency.op_overhead_s must be between"),
        (["accelerator=h100"], "write devices=1xh100"),
        (["hydra.run.dir=tiny.py/below"], "cannot write tiny.py/below: Not a directory"),
    ],
)
def test_a_mistake_in_the_configuration_is_one_line(
    folder: Path, arguments: list[str], message: str
) -> None:
    done = run(folder, *arguments, "tracking=none")
    assert done.code == 2
    assert message in done.error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.factory=tiny:bulid"], "nearest: build"),
        (["model.factory=tiny:broken"], "cannot be captured by torch.export"),
        (["model.factory=tiny:build", "model.factory_args.depth=3"], "depth"),
        (["model.factory=tiny"], "package.module:function"),
    ],
)
def test_a_mistake_in_the_model_is_one_line(
    folder: Path, arguments: list[str], message: str
) -> None:
    done = run(folder, "model=custom", *arguments, "tracking=none")
    assert done.code == 2
    assert message in done.error


def test_a_users_own_conf_adds_a_model(folder: Path) -> None:
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "mine.yaml").write_text(
        "name: mine\nfactory: tiny:build\nfactory_args: {layers: 2}\n"
    )
    done = run(folder, "model=mine", "devices=1x16gb", "mode=single", "tracking=none")
    assert done.code == 0, done.err
    assert "1 partition" in done.out


@pytest.mark.usefixtures("store")
def test_the_main_job(folder: Path) -> None:
    done = run(folder, "mode=kl_based", "devices=4x16gb", "hydra.run.dir=outputs/main")
    assert done.code == 0, done.err
    out = folder / "outputs" / "main"
    result = json.loads((out / "result.json").read_text())
    metrics, used = result["metrics"], result["devices"]
    # 13,015,864,320 parameters of 2 bytes, and a table of 64 floats for rotary positions.
    assert metrics["weights_gib"] * 2**30 == 2 * 13_015_864_320 + 64 * 4
    assert sum(device["weight_bytes"] for device in used) >= 26e9
    assert all(device["peak_bytes"] <= 16_000_000_000 for device in used)
    placed = json.loads((out / "assignment.json").read_text())
    names = [name for partition in placed["partitions"] for name in partition["operators"]]
    assert len(names) == len(set(names)) == metrics["operators"]
    assert metrics["lower_bound_ms"] < metrics["latency_ms"]
    # The least to compute: 2 FLOPs for each matrix weight and token, at the peak rate.
    assert metrics["latency_ms"] > 2 * 12.8e9 * 2048 / 76.7e12 / 4 * 1e3


@pytest.mark.usefixtures("store")
def test_a_broken_store_does_not_lose_the_result(folder: Path) -> None:
    model = ["model=custom", "model.factory=tiny:spoils_the_store", "capture.use_cache=false"]
    done = run(folder, *model, SMALL, "reserve=none", "hydra.run.dir=outputs/kept")
    assert done.code == 2
    assert done.error.startswith("tracking at sqlite:")
    assert "on 2 of 2 devices" in done.out
    result = json.loads((folder / "outputs" / "kept" / "result.json").read_text())
    assert (result["status"], result["error"]) == ("finished", done.error)
    assert result["metrics"]["partitions"] == 2
    assert (folder / "outputs" / "kept" / "assignment.json").exists()


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


SLOW = """
import time
from pathlib import Path

def place(problem, order=0):
    Path("started").touch()
    time.sleep(300)  # longer than any test waits: it must be interrupted

def build(batch_size, dtype):
    place(None)
"""
CAPTURES = ["model.factory=slow:build", "capture.use_cache=false"]


def _ended_by(
    send: Callable[[subprocess.Popen[str]], None], folder: Path, arguments: Sequence[str]
) -> tuple[int, str]:
    """Return the exit code and stderr of a command that gets a signal while it places a model.

    With `CAPTURES` it builds one. Else its graph is known, so that it imports no torch.
    """
    (folder / "slow.py").write_text(SLOW)
    slow = ("mode=custom", "mode.function=slow:place")
    with subprocess.Popen(
        [sys.executable, *COMMAND, *OWN, SMALL, *slow, *arguments],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        # Tests run in the background ignore interrupts, and children inherit that.
        preexec_fn=_heed_interrupts,  # noqa: PLW1509 - no other thread forks here
    ) as running:
        deadline = time.monotonic() + 120
        try:
            while not (folder / "started").exists() and time.monotonic() < deadline:
                assert running.poll() is None
                time.sleep(0.05)  # between checks: the file says that the run is under way
            assert (folder / "started").exists()
            send(running)
            _, err = running.communicate(timeout=60)
        finally:
            running.kill()
    return running.returncode, err


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("sent", "code", "message", "arguments"),
    [
        (signal.SIGINT, 130, "interrupted", CAPTURES),
        (
            signal.SIGTERM,
            143,
            "terminated: 0 of 2 jobs done; the same command resumes it",
            ["-m", "+mode.args.order=0,1"],
        ),
    ],
    ids=["run", "sweep"],
)
def test_a_signal_ends_the_run_as_killed(
    folder: Path, sent: signal.Signals, code: int, message: str, arguments: list[str]
) -> None:
    ended, err = _ended_by(lambda running: running.send_signal(sent), folder, arguments)
    assert ended == code
    assert err.splitlines()[-1] == message
    assert "Traceback" not in err
    kept = tracked_runs(folder)
    assert [run.info.status for run in kept] == ["KILLED"] * (2 if "-m" in arguments else 1)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_all_processes_ends_the_run_as_killed(
    folder: Path, sent: signal.Signals, code: int
) -> None:
    # As by a terminal or a batch system, while another process imports MLflow.
    ended, err = _ended_by(lambda running: os.killpg(running.pid, sent), folder, [])
    assert ended == code
    assert "Traceback" not in err
    assert not list((folder / "outputs").glob("mlflow.db-*"))  # closed, nothing to recover
    assert [run.info.status for run in tracked_runs(folder)] == ["KILLED"]


def test_the_version_names_fxpart_and_hydra(folder: Path) -> None:
    ours, hydras = run(folder, "--version").out.splitlines()
    assert re.fullmatch(r"fxpart \d+\.\d+.*", ours)
    assert hydras.startswith("Hydra ")

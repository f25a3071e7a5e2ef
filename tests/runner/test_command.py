"""The command as a user runs it: real processes, a real MLflow store, a model of one's own."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MODEL = """
import torch
from torch import nn

def build(batch_size, dtype, width=64, layers=6):
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*blocks).to(dtype), (torch.zeros(batch_size, width, dtype=dtype),)

def broken(batch_size, dtype):
    class Broken(nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x
    return Broken(), (torch.zeros(batch_size),)
"""
OWN = ["model=custom", "model.factory=tiny:build", "model.name=tiny"]
# A layer holds 64 x 64 + 64 floats = 16,640 bytes, six of them 99,840; so 0.06 MB holds three.
SMALL = "devices=2x0.06mb"


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that a mistake is."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0].removeprefix("error: ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a model in it, and an MLflow store after the first run."""
    made = tmp_path_factory.mktemp("user")
    (made / "tiny.py").write_text(MODEL)
    return made


def run(folder: Path, *arguments: str) -> Done:
    """Run the command in `folder`."""
    done = subprocess.run(
        [sys.executable, "-m", "runner", *arguments],
        cwd=folder,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def _runs(folder: Path, filter_string: str = "") -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'outputs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fxpart")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], filter_string))


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
    (tracked,) = _runs(folder, "tags.kind = 'run'")
    assert tracked.info.status == "FINISHED"
    for name, value in result["metrics"].items():
        assert tracked.data.metrics[name] == pytest.approx(value), name
    headline = {
        "latency_ms",
        "throughput_per_s",
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
    assert "config_key" in tracked.data.tags
    assert max(d["peak_bytes"] for d in result["devices"]) <= 60_000


def test_a_second_run_takes_the_graph_from_the_cache(folder: Path) -> None:
    entries = list((folder / "cache" / "fxpart").iterdir())
    assert len(entries) == 1
    before = entries[0].stat().st_mtime_ns
    done = run(folder, *OWN, SMALL, "mode=size_based", "tracking=none")
    assert done.code == 0, done.err
    assert entries[0].stat().st_mtime_ns == before
    assert "dashboard" not in done.out


def test_a_sweep_ranks_its_jobs_and_goes_on_after_infeasible_ones(folder: Path) -> None:
    done = run(
        folder,
        "-m",
        *OWN,
        "mode=single,size_based",
        "devices=1x0.06mb,2x0.06mb",
        "hydra.sweep.dir=outputs/swept",
    )
    assert done.code == 0, done.err
    assert done.out.count("infeasible") >= 3
    assert "* lowest latency" in done.out
    parents = _runs(folder, "tags.kind = 'sweep'")
    assert [parent.info.status for parent in parents] == ["FINISHED"]
    children = _runs(folder, f"tags.mlflow.parentRunId = '{parents[0].info.run_id}'")
    by_status = sorted(child.info.status for child in children)
    assert by_status == ["FAILED", "FAILED", "FAILED", "FINISHED"]
    for child in children:
        feasible = child.info.status == "FINISHED"
        assert child.data.metrics["feasible"] == float(feasible)
        assert ("error" in child.data.tags) is not feasible


def test_what_does_not_fit_says_what_would(folder: Path) -> None:
    done = run(folder, *OWN, "devices=1x0.06mb", "mode=size_based", "hydra.run.dir=outputs/big")
    assert done.code == 2
    assert "the smallest number of such devices found to hold it is 2" in done.error
    assert "the devices have 1 x 60.00 kB" in done.error
    result = json.loads((folder / "outputs" / "big" / "result.json").read_text())
    assert result["status"] == "infeasible"
    assert not (folder / "outputs" / "big" / "assignment.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mode=kl_base"], "mode=kl_base does not exist; nearest: kl_based"),
        (["model=gpt3"], "model=gpt3 does not exist; nearest: gpt2"),
        (["devices=4x16"], "size '16' has no unit"),
        (["transfer_rate=pcie9"], "nearest: pcie5"),
        (["model.batch=3"], "model.batch does not exist; in model, nearest: batch_size"),
        (["model.batch_size=abc"], "could not be converted to Integer"),
        (["mode.max_pass=3"], "no option 'max_pass'; nearest: max_passes"),
        (["+speed=3"], "speed does not exist"),
        (["model=transformers"], "neither an architecture nor a factory"),
        (["latency.compute_efficiency=2"], "must be in (0, 1], got 2.0"),
        (["devices=4x16gb,8x16gb"], "add --multirun"),
    ],
)
def test_a_mistake_in_the_configuration_is_one_line(
    folder: Path, arguments: list[str], said: str
) -> None:
    done = run(folder, *arguments, "tracking=none")
    assert done.code == 2
    assert said in done.error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model.factory=tiny:bulid"], "nearest: build"),
        (["model.factory=tiny:broken"], "cannot be captured by torch.export"),
        (["model.factory=tiny:build", "model.factory_args.depth=3"], "depth"),
        (["model.factory=tiny"], "package.module:function"),
    ],
)
def test_a_mistake_in_the_model_is_one_line(folder: Path, arguments: list[str], said: str) -> None:
    done = run(folder, "model=custom", *arguments, "tracking=none")
    assert done.code == 2
    assert said in done.error


def test_a_failed_job_in_a_sweep_makes_its_exit_code_2(folder: Path) -> None:
    done = run(folder, "-m", *OWN, "model.batch_size=0,1", SMALL, "tracking=none")
    assert done.code == 2
    assert "batch_size=0 must be a whole number" in done.out
    assert "* lowest latency" in done.out


def test_the_users_own_conf_adds_a_model(folder: Path) -> None:
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "mine.yaml").write_text(
        "name: mine\nfactory: tiny:build\nfactory_args: {layers: 2}\n"
    )
    done = run(folder, "model=mine", "devices=1x16gb", "mode=single", "tracking=none")
    assert done.code == 0, done.err
    assert "1 partition" in done.out


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
    # What must at least be computed: 2 FLOPs for each weight of a matrix and token, at the peak.
    assert metrics["latency_ms"] > 2 * 12.8e9 * 2048 / 76.7e12 / 4 * 1e3

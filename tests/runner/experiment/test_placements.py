"""Placements that are given, copied or kept in whole modules, by the command in its own process."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runner.command import OWN, SMALL, run, tracked_runs


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


@pytest.mark.usefixtures("store")
def test_a_run_is_costed_again_on_other_devices(folder: Path) -> None:
    # The host that starts operators would hide such a small difference.
    own = (*OWN, "runtime=graph")
    first = run(folder, *own, SMALL, "mode=size_based", "hydra.run.dir=outputs/one")
    assert first.code == 0, first.err
    again = ["mode=aot_based", "mode.assignment=outputs/one", "devices=3x0.07mb"]
    done = run(folder, *own, *again, "transfer_rate=1gb", "hydra.run.dir=outputs/two")
    assert done.code == 0, done.err
    assert "on 2 of 3 devices" in done.out
    original, costed_again = (
        _json(folder / f"outputs/{name}/assignment.json") for name in ("one", "two")
    )
    assert original["partitions"] == costed_again["partitions"]
    assert original["modules"] == costed_again["modules"]
    results = [_json(folder / f"outputs/{name}/result.json")["metrics"] for name in ("one", "two")]
    # The same bytes over a link of 1 GB/s in place of 31.5 GB/s.
    assert results[0]["transfer_gib"] == results[1]["transfer_gib"] > 0
    slower_ms = results[0]["transfer_gib"] * 2**30 * (1 / 1e9 - 1 / 31.5e9) * 1e3
    assert results[1]["latency_ms"] == pytest.approx(results[0]["latency_ms"] + slower_ms)
    kept = tracked_runs(folder, "params.mode = 'aot_based'")
    assert kept[0].data.params["mode.assignment"] == "outputs/one"


@pytest.mark.usefixtures("store")
def test_modules_are_placed_by_hand_and_a_plan_that_does_not_fit_is_a_failed_run(
    folder: Path,
) -> None:
    by_hand = [*OWN, SMALL, "mode=aot_based", "hydra.run.dir=outputs/hand"]
    done = run(folder, *by_hand, "mode.modules={0: 1, 1: 1, *: 0}")
    assert done.code == 2
    # Four of the six layers of 16,640 bytes, and the live tensors, on device 0 of 60,000 bytes.
    assert done.error.startswith("aot_based: device 0 (")
    assert "has 60.00 kB (60000 bytes), too little" in done.error
    (kept,) = tracked_runs(folder, "tags.kind = 'run'")
    assert kept.info.status == "FAILED"
    assert kept.data.metrics["feasible"] == 0
    assert "too little" in kept.data.tags["error"]
    assert _json(folder / "outputs/hand/result.json")["status"] == "infeasible"
    done = run(folder, *by_hand, "mode.modules={0: 1, 1: 1, 2: 1, *: 0}", "tracking=none")
    assert done.code == 0, done.err
    modules = _json(folder / "outputs/hand/assignment.json")["modules"]
    assert [modules[str(layer)] for layer in range(6)] == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mode=aot_based"], "neither of mode.assignment=assignment.json and mode.modules="),
        (
            ["mode=aot_based", "mode.assignment=tiny.py"],
            "tiny.py is not a fxpart.assignment file, or it is damaged",
        ),
        (["mode=aot_based", "mode.modules={7: 0, *: 0}"], "names 7, which the model does not"),
        (["mode=aot_based", "mode.modules={*: 2}"], "on device 2, there are 2, numbered from 0"),
        (["mode=sparse_nn", "devices=1x0.06mb+1x0.05mb"], "needs devices of equal memory"),
        (["mode=sparse_nn"], "this model has no embedding operators"),
        (["granularity=modules"], "granularity=modules does not exist; nearest: module"),
        (["devices.saturate=true"], "saturate does not exist; in devices, nearest: saturate_host"),
    ],
)
def test_a_mistake_in_a_placement_is_one_line(
    folder: Path, arguments: list[str], message: str
) -> None:
    done = run(folder, *OWN, SMALL, *arguments, "tracking=none")
    assert done.code == 2
    assert message in done.error


@pytest.mark.usefixtures("store")
def test_granularity_and_copies_are_swept_like_any_other_key(folder: Path) -> None:
    swept = ["granularity=operator,1", "devices.saturate_host=false,true", "devices=4x0.06mb"]
    done = run(folder, "-m", *OWN, *swept, "mode=size_based", "hydra.sweep.dir=outputs/swept")
    assert done.code == 0, done.err
    heading = done.out.partition("─")[0].split()
    assert {"granularity", "saturate", "host"} <= set(heading)
    jobs = [folder / f"outputs/swept/{i}_tiny_4x0.06mb_size_based" for i in range(4)]
    replicas = [_json(job / "result.json")["metrics"]["replicas"] for job in jobs]
    assert replicas == [1, 2, 1, 2]
    throughput = [_json(job / "result.json")["metrics"]["examples_per_s"] for job in jobs]
    assert throughput[1] == pytest.approx(2 * throughput[0])
    # Cut between two operators of a layer, or between layers: then each layer has one device.
    whole = _json(jobs[2] / "assignment.json")["modules"]
    assert all(isinstance(whole[str(layer)], int) for layer in range(6))
    kept = tracked_runs(folder, "params.granularity = '1'")
    assert {run.data.params["devices.saturate_host"] for run in kept} == {"False", "True"}


def test_a_grouping_too_coarse_to_fit_suggests_a_finer_one_that_fits(folder: Path) -> None:
    done = run(
        folder,
        *["model=custom", "model.factory=tiny:nested", "model.name=nested", "granularity=1"],
        *[SMALL, "reserve=none", "tracking=none", "mode=kl_based"],
        "hydra.run.dir=outputs/coarse",
    )
    assert done.code == 2
    assert done.error.endswith("; granularity=operator makes it fit")
    assert _json(folder / "outputs/coarse/result.json")["status"] == "infeasible"

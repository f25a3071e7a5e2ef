"""``python -m runner.recommend`` as users run it: its best plan is the best of all single runs."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fxpart.errors import InfeasibleError, NotApplicableError
from runner.config.schema import Config, ModeConfig, ScheduleConfig
from runner.experiment.experiment import plan
from runner.experiment.headline import headline
from runner.experiment.model_spec import model_spec
from tests.runner.command import Done, run, tracked_runs
from tests.runner.composed import TINY_LLAMA, read

TRAINING = (*TINY_LLAMA, "phase=training", "devices=2x16gb")
SHARED = {"sequence_parallel": False, "context_parallel": 1}
TIMES = ("capture_s", "partition_s")
RECOMMEND = ("-m", "runner.recommend")
# In one process: others would spend longer on imports than the search of a tiny model takes.
ALONE = (
    "-c",
    """
import sys
from runner.recommend import __main__, command
assert command._MOST_PROCESSES > 1
command._MOST_PROCESSES = 1
sys.exit(__main__.main())
""",
)


def _recommended(folder: Path, *arguments: str, program: tuple[str, str] = ALONE) -> Done:
    return run(folder, *arguments, program=program)


def _document(folder: Path) -> dict[str, Any]:
    """Return the `recommend.json` of the latest recommendation."""
    path = max(folder.glob("outputs/runs/*_recommend/recommend.json"))
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def _overrides(command: str) -> list[str]:
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "runner"]
    return words[3:]


def _costs(config: Config) -> dict[str, float]:
    values = headline(plan(config, model_spec(config), advises=False))
    return {name: value for name, value in values.items() if name not in TIMES}


def _everything(base: Config) -> Iterator[Config]:
    """Yield all combinations, made without the command's own space."""
    degrees = product((1, 2), (False, True), (1, 2), (1, 2))
    steps = product((0, 1, 3), ("none", "1f1b"), (1, 4), ("single", "pipeline"))
    for (tensor, sequence, data, context), (zero, schedule, count, mode) in product(degrees, steps):
        if tensor * data * context > 2:
            continue
        options = {"schedule": schedule, "microbatches": count} if mode == "pipeline" else {}
        yield replace(
            base,
            model=replace(base.model, batch_size=data),
            tensor_parallel=tensor,
            sequence_parallel=sequence,
            data_parallel=data,
            context_parallel=context,
            zero=zero,
            schedule=ScheduleConfig(schedule),
            microbatches=count,
            mode=ModeConfig(mode, options),
        )


def _first_shared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first row that shards values between layers, and the first that cuts sequences."""
    return [next(row for row in rows if row[name] > n) for name, n in SHARED.items()]


def test_the_best_is_that_of_all_single_runs(folder: Path, store: Path) -> None:
    assert store.is_file()
    space = {
        "checkpointing": "none",
        "schedule": "none,1f1b",
        "microbatches": "1,4",
        "zero": "0,1,3",
        "context_parallel": "1,2",
    }
    small = [f"recommend.space.{name}=[{values}]" for name, values in space.items()]
    done = _recommended(folder, *TRAINING, *small, "recommend.rows=3", program=RECOMMEND)
    assert done.code == 0, done.err
    document = _document(folder)
    # Each plan has exactly the numbers of a run of its command.
    for row in document["plans"][:6]:
        assert _costs(read(*_overrides(row["command"]))) == row["metrics"]
    for row in document["plans"]:
        assert sum(row["time_shares"].values()) == pytest.approx(1.0, abs=1e-6)
    speeds = [row["metrics"]["examples_per_s"] for row in document["plans"]]
    assert speeds == sorted(speeds, reverse=True)
    # A plan left out by a bound is no better than the bound, and not among the best.
    assert document["bounded"]
    for row in [*document["bounded"][:2], *_first_shared(document["bounded"])]:
        assert (
            _costs(read(*_overrides(row["command"])))["examples_per_s"]
            <= row["bound_examples_per_s"]
        )
    assert all(row["bound_examples_per_s"] < speeds[2] for row in document["bounded"])
    # No combination is faster, whether it is in the space or not.
    tried = []
    for config in _everything(read(*TRAINING)):
        try:
            tried.append(_costs(config)["examples_per_s"])
        except (InfeasibleError, NotApplicableError):
            continue
    assert len(tried) > len(speeds) >= 3
    assert max(tried) == speeds[0]
    assert set(speeds) <= set(tried)
    _check_printed(done, document)
    _check_tracked(folder, document)


def _check_printed(done: Done, document: dict[str, Any]) -> None:
    assert document["plans"][0]["command"] in done.out
    best = [" ".join(row["overrides"]) for row in document["plans"][:3]]
    assert re.findall(r"^ +\d+  (mode=.*)$", done.out, re.MULTILINE) == best
    plans = len(document["plans"]) + len(document["bounded"])
    assert document["unfit"] == []
    assert f"proved:    {len(document['plans'])} of {plans} plans were costed; " in done.out
    assert len(re.findall(r"^habit: ", done.out, re.MULTILINE)) == 4


def _check_tracked(folder: Path, document: dict[str, Any]) -> None:
    (parent,) = tracked_runs(folder, "tags.kind = 'sweep'")
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["plans_that_fit"] == len(document["plans"])
    # All that was typed, so that it can be repeated.
    assert "recommend.rows=3" in parent.data.tags["command"]
    assert "model.config.hidden_size=64" in parent.data.tags["command"]
    children = tracked_runs(folder, "tags.kind = 'run'")
    assert all(child.data.tags["mlflow.parentRunId"] == parent.info.run_id for child in children)
    speeds = sorted((child.data.metrics["examples_per_s"] for child in children), reverse=True)
    best = [row["metrics"]["examples_per_s"] for row in document["plans"][:3]]
    assert speeds == pytest.approx(best, rel=1e-6)
    # Without this tag, no sweep takes one of these for a result of its jobs.
    assert not any("config_key" in child.data.tags for child in children)


def test_a_typed_setting_and_a_global_batch_are_kept(folder: Path) -> None:
    typed = ("tensor_parallel=2", "recommend.global_batch=4", "recommend.objective=latency")
    command = (*TINY_LLAMA, "devices=4x16gb", "tracking=none", *typed)
    done = _recommended(folder, *command)
    assert done.code == 0, done.err
    text = max(folder.glob("outputs/runs/*_recommend/recommend.json")).read_text()
    plans = json.loads(text)["plans"]
    assert {row["tensor_parallel"] for row in plans} == {2}
    assert {row["data_parallel"] for row in plans} == {1, 2}
    assert {row["data_parallel"] * row["batch"] * row["microbatches"] for row in plans} == {4}
    assert {row["mode"] for row in plans} >= {"single", "pipeline", "kl_based", "size_based"}
    latencies = [row["metrics"]["latency_ms"] for row in plans]
    assert latencies == sorted(latencies)
    # The command as users run it, with other processes, makes the same file.
    assert _recommended(folder, *command, program=RECOMMEND).code == 0
    files = sorted(folder.glob("outputs/runs/*_recommend/recommend.json"))
    assert [file.read_text() for file in files] == [text, text]


def test_a_plan_that_may_not_fit_says_so(folder: Path) -> None:
    """As the run of the same plan does, on a device between its lower and upper need."""
    model = (*TINY_LLAMA[:-1], "recommend.space.mode=[single]", "tracking=none")
    assert _recommended(folder, *model, "devices=1x4gb").code == 0
    (row,) = _document(folder)["plans"]
    need, most = (row["metrics"][f"device_memory_gib{end}"] for end in ("", "_high"))
    shutil.rmtree(folder / "outputs")
    done = _recommended(folder, *model, f"devices=1x{(need + most) / 2 * 2**30 / 1e9}gb")
    assert done.code == 0
    assert re.search(r"^  1  mode=single  # tight: may not fit$", done.out, re.M)
    assert re.search(r"^safe: +no plan that was costed is sure to fit", done.out, re.M)


def test_the_cheapest_of_several_devices(folder: Path) -> None:
    priced = ("recommend.objective=cost", "price_per_hour={h100: 2.5, t4: 0.4}", "tracking=none")
    small = ("recommend.space.mode=[single]", "recommend.devices=[2xh100,1xt4]")
    done = _recommended(folder, *TINY_LLAMA, *priced, *small)
    assert done.code == 0
    assert list(folder.glob("outputs/runs/*_several_recommend"))
    rows = _document(folder)["plans"]
    prices = [
        (row["devices_idle"] > 0, row["metrics"]["price_per_million_examples"]) for row in rows
    ]
    assert prices == sorted(prices)
    assert (
        len(re.findall(r"^ +\d+  devices=2xh100 .*  # 1 of 2 devices idle$", done.out, re.M)) == 1
    )
    assert {row["devices"] for row in rows} == {"2xh100", "1xt4"}
    # Its host limits it, as it limits the larger one.
    assert rows[0]["overrides"] == ["devices=1xt4", "mode=single"]
    assert _costs(read(*_overrides(rows[0]["command"]))) == rows[0]["metrics"]
    for row in rows:
        price = row["metrics"]["price_per_hour"] / 3600 / row["metrics"]["examples_per_s"] * 1e6
        assert price == pytest.approx(row["metrics"]["price_per_million_examples"])


def test_a_job_of_a_sweep_is_the_best_plan(folder: Path, store: Path) -> None:
    assert store.is_file()
    space = "mode.space={schedule: [none], checkpointing: [none], zero: [0, 3]}"
    sweep = ("-m", *TRAINING, "mode=recommend", space, "mode.objective=throughput,latency")
    done = run(folder, *sweep)
    assert done.code == 0, done.err
    runs = {r.data.params["mode.objective"]: r for r in tracked_runs(folder, "tags.kind = 'run'")}
    small = ("recommend.space.schedule=[none]", "recommend.space.zero=[0,3]")
    for objective, tracked in runs.items():
        settings = (f"recommend.objective={objective}", "recommend.space.checkpointing=[none]")
        assert _recommended(folder, *TRAINING, *small, *settings, "tracking=none").code == 0
        best = _document(folder)["plans"][0]
        for name in ("examples_per_s", "latency_ms", "device_memory_gib"):
            assert tracked.data.metrics[name] == pytest.approx(best["metrics"][name], rel=1e-6)
        assert tracked.data.params["mode"] == "recommend"
        assert tracked.data.params["plan.mode"] == best["mode"]
        assert tracked.data.params.get("data_parallel", "1") == str(best["data_parallel"])
    # The same command finds both completed.
    assert "2 of 2 jobs done (2 before)" in run(folder, *sweep).err
    repeated = run(folder, f"rerun={runs['latency'].info.run_id}")
    (compared,) = (line for line in repeated.out.splitlines() if line.startswith("rerun:"))
    assert "the same as" in compared
    assert compared.endswith("feasible")  # and no input has changed


def test_sequences_are_split_where_layers_are(folder: Path) -> None:
    small = [f"recommend.space.{name}=[none]" for name in ("schedule", "checkpointing")]
    command = (*TRAINING, "tracking=none", "sequence_parallel=true", *small)
    done = _recommended(folder, *command)
    assert done.code == 0, done.err
    plans = _document(folder)["plans"]
    assert {row["tensor_parallel"] for row in plans} == {1, 2}
    for row in plans:
        assert ("sequence_parallel=true" in row["overrides"]) == (row["tensor_parallel"] == 2)
        assert row["overrides"] == [w for w in _overrides(row["command"]) if w not in TRAINING]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("recommend.space.tensor_parallel=[4]", "devices=6x16gb"),
            "must divide the number of devices, there are 6; use 2",
        ),
        (("recommend.space.data_parallel=[3]",), "data_parallel=3 needs that many equal parts"),
        (
            ("recommend.space.tensor_parallel=[8]", "devices=8x16gb", "phase=training"),
            "must divide model.config.num_key_value_heads=4; use 4",
        ),
        (("recommend.space.zero=[3]",), "zero=3 shards a training step over replicas"),
        (("zero=1", "recommend.space.zero=[1]"), "zero=1 fixes what recommend.space.zero varies"),
        (
            ("model.batch_size=8", "recommend.space.batch=[2,4]"),
            "model.batch_size=8 fixes what recommend.space.batch varies",
        ),
        (("sequence_parallel=true", "devices=1x16gb"), "=true is in no plan of this space"),
        (("sequence_parallel=true", "phase=decode"), "splits whole sequences, got phase=decode"),
        (
            ("recommend.global_batch=3", "recommend.space.data_parallel=[2]"),
            "must divide recommend.global_batch=3; use 1 or 3",
        ),
        (("model.seq_len=-1",), "model.seq_len"),
        (("recommend.objective=cost",), "needs the price of rtx_a4000, which its file does not"),
        (("recommend.devices=[1x16gb]",), "fixes what recommend.devices varies; leave out one"),
        (("weights=fp8", "recommend.weights=[int8]"), "weights=fp8 fixes what recommend.weights"),
        (("serving_sweep.batches=[2]",), "serving_sweep.batches=[2] belongs to python -m runner;"),
        (("recommend.kv_cache=[]",), "recommend.kv_cache=[] leaves no plan; give kv_cache, or"),
        (("phase=decode", "context_len=8", "recommend.weights=[int9]"), "weights=int9 does not ex"),
    ],
)
def test_impossible_requests_are_refused_in_one_line(
    folder: Path, arguments: Sequence[str], line: str
) -> None:
    done = _recommended(folder, *TINY_LLAMA, "devices=4x16gb", "tracking=none", *arguments)
    assert done.code == 2
    assert line in done.error
    assert not list(folder.glob("outputs/runs/*"))


def test_where_nothing_fits_the_closest_plan_is_named(folder: Path, store: Path) -> None:
    assert store.is_file()
    done = _recommended(folder, *TINY_LLAMA, "devices=2x0.05mb")
    assert done.code == 2
    assert re.match(r"none of \d+ plans fits; nearest is mode=", done.error)
    (failed,) = tracked_runs(folder)
    assert failed.info.status == "FAILED"
    assert not list(folder.glob("outputs/runs/*"))

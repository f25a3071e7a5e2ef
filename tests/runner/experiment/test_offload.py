"""Tiers as a user writes them, refusals, and the output and files of a run."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fxpart.errors import FxpartError, InfeasibleError
from fxpart.placement.offload.units import STREAMED
from runner.experiment.check import check_all
from runner.experiment.experiment import plan
from runner.experiment.headline import headline
from runner.experiment.memory_report import peak_line
from runner.experiment.model_spec import model_spec
from runner.experiment.objective import objective_line
from runner.experiment.offload import carried_by, configured_tiers, offload_line, offloaded_map
from runner.experiment.result import Result
from runner.experiment.whole_modules import tiered_line
from runner.job.files import write_plan
from runner.job.identity import Choices, JobIdentity, inputs_key
from runner.output.terminal import summary_line
from tests.runner.command import OWN
from tests.runner.composed import composed, read
from tests.runner.refused import refused_line

TINY = (*OWN, "mode=size_based")
"""Six layers of 16,640 bytes."""
KIB = 2**10


def planned(*overrides: str) -> Result:
    config = read(*TINY, *overrides)
    return plan(config, model_spec(config))


def line_of(result: Result, *overrides: str) -> str:
    assert result.offloaded is not None
    return offload_line(read(*TINY, *overrides), result.offloaded)


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def test_tiers_are_given_among_the_devices() -> None:
    config = read("devices=host64gb+2x24gb+nvme0.5tb")
    tiers = configured_tiers(config)
    assert [pool.count for pool in config.devices.pools] == [2]
    assert tiers is not None
    assert tiers.host.memory_bytes == 64 * 10**9
    assert tiers.host.processor is not None
    assert tiers.disk is not None
    assert (tiers.disk.memory_bytes, tiers.disk.bytes_per_s) == (500 * 10**9, 7e9)
    assert configured_tiers(read("devices=2x24gb")) is None


def test_each_device_of_a_tensor_parallel_group_has_a_share_of_the_tiers() -> None:
    tiers = configured_tiers(read("devices=2x24gb+host64gb+nvme0.5tb", "tensor_parallel=2"))
    assert tiers is not None
    assert tiers.disk is not None
    assert (tiers.host.memory_bytes, tiers.host.processor) == (32 * 10**9, None)
    assert (tiers.disk.memory_bytes, tiers.disk.bytes_per_s) == (250 * 10**9, 3.5e9)


def test_devices_of_a_tensor_parallel_group_stream_their_own_parts(here: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = read(
        *("model=transformers", "model.architecture=LlamaForCausalLM", "model.dtype=float32"),
        *(f"+model.config.{key}={value}" for key, value in (sizes | heads).items()),
        *("model.batch_size=1", "phase=decode", "context_len=8", "tensor_parallel=2"),
        *("devices=2x0.2mb+host1mb", "offload=prefetch", "reserve=none", "mode=single"),
    )
    result = plan(config, model_spec(config))
    offloaded, metrics = result.offloaded, headline(result)
    assert offloaded is not None
    streamed = {
        unit.path: unit.weight_bytes
        for unit, way in zip(offloaded.units, offloaded.ways.tolist(), strict=True)
        if way == STREAMED
    }
    assert streamed["model.layers.0.self_attn"] == 4 * 64 * 64 * 4 // 2
    assert streamed["model.layers.0.mlp.up_proj"] == 64 * 128 * 4 // 2
    assert metrics["streamed_gib"] * 2**30 == 2 * sum(streamed.values())
    assert metrics["kv_cache_gib"] * 2**30 == 2 * 4 * 64 * 8 * 4
    left_kib = (10**6 - 2 * sum(streamed.values())) / KIB
    assert f"{left_kib:.2f} KiB of host1mb left" in offload_line(config, offloaded)
    rate = config.transfer_rate.bytes_per_s * config.offload.pinned_share
    assert result.evaluation.latency_s > sum(streamed.values()) / rate


@pytest.mark.parametrize(
    ("memory", "cache", "tools"),
    [
        (0.9, "all", "transformers (cache_implementation=offloaded), FlexGen"),
        (1.04, "auto", "FlexGen; add offload.cache=none for accelerate"),
        (0.4, "auto", "FlexGen"),
        (1.04, "none", ""),
    ],
)
def test_tools_for_offloaded_caches_are_named(
    here: Path, memory: float, cache: str, tools: str
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 32}
    config = read(
        *("model=transformers", "model.architecture=LlamaForCausalLM", "model.dtype=float32"),
        *(f"+model.config.{key}={value}" for key, value in sizes.items()),
        *("model.batch_size=1", "phase=decode", "context_len=200", f"offload.cache={cache}"),
        "transfer_rate.bytes_per_s=1e8",
        *(f"devices=1x{memory}mb+host1mb", "offload=prefetch", "reserve=none", "mode=single"),
    )
    result = plan(config, model_spec(config))
    assert result.offloaded is not None
    assert carried_by(result.offloaded) == tools


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("host64gb", "has only tiers, which store weights of devices; add a device"),
        ("1x24gb+2xhost64gb", "2xhost64gb is one tier; write host64gb"),
        ("1x24gb+host64", "host64: size '64' has no unit"),
        ("1x24gb+nvme9xb", "nvme9xb: size '9xb' has the unknown unit 'xb'"),
        ("1x24gb+host-5gb", "devices=1x24gb+host-5gb: host-5gb: size '-5gb' must be positive"),
        (
            "1xgpu24gb+host64gb",
            "devices=1xgpu24gb+host64gb: 'gpu' is neither an accelerator nor a tier (host, nvme);"
            " a size alone, such as 24gb, is a device",
        ),
        ("1xh10+host64gb", "devices=1xh10+host64gb: there is no accelerator 'h10'"),
    ],
)
def test_a_wrong_spec_of_tiers_is_refused_in_one_line(spec: str, line: str) -> None:
    assert line in refused_line(lambda: composed(f"devices={spec}"))


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["devices=1x24gb+nvme1tb"], "nvme1tb has no link to a device"),
        (["devices=1x24gb+host1gb+host2gb"], "both of kind host; join them"),
        (
            ["devices=1x24gb+host64gb", "phase=training", "optimizer=none"],
            "leave out optimizer=none or the tier",
        ),
        (
            ["devices=1x24gb+host64gb", "phase=training", "latency=profiled"],
            "offload.optimizer=auto updates on the host, but latency=profiled",
        ),
        (["devices=1x24gb+host64gb", "offload.cache=all"], "applies to a step with a cache"),
        (["devices=1x24gb+host64gb", "offload.optimizer=all"], "applies to a training step"),
        (["devices=1x24gb+host64gb", "offload.weights=all"], "applies to a training step"),
        (
            ["devices=1x24gb+host64gb", "offload.weights=all", "offload.optimizer=none"],
            "leave out offload.optimizer=none",
        ),
        (["devices=1x24gb+host64gb", "offload.cache=most"], "offload.cache=most does not exist"),
        (
            ["devices=1x24gb+host64gb", "phase=decode", "offload=host", "offload.cache=all"],
            "offload=host copies nothing",
        ),
        (
            ["devices=2x24gb+host64gb", "tensor_parallel=2", "phase=training"],
            "leave out tensor_parallel=2",
        ),
        (
            ["devices=2x24gb+host64gb", "tensor_parallel=2", "offload=host"],
            "use offload=prefetch, or leave out tensor_parallel",
        ),
        (["devices=2x24gb+host64gb", "context_parallel=2"], "leave out context_parallel=2"),
        (
            ["devices=2x24gb+host64gb", "mode=pipeline", "schedule=gpipe", "microbatches=2"],
            "leave out schedule=gpipe",
        ),
        (["devices=2x24gb", "offload=host"], "devices=2x24gb has none; add one, such as +host64gb"),
        (["devices=2x24gb", "offload.cache=all"], "offload.cache=all needs a tier, but devices"),
        (["devices=2x24gb+host64gb", "offload.pinned_share=2"], "offload.pinned_share=2.0 must"),
    ],
)
def test_runs_that_cannot_stream_are_refused_in_one_line(overrides: list[str], line: str) -> None:
    with pytest.raises(FxpartError) as refused:
        check_all(read("model=gpt2", *overrides))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_model_that_does_not_fit_is_streamed_with_a_note(here: Path) -> None:
    overrides = ("devices=1x0.07mb+host1mb", "offload=prefetch")
    result = planned(*overrides)
    metrics = headline(result)
    # Two copies and values leave room for one or two of the six layers.
    assert metrics["streamed_gib"] * 2**30 in (4 * 16640, 5 * 16640)
    assert metrics["host_memory_gib"] == metrics["streamed_gib"]
    assert metrics["peak_memory_gib"] * 2**30 <= 70_000
    assert metrics["lower_bound_ms"] <= metrics["latency_ms"]
    # The copies take about as long as over the link at the share that they reach.
    copies_s = metrics["streamed_gib"] * 2**30 / (31.5e9 * 0.8)
    assert metrics["latency_ms"] / 1e3 >= copies_s
    line = line_of(result, *overrides)
    assert "streamed 65.00 KiB of 4 modules" in line
    assert f"{(10**6 - 4 * 16640) / KIB:.2f} KiB of host1mb left" in line
    assert "on the host" not in line


def test_times_of_one_kind_of_device_are_refused_for_the_host_or_noted(here: Path) -> None:
    small = "devices=1x0.07mb+host1mb"
    with pytest.raises(FxpartError, match="offload=host computes on the host, but latency=profi"):
        check_all(read(*TINY, small, "offload=host", "latency=profiled"))
    result = planned(small, "latency=profiled")
    line = line_of(result, small, "latency=profiled")
    assert "none on the host, because latency=profiled has no times for it" in line


def test_copies_go_over_pcie_where_devices_have_other_links(here: Path) -> None:
    small = ("devices=1x0.07mb+host1mb", "offload=accelerate", "offload.pageable_share=0.001")
    pcie4, pcie5, nvlink = (
        headline(planned(*small, f"transfer_rate={link}"))["copy_wait_ms"]
        for link in ("pcie4", "pcie5", "nvlink4")
    )
    assert nvlink == pcie4 > pcie5
    stated = planned(*small, "transfer_rate=nvlink4", "devices.tiers.0.bytes_per_s=1e9")
    assert headline(stated)["copy_wait_ms"] > 10 * nvlink > 0


def test_a_model_that_fits_does_not_use_the_tiers(here: Path) -> None:
    result = planned("devices=1x1gb+host1gb")
    assert result.offloaded is None
    assert headline(result) | {"partition_s": 0, "capture_s": 0} == headline(
        planned("devices=1x1gb")
    ) | {"partition_s": 0, "capture_s": 0}


def test_the_map_and_the_tiers_of_modules_are_written(here: Path) -> None:
    overrides = ("devices=1x0.05mb+host0.06mb+nvme1mb", "offload=accelerate")
    config, result = read(*TINY, *overrides), planned(*overrides)
    identity = JobIdentity(Choices("tiny", "size_based", "d", "l"), (), here / "out", here)
    write_plan(config, identity, result, model_spec(config).key())
    entries = json.loads((here / "out" / "device_map.json").read_text())
    document = json.loads((here / "out" / "offload.json").read_text())
    tiers = {unit["module"]: unit["tier"] for unit in document["units"]}
    # The host is full except for what passes through it from the disk, room for a module as well.
    stored = sum(tier == "host" for tier in tiers.values()) * 16640
    assert headline(result)["host_memory_gib"] * 2**30 == stored + 16640
    left = f"{(60_000 - stored - 16640) / KIB:.2f} KiB of host0.06mb left"
    assert f"16.25 KiB of the host's memory, {left}" in line_of(result, *overrides)
    assert {"host", "disk", None} == set(tiers.values())
    words = {"host": "cpu", "disk": "disk", None: 0}
    notes = json.loads((here / "out" / "device_map_notes.json").read_text())
    assert (notes["main_device"], notes["divided_modules"]) == (0, [])
    assert notes["weight_bytes"]["cpu"] == stored
    assert entries == {module.split(".")[0]: words[tier] for module, tier in tiers.items()}
    assert [copy["bytes"] for copy in document["copies"]] == [16640] * len(document["copies"])


def test_a_plan_with_tiers_names_the_tools_that_can_carry_it_out(here: Path) -> None:
    overrides = ("devices=2x0.04mb+host1mb", "offload=accelerate")
    config, result = read(*TINY, *overrides), planned(*overrides)
    graph, offloaded = result.captured.graph, result.offloaded
    assert offloaded is not None
    mapped = offloaded_map(offloaded, graph)
    assert mapped.entries == {"0": 0, "1": 1, **dict.fromkeys("2345", "cpu")}
    assert mapped.main_device == 1  # which runs all that are copied
    assert tiered_line(config, offloaded, graph) == (
        "accelerate (device_map.json with cpu and disk, which copies a module and waits)"
    )
    # The same for a module whose own operator adds a weight on one device to a value on another.
    cut = int(np.flatnonzero(np.diff(mapped.device_of))[0]) + 1
    modules = tuple("block" if op == cut else f"block.{op}" for op in range(graph.n_ops))
    weights = tuple(f"block.{op}.weight" for op in graph.users.tolist())
    apart = replace(graph, weight_names=weights, modules=modules)
    assert tiered_line(config, offloaded, apart) == (
        "nothing yet; 1 module is cut through; add granularity=2 for accelerate"
    )


def test_modules_planned_on_the_host_are_copied_by_accelerate(here: Path) -> None:
    overrides = ("devices=2x0.04mb+host1mb", "offload=host")
    result = planned(*overrides)
    assert result.offloaded is not None
    assert tiered_line(read(*TINY, *overrides), result.offloaded, result.captured.graph) == (
        "accelerate (device_map.json with cpu and disk, which copies modules planned on the host to"
        " device 0 too)"
    )


def test_the_key_of_a_job_covers_its_tiers_and_their_use(here: Path) -> None:
    keys = [
        inputs_key(config, model_spec(config).key())
        for config in (
            read(*TINY, "devices=1x1gb"),
            read(*TINY, "devices=1x1gb", "offload.pinned_share=0.5"),  # no effect without tiers
            read(*TINY, "devices=1x1gb+host1gb"),
            read(*TINY, "devices=1x1gb+host2gb"),
            read(*TINY, "devices=1x1gb+host1gb", "offload=prefetch"),
        )
    ]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


def test_remedies_are_tried_with_the_tiers(here: Path) -> None:
    trained = ("phase=training", "optimizer=adamw")
    small_host = (*trained, "offload.optimizer=all", "devices=1x1mb+host0.1mb")
    with pytest.raises(InfeasibleError, match="do not fit host") as refused:
        planned(*small_host)
    assert str(refused.value).endswith("; devices=1x1mb+host64gb makes it fit")
    # Two of these devices hold the step with only states on the host.
    small = (*trained, "offload.activations=none", "offload.weights=none")
    with pytest.raises(InfeasibleError, match=r"; devices=2x0.1mb\+host10mb makes it fit"):
        planned(*small, "devices=1x0.1mb+host10mb")
    assert planned(*small, "devices=2x0.1mb+host10mb").offloaded is not None


def test_a_host_that_is_too_small_is_refused_with_its_least_contents(here: Path) -> None:
    trained = (
        *("phase=training", "optimizer=adamw"),
        "offload.activations=none",
        "offload.weights=none",
    )
    devices = "devices=1x0.3mb"
    enough = planned(*trained, f"{devices}+host10mb").offloaded
    assert enough is not None
    assert 0 < enough.hosted_bytes < sum(unit.weight_bytes for unit in enough.units)
    with pytest.raises(InfeasibleError, match=r"do not fit host0\.001mb") as refused:
        planned(*trained, f"{devices}+host0.001mb")
    assert refused.value.needed_bytes == enough.hosted_bytes


@pytest.mark.parametrize(("objective", "unit"), [("memory", "KiB"), ("energy", "J")])
def test_no_bound_is_given_beside_a_host_that_computes(
    here: Path, objective: str, unit: str
) -> None:
    trained = ("phase=training", "optimizer=adamw", "offload.optimizer=all")
    result = planned(*trained, "devices=1xt4+host1mb", f"objective={objective}")
    metrics = headline(result)
    gap = f"{objective}_gap_pct"
    assert metrics.keys().isdisjoint({gap, "memory_bound_gib", "energy_bound_j"})
    line = objective_line(result.problem, result.evaluation, result.n_devices)
    assert f" {unit} " in line
    assert "bound" not in line
    if objective == "memory":
        assert f"{metrics['peak_memory_gib'] * 2**20:.2f} KiB on the fullest device" in line


def test_a_training_step_keeps_its_states_on_the_host(here: Path) -> None:
    trained = ("phase=training", "optimizer=adamw", "offload.optimizer=all")
    overrides = (*trained, "devices=1x1mb+host1mb")
    result = planned(*overrides)
    assert result.offloaded is not None
    assert [use.state_bytes for use in result.evaluation.devices] == [0, 6 * (2 * 16640 + 2 * 4)]
    metrics, device = headline(result), result.evaluation.devices[0]
    assert metrics["pushed_gib"] * 2**30 == 6 * 16640
    # Sizes and counts are those of the device, which has no states, though the host holds more.
    assert metrics["peak_memory_gib"] * 2**30 == device.peak_bytes
    assert device.peak_bytes < result.evaluation.devices[1].peak_bytes
    assert metrics["static_memory_gib"] * 2**30 == device.static_bytes
    assert metrics["optimizer_state_gib"] == 0.0 < metrics["gradients_gib"]
    assert metrics["devices_used"] == 1.0
    assert metrics["device_memory_gib"] == result.device_memory[0].needed.expected / 2**30
    assert peak_line(result.device_peaks).startswith("device 0 holds")
    line = summary_line(result.evaluation, None, n_devices=result.n_devices)
    assert "on 1 of 1 device and the host, " in line
    assert "states and updates on the host 390.05 KiB of 6 modules" in line_of(result, *overrides)
    config = read(*TINY, *overrides)
    identity = JobIdentity(Choices("tiny", "size_based", "d", "l"), (), here / "out", here)
    write_plan(config, identity, result, model_spec(config).key())
    assert json.loads((here / "out" / "device_map.json").read_text()) == {"": 0}
    assert carried_by(result.offloaded).startswith("DeepSpeed (zero_optimization.offload_optim")
    offloaded = result.offloaded
    saved = replace(
        offloaded, ways=np.zeros_like(offloaded.ways), tier_bytes=np.ones_like(offloaded.ways)
    )
    assert carried_by(saved).startswith("activations by torchtune (enable_activation_offloading)")
    two = planned(*trained, "devices=2x0.1mb+host1mb").offloaded
    assert two is not None
    assert carried_by(two) == (
        "nothing yet: no engine keeps states on the host for a step on 2 devices"
    )
    gathered = (*trained, "offload.weights=all", "devices=1x1mb+host1mb")
    step = planned(*gathered)
    assert step.offloaded is not None
    assert step.evaluation.devices[0].weight_bytes == 0
    # Forward and backward copy each layer: the last one once for both, and of the first, whose
    # inputs need no gradient, the backward needs no weight.
    assert headline(step)["streamed_gib"] * 2**30 == (2 * 6 - 2) * 16640
    assert "weights copied block by block, 162.50 KiB a step" in line_of(step, *gathered)
    assert "offload_param" in carried_by(step.offloaded)

"""The runtime decides which tensors stay in memory, and what waits for the host."""

import numpy as np
import pytest

from fxpart.core.fusion import LOSS, blocks_of, kernel_count
from fxpart.errors import FxpartError, SpecError
from runner.experiment.check import check
from runner.experiment.experiment import plan
from runner.experiment.model_spec import model_spec
from runner.experiment.runtime import host_launch_s, host_line
from runner.experiment.subject_line import is_mean_of_outputs
from runner.experiment.whole_modules import carrier_line
from tests.runner.composed import read

_GPT2 = (
    "model=gpt2",
    "model.batch_size=2",
    "model.seq_len=16",
    "model.config={n_layer:2,n_embd:32,n_head:2,vocab_size:100}",
    "mode=single",
    "devices=1x16gb",
)


def test_eager_holds_more_and_waits_for_the_host() -> None:
    eager, graph = read(*_GPT2), read(*_GPT2, "runtime=graph")
    eager_plan, plain = (plan(config, model_spec(config)) for config in (eager, graph))
    assert eager.runtime.name == "eager"
    eager_bytes, plain_bytes = (
        result.evaluation.devices[0].peak_bytes for result in (eager_plan, plain)
    )
    assert eager_bytes > plain_bytes
    operators = int((eager_plan.problem.graph.moved_bytes > 0).sum())
    # So small operators end as soon as they are started.
    assert eager_plan.evaluation.latency_s == pytest.approx(
        operators * host_launch_s(eager), rel=0.05
    )
    assert plain.evaluation.latency_s < eager_plan.evaluation.latency_s / 3
    assert eager_plan.evaluation.lower_bound_s == eager_plan.evaluation.latency_s


@pytest.mark.parametrize("phase", ["inference", "training"])
def test_compiled_starts_kernels_at_once_and_stores_nothing_inside(phase: str) -> None:
    graph, compiled = (
        plan(config, model_spec(config))
        for config in (
            read(*_GPT2, f"phase={phase}", f"runtime={name}") for name in ("graph", "compiled")
        )
    )
    before, after = graph.problem.graph, compiled.problem.graph
    assert after.names == before.names
    launches = (kernel_count(before), kernel_count(after))
    assert launches[1] < 0.75 * launches[0]
    assert after.moved_bytes.sum() < before.moved_bytes.sum()
    assert compiled.evaluation.latency_s < graph.evaluation.latency_s
    assert compiled.evaluation.devices[0].peak_bytes <= graph.evaluation.devices[0].peak_bytes


@pytest.mark.parametrize("devices", [1, 2])
def test_regions_are_compiled_and_the_rest_runs_in_python(devices: int) -> None:
    mode = "mode=single" if devices == 1 else "mode=pipeline"
    step = (*_GPT2[:-2], f"devices={devices}x16gb", "phase=training", "optimizer=none", mode)
    eager, regional, whole = (
        plan(config, model_spec(config)).problem.graph
        for config in (
            read(*step),
            read(*step, "runtime=compiled", "runtime.regional=true"),
            read(*step, "runtime=compiled"),
        )
    )
    in_block = np.array([bool(block) for block in blocks_of(eager)])
    assert kernel_count(whole) < kernel_count(regional) < kernel_count(eager)
    changed = regional.moved_bytes != eager.moved_bytes
    assert changed.any()
    assert not changed[~in_block].any()
    # The logits in float32 are stored, and Python holds values as it does in eager mode.
    made = eager.value_producer >= 0
    outside = made & ~in_block[eager.value_producer]
    assert (regional.value_alloc_bytes == eager.value_alloc_bytes)[outside].all()
    assert (regional.value_held == eager.value_held)[outside].all()
    assert (regional.value_held[outside] >= 0).any()
    # A block drops what its own variables hold, and Python still holds its result.
    blocks = np.array(blocks_of(eager))
    producer, held = eager.value_producer, eager.value_held
    of_block = made & ~outside & (held >= 0) & (blocks[held] == blocks[producer])
    of_model = made & ~outside & (held >= 0) & ~of_block
    assert of_block.any()
    assert of_model.any()
    assert (regional.value_held[of_block] == -1).all()
    assert (regional.value_held[of_model] == held[of_model]).all()


@pytest.mark.parametrize("granularity", ["1", "module"])
def test_regions_stay_blocks_at_any_granularity(granularity: str) -> None:
    step = (*_GPT2[:-2], "devices=2x16gb", "mode=pipeline", f"granularity={granularity}")
    config = read(*step, "runtime=compiled", "runtime.regional=true")
    eager, regional = (plan(c, model_spec(c)).problem.graph for c in (read(*step), config))
    changed = np.flatnonzero(regional.moved_bytes != eager.moved_bytes)
    assert len(changed)
    assert all(blocks_of(eager)[op] for op in changed.tolist())


@pytest.mark.parametrize(
    "plan_of",
    [
        ("devices=1x16gb", "mode=single"),
        ("devices=2x16gb", "mode=pipeline"),
        # Its last block is gathered for the backward before the loss's.
        ("devices=2x16gb", "mode=single", "zero=3", "data_parallel=2"),
    ],
)
def test_a_compiled_loss_stores_no_logits_in_float32(plan_of: tuple[str, ...]) -> None:
    step = (*_GPT2[:-2], "phase=training", "optimizer=none", *plan_of)
    regions = (*step, "model.dtype=bfloat16", "runtime=compiled", "runtime.regional=true")
    regional, with_loss = (
        plan(config, model_spec(config)).problem.graph
        for config in (read(*regions), read(*regions, "runtime.compiled_loss=true"))
    )
    of_loss = np.array([part == LOSS for part in blocks_of(regional, with_loss=True)])
    between = np.flatnonzero(of_loss)
    # The head's forward is right before the loss, its backward right after it.
    assert regional.modules[between[0] - 1] == "lm_head"
    assert regional.modules[between[-1] + 1] == "lm_head"
    elements = regional.value_bytes[regional.value_producer == between[0] - 1].max() // 2
    stored = [
        int((graph.value_alloc_bytes[of_loss[graph.value_producer]] >= 4 * elements).sum())
        for graph in (regional, with_loss)
    ]
    assert stored[0] >= 2
    assert stored[1] == 0
    outside = ~of_loss
    assert (with_loss.moved_bytes == regional.moved_bytes)[outside].all()


def test_a_loss_is_compiled_beside_blocks_of_a_training_step() -> None:
    compiled = ("runtime=compiled", "runtime.compiled_loss=true")
    for other in (compiled, (*compiled, "runtime.regional=true")):
        with pytest.raises(FxpartError, match="use phase=training runtime=compiled "):
            check(read(*other))
    check(read(*compiled, "runtime.regional=true", "phase=training"))


def test_only_a_compiled_model_has_regions() -> None:
    with pytest.raises(FxpartError, match="got runtime=graph; use runtime=compiled, or"):
        check(read("runtime=graph", "runtime.regional=true"))


def test_kernels_stay_within_devices_and_blocks_that_may_be_cut() -> None:
    config = read(*_GPT2[:-2], "runtime=compiled", "mode=pipeline", "devices=2x16gb")
    result = plan(config, model_spec(config))
    graph, device_of = result.problem.graph, result.assignment.device_of
    assert (device_of == device_of[graph.group]).all()
    assert len(np.unique(device_of)) == 2
    blocks = np.array(blocks_of(graph))
    moving = np.flatnonzero((graph.moved_bytes > 0) & (graph.group != np.arange(graph.n_ops)))
    assert len(moving)
    assert (blocks[moving] == blocks[graph.group[moving]]).all()


@pytest.mark.parametrize("mode", ["single", "kl_based"])
def test_a_plan_on_one_of_two_devices_is_that_of_one_device(mode: str) -> None:
    # A link so slow that no transfer is worth it.
    overrides = (*_GPT2[:-2], "runtime=compiled", f"mode={mode}", "transfer_rate.bytes_per_s=1e3")
    single, two = (
        plan(config, model_spec(config))
        for config in (read(*overrides, f"devices={count}x16gb") for count in (1, 2))
    )
    assert two.evaluation.latency_s == single.evaluation.latency_s
    assert kernel_count(two.problem.graph) == kernel_count(single.problem.graph)
    assert two.whole is None  # each depth has kernels of its own
    line = carrier_line(read(*overrides), two.problem, two.assignment, None)
    assert line == "plain PyTorch, everything is on one device"  # and is not executed


@pytest.mark.parametrize(
    "choice",
    ["execute=local", "capture.symbolic=batch", "latency=profiled", "capture.level=module"],
)
def test_what_compiled_does_not_predict_is_refused(choice: str) -> None:
    with pytest.raises(FxpartError, match=f"leave out {choice}, or use runtime=graph"):
        check(read("model=gpt2", "runtime=compiled", choice))


def test_a_host_that_decides_the_time_is_noted() -> None:
    assert host_line(0.49, 1.0, 10, microbatch=False) == ""
    assert host_line(0.0356, 0.04, 1924, microbatch=False) == (
        "takes 35.60 ms to start 1,924 operators one by one; runtime=graph has them started at once"
    )
    assert "start 7 operators of a microbatch one" in host_line(0.9, 1.0, 7, microbatch=True)


def test_a_published_class_is_trained_on_its_own_loss() -> None:
    own, mean = (
        plan(config, model_spec(config))
        for config in (
            read(*_GPT2, "phase=training"),
            read(*_GPT2, "phase=training", "model.loss=mean"),
        )
    )
    assert "labels" in own.problem.graph.value_names
    assert "training with adamw" in own.subject_line
    assert is_mean_of_outputs(mean.problem.graph)
    assert "training of the mean of outputs with adamw" in mean.subject_line


def test_the_host_is_that_of_the_accelerators_by_default() -> None:
    assert host_launch_s(read("devices=1xa100_40gb")) == 29e-6
    # A further accelerator does not slow the others down.
    assert host_launch_s(read("devices=1xa100_40gb+1xv100_16gb")) == 29e-6
    assert host_launch_s(read("devices=1xv100_16gb+1xcpu")) == 60e-6
    assert host_launch_s(read("devices=1xv100_16gb", "runtime.host_launch_s=1e-5")) == 1e-5
    assert host_launch_s(read("devices=1xv100_16gb", "runtime=graph")) == 0.0
    # Operators of the CPU run in the thread that starts them.
    assert host_launch_s(read("devices=2xcpu")) == 0.0
    assert host_launch_s(read("devices=1xv100_16gb", "latency=profiled")) == 0.0


def test_an_unknown_runtime_is_refused() -> None:
    with pytest.raises(SpecError, match="runtime=eagre does not exist; nearest: eager"):
        check(read("runtime.name=eagre"))

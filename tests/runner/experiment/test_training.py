"""The training step that a configuration describes."""

import pytest

from fxpart.errors import SpecError
from runner.experiment.experiment import plan
from runner.experiment.model_spec import model_spec
from runner.experiment.training import check_training, optimizer_of, step_options
from tests.runner.composed import read

_AS_RUN = ("phase=training", "execute=local", "optimizer=none", "phase.train_mode=false")


def test_a_step_has_an_optimizer_by_default() -> None:
    config = read("phase=training")
    assert optimizer_of(config).name == "adamw"
    assert config.phase.train_mode
    check_training(config)
    assert optimizer_of(read("optimizer=none")).name == "none"


def test_options_reach_the_library() -> None:
    config = read(
        "phase=training",
        "optimizer=momentum",
        "optimizer.state_dtype=float32",
        "optimizer.master_weights=true",
        "optimizer.implementation=fused",
        "checkpointing=block",
        "phase.fused_kernels=false",
        "backward_order=late_weight_gradients",
    )
    optimizer, options = optimizer_of(config), step_options(config)
    assert (optimizer.name, optimizer.state_dtype) == ("momentum", "float32")
    assert (optimizer.master_weights, optimizer.implementation) == (True, "fused")
    assert options.checkpointing == "block"
    assert options.backward_order == "late_weight_gradients"
    assert not options.fused_attention
    assert not options.fused_dropout


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkpointing=block"], "checkpointing=block applies to a training step"),
        (["recomputed_blocks=[model.layers.0]"], "got checkpointing=none; use checkpointing=block"),
        (
            ["phase=training", "checkpointing=block", "recomputed_blocks=[a,b,a]"],
            "recomputed_blocks names a twice; leave one of them out",
        ),
        (["phase=training", "checkpointing=blok"], "nearest: block"),
        (["phase=training", "checkpointing=budgte"], "nearest: budget"),
        (["phase=training", "optimizer.name=adan"], "optimizer=adan does not exist"),
        (["optimizer.state_dtype=float8"], "optimizer.state_dtype=float8 does not exist"),
        (
            ["phase=training", "execute=local"],
            "add optimizer=none phase.train_mode=false",
        ),
        (
            ["backward_order=late_weight_gradients"],
            ("applies to a training step, not to phase=inference"),
        ),
        (["phase=training", "backward_order=late"], "backward_order=late does not exist"),
        (
            ["phase=training", "backward_order=late_weight_gradients", "schedule=gpipe"],
            "schedule=gpipe runs the whole backward of a stage at once",
        ),
        (
            [*_AS_RUN, "backward_order=late_weight_gradients", "execute.device=cuda"],
            "runs on the CPU only, got execute.device=cuda",
        ),
        (
            [*_AS_RUN, "checkpointing=block"],
            "add checkpointing=none",
        ),
    ],
)
def test_combinations_that_exclude_each_other_are_refused(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(SpecError) as refused:
        check_training(read(*overrides))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data_parallel=0"], "data_parallel=0 must be 1 or more"),
        (["data_parallel=2", "model.batch_size=3"], "make it a multiple of 2"),
        (["data_parallel=2", "model.batch_size=2", "devices=3x16gb"], "equal parts"),
        (["data_parallel=2", "devices.saturate_host=true"], "saturate_host"),
        (["data_parallel=2", "model.batch_size=2", "execute=local"], "planned, but not run here"),
        (["data_parallel=2", "capture.level=module"], "capture.level=operator"),
        (["all_reduce.bucket_bytes=0"], "all_reduce.bucket_bytes=0 must be 1 or more"),
        (["capture.symbolic=bach"], "nearest: batch"),
        (["capture.symbolic=batch", "execute=local"], "runs one size"),
        (["capture.symbolic=batch", "capture.level=module"], "capture.level=operator"),
        (["capture.symbolic=batch", "batch_sweep=0"], "batch_sweep=0 must be from 1 to 16384"),
        (["capture.symbolic=batch", "latency=profiled"], "latency=profiled"),
        (["capture.symbolic=batch", "batch_sweep=16385"], "must be from 1 to 16384"),
        (["devices.pools.0.count=1025"], "1025 devices are too many, at most 1024"),
        (["devices.pools.0.count=1000000000000"], "devices are too many"),
        (["devices.pools.0.memory_bytes=9223372036854775807"], "at most 4503.60 TB"),
        (["reserve.rounding_bytes=9223372036854775807"], "must be from 1, which rounds nothing"),
        (["reserve.context_bytes=9223372036854775807"], "context_bytes must be at most"),
        ([f"reserve.workspace_bytes=1{'0' * 400}"], "got over 1000000000000000000 TB"),
        (["schedule=gpipe", "microbatches=1000000000"], "more than can be simulated"),
        (["execute=local", "execute.threads=2147483648"], "at most 1024"),
        (["latency=profiled", "latency.threads=2147483648"], "from 1 to 1024"),
        (["model.config.n_layer=-1"], "model.config.n_layer=-1 must not be negative"),
        (["model.config.layer_norm_epsilon=nan"], "must be a finite number"),
    ],
)
def test_impossible_replicas_and_symbols_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        _planned("model=gpt2", *overrides)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def _planned(*overrides: str) -> None:
    config = read(*overrides)
    plan(config, model_spec(config))

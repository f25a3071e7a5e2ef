"""Names of a job's values: each known name has a value, and similar names are suggested."""

import pytest

from runner.config.device_schema import LinkConfig, PoolConfig
from runner.config.schema import Config, ModeConfig, ModelConfig
from runner.job.identity import Choices, deciding, for_jobs
from runner.sweep.job_values import look_up, why_unknown

CHOICES = Choices(model="a", mode="b", devices="c", transfer_rate="d")


def test_settings_of_a_sweep_are_left_out_of_its_jobs() -> None:
    kept = ("mode=single", "+model.config.where=1", "zipped=1")
    common = ("figures=all", "verbose=true", "tracking=none", "++tracking.uri=x", "hydra.job.x=1")
    of_sweep = ("question=Why?", "resume=false", "where='a > 1'", "+zip=[a,b]", "rerun=abc")
    assert for_jobs((*kept, *common, *of_sweep)) == (*kept, *common)
    assert deciding((*kept, *common, *of_sweep)) == kept


def test_sums_count_every_device() -> None:
    config = Config()
    config.devices.pools = [
        PoolConfig(count=3, name="x", memory_bytes=5 * 10**9),
        PoolConfig(count=7, name="y", memory_bytes=11 * 10**9),
    ]
    assert look_up("n_devices", config, CHOICES) == 10
    assert look_up("memory_bytes", config, CHOICES) == 92 * 10**9
    assert look_up("memory_gb", config, CHOICES) == 92


def test_a_bare_name_is_the_choice_a_dotted_one_the_value() -> None:
    config = Config(
        model=ModelConfig(name="long name"),
        mode=ModeConfig("single", {}),
        transfer_rate=LinkConfig(name="given"),
    )
    names = ("model", "mode", "devices", "transfer_rate")
    assert [look_up(name, config, CHOICES) for name in names] == ["a", "b", "c", "d"]
    dotted = ("model.name", "mode.name", "transfer_rate.name")
    assert [look_up(name, config, CHOICES) for name in dotted] == ["long name", "single", "given"]
    plain = ("phase", "optimizer", "microbatches", "granularity", "capture.symbolic")
    assert [look_up(name, config, CHOICES) for name in plain] == [
        "inference",
        "none",
        1,
        "operator",
        "none",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("n_device", "n_device does not exist; nearest: n_devices"),
        ("model.batch", "model.batch does not exist; nearest: model.batch_size"),
        ("mode.max_pass", "mode.max_pass is not an option of any mode; nearest: max_passes"),
        ("devices.pools", "devices.pools does not exist"),
        ("model.config", "model.config does not exist"),
        ("mode.options", "mode.options is not an option of any mode"),
        ("resume", "resume does not exist"),
        ("tracking.uri", "tracking.uri does not exist"),
        ("model.name.upper", "model.name.upper does not exist"),
    ],
)
def test_names_unknown_to_all_jobs_are_refused(name: str, message: str) -> None:
    assert str(why_unknown(name)).startswith(message)


@pytest.mark.parametrize(
    "name",
    ["n_devices", "mode.stages", "model.config.anything.at_all", "devices.between_nodes.name"],
)
def test_names_known_to_some_jobs_are_accepted(name: str) -> None:
    assert why_unknown(name) is None

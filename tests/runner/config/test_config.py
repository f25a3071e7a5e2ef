"""The structure of the configuration, every shipped file, and the topology built from it."""

import re
from pathlib import Path

import numpy as np
import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from fxpart.errors import SpecError
from fxpart.placement import MODES
from runner.config.device_schema import DevicesConfig, LinkConfig, PoolConfig
from runner.config.paths import conf_dir
from runner.config.read import read_config
from runner.experiment.topology import build_topology
from tests.runner.composed import GROUPS, composed, composed_with_hydra, read

CHOICES = [
    f"{path.parent.name}={path.stem}"
    for group in GROUPS
    for path in sorted((conf_dir() / group).glob("*.yaml"))
    if path.stem != "workload"  # needs a file: tests/runner/experiment/test_objective.py
]
NEEDS = {
    "model=transformers": "model.architecture=GPT2LMHeadModel",
    "model=custom": "model.factory=a.b:c",
    "model=timm": "model.architecture=resnet18",
    "model=diffusers": "model.architecture=FluxTransformer2DModel",
    "mode=custom": "mode.function=a.b:c",
}


@pytest.mark.parametrize("choice", CHOICES)
def test_every_shipped_file_composes(choice: str) -> None:
    group, _, name = choice.partition("=")
    needs = [NEEDS[choice]] if choice in NEEDS else []
    config = read(*([] if group == "devices" else ["devices=h100"]), choice, *needs)
    named = config.devices.spec if group == "devices" else getattr(config, group).name
    assert named == name or choice in NEEDS
    assert build_topology(config.devices, config.transfer_rate).n_devices >= 1


def test_the_default_is_the_main_job() -> None:
    config = read()
    assert config.model.name == "llama2_13b"
    assert config.devices.spec == "4x16gb"
    assert (config.mode.name, config.mode.options) == (
        "kl_based",
        {"max_passes": 8, "min_gain": 1e-4},
    )
    assert config.latency.op_overhead_s == 5e-6
    assert (config.tracking.name, config.tracking.uri) == ("mlflow", None)
    assert config.capture.use_cache
    topology = build_topology(config.devices, config.transfer_rate)
    assert topology.memory_bytes.tolist() == [16_000_000_000] * 4
    assert topology.bytes_per_s[0, 3] == 31.5e9
    assert topology.latency_s[3, 0] == 10e-6


def test_every_mode_has_a_file() -> None:
    shipped = {path.stem for path in (conf_dir() / "mode").glob("*.yaml")}
    assert shipped == {*MODES, "recommend"}


def test_unequal_devices_are_built_in_the_order_of_the_spec() -> None:
    config = read("devices=2x80gb+4x16gb", "transfer_rate=16e9")
    topology = build_topology(config.devices, config.transfer_rate)
    assert topology.memory_bytes.tolist() == [80_000_000_000] * 2 + [16_000_000_000] * 4
    rates = [device.rate_for("bfloat16") for device in topology.devices]
    assert rates == [312e12] * 2 + [76.7e12] * 4
    off_diagonal = topology.bytes_per_s[~np.eye(6, dtype=bool)]
    assert (off_diagonal == 16e9).all()


def test_a_machine_sets_its_links() -> None:
    config = read("devices=dgx_h100")
    assert config.transfer_rate.name == "nvlink4"
    assert build_topology(config.devices, config.transfer_rate).bytes_per_s[0, 7] == 450e9


def test_a_rate_on_the_command_line_takes_precedence() -> None:
    config = read("devices=dgx_h100", "transfer_rate=pcie5")
    assert build_topology(config.devices, config.transfer_rate).bytes_per_s[0, 7] == 63e9


def test_two_machines_have_a_link_of_their_own() -> None:
    config = read("devices=2x_dgx_h100")
    topology = build_topology(config.devices, config.transfer_rate)
    assert [device.node for device in topology.devices] == [0] * 8 + [1] * 8
    assert topology.bytes_per_s[0, 7] == 450e9
    assert topology.bytes_per_s[7, 8] == topology.bytes_per_s[8, 7] == 50e9
    assert topology.latency_s[0, 15] == 5e-6


def test_the_link_between_machines_can_be_changed() -> None:
    config = read("devices=2x_dgx_h100", "devices.between_nodes.bytes_per_s=1e9")
    topology = build_topology(config.devices, config.transfer_rate)
    assert topology.bytes_per_s[0, 8] == 1e9
    assert topology.bytes_per_s[0, 1] == 450e9


def test_open_dictionaries_need_no_plus() -> None:
    config = read(
        "model.config.num_hidden_layers=4",
        "model.config.rope_scaling.factor=2.0",
        "model.factory_args.depth=3",
        "mode.max_passes=2",
    )
    assert config.model.config["num_hidden_layers"] == 4
    assert config.model.config["hidden_size"] == 5120
    assert config.model.config["rope_scaling"] == {"factor": 2.0}
    assert config.model.factory_args == {"depth": 3}
    assert config.mode.options["max_passes"] == 2


def test_copies_and_granularity_are_off_unless_asked_for() -> None:
    assert (read().granularity, read().devices.saturate_host) == ("operator", False)
    config = read("devices=2x_dgx_h100", "devices.saturate_host=true", "granularity=2")
    assert (config.granularity, config.devices.saturate_host) == ("2", True)


def test_modules_on_devices_keep_the_written_order() -> None:
    override = "mode.modules={model.layers.0: 0, model.layers: 1, 3: 1, *: 0}"
    mode = read("mode=aot_based", override, "mode.devices={0: 2}").mode
    assert mode.options == {
        "assignment": None,
        "modules": {"model.layers.0": 0, "model.layers": 1, 3: 1, "*": 0},
        "devices": {0: 2},
    }


def test_an_option_of_the_mode_reaches_the_mode() -> None:
    assert read("mode=single", "mode.wrong=1").mode.options == {"wrong": 1}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.batch_sise=2", "model.batch_sise"),
        ("modell.batch_size=2", "modell.batch_size"),
        ("model.batch_size=many", "model.batch_size=many"),
        ("latency.compute_efficiency=fast", "latency.compute_efficiency=fast"),
        ("devices.nodes=[a]", "devices.nodes"),
        ("devices.saturate_host=often", "devices.saturate_host=often"),
        ("capture.use_cache=2.5", "capture.use_cache=2.5"),
    ],
)
def test_a_wrong_key_or_type_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigCompositionException, match=message.replace("[", r"\[")):
        composed(override)


@pytest.mark.parametrize("choice", ["model=transformers", "model=custom"])
def test_an_unset_model_is_refused(choice: str) -> None:
    with pytest.raises(SpecError, match="neither an architecture nor a factory; give model"):
        read(choice)


@pytest.mark.parametrize("switch", ["on_host", "own_curves"])
@pytest.mark.parametrize("value", ["2", "0", "null"])
def test_a_switch_of_a_pool_takes_no_number(switch: str, value: str) -> None:
    with pytest.raises(SpecError, match=f"{switch} of rtx_a4000 must be true or false, got "):
        read("devices=2x16gb", f"devices.pools.0.{switch}={value}")
    (pool,) = read("devices=2x16gb", f"devices.pools.0.{switch}=true").devices.pools
    assert getattr(pool, switch) is True


def test_a_published_problem_needs_its_file() -> None:
    with pytest.raises(SpecError, match=r"^model\.path is needed; give model\.path=FILE"):
        read("model=workload")


def test_a_value_without_default_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/mine.yaml").write_text("architecture: GPT2LMHeadModel\n")
    with pytest.raises(SpecError, match=r"^model\.name is needed; give model\.name="):
        read("model=mine")


def test_a_reference_to_nothing_is_refused() -> None:
    with pytest.raises(SpecError, match=r"tracking\.uri.*nowhere"):
        read("tracking.uri=${nowhere}")


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ("model.config", "mapping"),
        ("model.factory_args", "mapping"),
        ("model.depends_on", "list"),
        ("price_per_hour", "mapping"),
    ],
)
def test_text_made_by_a_reference_is_no_list_or_mapping(setting: str, kind: str) -> None:
    with pytest.raises(SpecError, match=rf"^{re.escape(setting)} must be a {kind}, got 'gpt2'$"):
        read("model=gpt2", f"{setting}=${{model.name}}")


def test_a_config_without_the_schema_is_refused() -> None:
    with pytest.raises(SpecError, match="list `schema` first"):
        read_config(OmegaConf.create({"model": {"architecture": "x"}}))


def test_a_mode_without_a_name_is_refused() -> None:
    with pytest.raises(SpecError, match=r"mode\.name must be the name of a mode, got 3"):
        read("mode.name=3")


def test_the_latency_states_its_assumptions() -> None:
    latency = read("latency.op_overhead_s=1e-6").latency
    assert (latency.compute_efficiency, latency.bandwidth_efficiency) == (None, None)
    assert read("latency.compute_efficiency=0.6").latency.compute_efficiency == 0.6
    assert latency.op_overhead_s == 1e-6


@pytest.mark.parametrize("latency", ["profiled", "calibrated"])
def test_operators_are_measured_as_they_are_run(latency: str) -> None:
    """On the device of the run and with its threads, unless set otherwise."""
    alone = read(f"latency={latency}").latency
    assert (alone.device, alone.threads) == ("cpu", 1)
    run = ["execute=local", "execute.device=cuda", "execute.threads=4"]
    carried_out = read(f"latency={latency}", *run).latency
    assert (carried_out.device, carried_out.threads) == ("cuda", 4)
    other = read(f"latency={latency}", *run, "latency.device=cpu", "latency.threads=2").latency
    assert (other.device, other.threads) == ("cpu", 2)


def pool(count: int = 1, memory_bytes: int = 10) -> PoolConfig:
    return PoolConfig(count, "d", memory_bytes, {"float32": 1.0}, 1.0)


LINK = LinkConfig("l", 8.0, 0.5)


def test_nodes_are_assigned_by_pool() -> None:
    devices = DevicesConfig("s", [pool(2), pool(1)], [5, 6], LinkConfig("far", 2.0, 3.0))
    topology = build_topology(devices, LINK)
    assert [device.node for device in topology.devices] == [5, 5, 6]
    assert topology.bytes_per_s.tolist() == [
        [np.inf, 8.0, 2.0],
        [8.0, np.inf, 2.0],
        [2.0, 2.0, np.inf],
    ]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (DevicesConfig("s", [pool(0)]), "count of d must be at least 1, got 0"),
        (DevicesConfig("s", []), "no devices"),
        (DevicesConfig("s", [pool()], [0, 1]), "machines of 2 pools, there are 1"),
        (DevicesConfig("s", [pool(memory_bytes=0)]), "memory must be positive"),
        (DevicesConfig("s", [pool()], None, LinkConfig("l", 0.0)), "must be positive and fin"),
    ],
)
def test_meaningless_devices_are_refused(devices: DevicesConfig, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build_topology(devices, LINK)


def test_it_composes_from_any_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read("devices=mixed_box").devices.pools[0].name == "h100"


def test_a_run_writes_below_the_working_directory() -> None:
    hydra = composed_with_hydra("devices=2xt4", "mode=single", "hydra.job.num=3")
    folder = Path(hydra.run.dir)
    assert folder.parent == Path("outputs/runs")
    assert folder.name.endswith("_llama2_13b_2xt4_single")
    assert Path(hydra.sweep.dir).parent == Path("outputs/sweeps")
    assert hydra.sweep.subdir == "3_llama2_13b_2xt4_single"

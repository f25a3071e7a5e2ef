"""Possible choices: names that are specs, a user's own ``conf/``, and how choices are typed."""

from pathlib import Path

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from fxpart.errors import SpecError
from runner.config.choices import DEVICE_PRESETS, SpecSource, choices_text, quoted_overrides
from runner.experiment.topology import build_topology
from tests.runner.composed import GROUPS, composed, read


@pytest.fixture
def user_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty ``conf/``; the working directory is changed to its parent."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    return tmp_path / "conf"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("devices", "bytes_per_s"),
    [
        ("2x16gb", 300e9),
        ("2xa10", 300e9),
        ("8xh100", 450e9),
        ("2x141gb", 450e9),
        ("4xb200+4xh200", 450e9),
        ("4xh200+1xt4", 300e9),
        ("2xv100_16gb+2xa100_80gb", 150e9),
    ],
)
def test_nvlink_is_the_slowest_of_the_devices(devices: str, bytes_per_s: float) -> None:
    config = read("transfer_rate=nvlink", f"devices={devices}")
    assert config.transfer_rate.bytes_per_s == bytes_per_s
    typed = read("transfer_rate=nvlink", "transfer_rate.bytes_per_s=1e9", f"devices={devices}")
    assert typed.transfer_rate.bytes_per_s == 1e9
    assert read("transfer_rate=pcie4", f"devices={devices}").transfer_rate.bytes_per_s < 100e9


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("devices=4x16", "devices=4x16: size '16' has no unit"),
        ("devices=0x16gb", "devices=0x16gb: count 0"),
        ("devices=4x16gbb", "unknown unit 'gbb'"),
        ("devices=0x8xh100", "devices=0x8xh100: there must be 1 to 1024 machines; write COUNTx"),
        ("devices=1000x1xt4+25x1xt4", "+25x1xt4: there must be 1 to 1024 machines"),
        ("devices=2x8x", "devices=2x8x: size '8x' has the unknown unit 'x'"),
        ("devices=4xa10000", "nearest: a100_80gb, a100_40gb, a10"),
        ("devices=-1", "devices=-1: size '-1' must be positive"),
        ("devices=0", "devices=0: size '0' must be positive"),
        ("devices=dgx_h10", "devices=dgx_h10 does not exist; nearest: dgx_h100"),
        ("devices=2x_dgx_h10", "nearest file: 2x_dgx_h100"),
        ("devices=laptop", "COUNTxSIZE or COUNTxACCELERATOR"),
        ("transfer_rate=-1", "transfer_rate=-1: the rate must be positive and finite"),
        ("transfer_rate=0", "the rate must be positive and finite"),
        (
            "transfer_rate=16",
            "transfer_rate=16 has no unit, and would be 16 bytes per second; write 16gb",
        ),
        ("transfer_rate=1e999", "the rate must be positive and finite"),
        ("transfer_rate=16gbps", "not a number with one of mb, gb, tb, mbit, gbit, tbit"),
        ("transfer_rate=pci4", "transfer_rate=pci4 does not exist; nearest: pcie4"),
        ("finetune=qlora", "finetune=qlora does not exist; use finetune=lora weights=nf4"),
        ("mode=kl_basd", "mode=kl_basd does not exist; nearest: kl_based"),
        ("model=llama2_13", "model=llama2_13 does not exist; nearest: llama2_13b"),
        ("tracking=mlfow", "tracking=mlfow does not exist; nearest: mlflow"),
    ],
)
def test_a_wrong_choice_is_one_line_of_fxpart(override: str, message: str) -> None:
    with pytest.raises(ConfigCompositionException) as caught:
        composed(override)
    assert isinstance(caught.value, SpecError)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_numbers_that_choose_are_quoted() -> None:
    overrides = [
        "transfer_rate=16e9,pcie4,-1",
        "devices=0",
        "model.batch_size=4",
        "-m",
        "tracking=none",
    ]
    assert quoted_overrides(overrides) == [
        "transfer_rate='16e9',pcie4,'-1'",
        "devices='0'",
        "model.batch_size=4",
        "-m",
        "tracking=none",
    ]


@pytest.mark.parametrize(
    ("override", "quoted"),
    [
        ("transfer_rate=choice(16e9,32e9)", "transfer_rate='16e9','32e9'"),
        ("transfer_rate=nan,-inf,info", "transfer_rate='nan','-inf',info"),
        ("transfer_rate=choice(pcie4, 1)", "transfer_rate=pcie4, '1'"),
        ("devices=glob(4x*)", "devices=glob(4x*)"),
        ("mode=shuffle(single,kl_based)", "mode=shuffle(single,kl_based)"),
        ("model.batch_size=range(1,3)", "model.batch_size=range(1,3)"),
    ],
)
def test_functions_of_choices(override: str, quoted: str) -> None:
    assert quoted_overrides([override]) == [quoted]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("transfer_rate=range(1,3)", "list the choices with commas"),
        ("transfer_rate=choice(shuffle(16e9,32e9))", "list the choices with commas"),
        ("accelerator=h100", "write devices=1xh100"),
        ("+accelerator=h100,t4", "write devices=1xh100,1xt4"),
    ],
)
def test_impossible_choices_are_refused(override: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        quoted_overrides([override])


def test_the_help_lists_the_choices(user_conf: Path) -> None:
    write(user_conf / "model/sub/mine.yaml", "name: mine\n")
    write(user_conf / "hydra/output/x.yaml", "\n")
    lines = dict(line.split(": ") for line in choices_text().splitlines())
    assert set(lines) == set(GROUPS)
    assert {"llama2_13b", "sub/mine"} <= set(lines["model"].split(", "))
    assert {"dgx_h100", "4x16gb"} <= set(lines["devices"].split(", "))


def test_every_listed_preset_can_be_loaded() -> None:
    source = SpecSource("test", "spec://")
    listed = source.list("devices", None)
    assert listed == list(DEVICE_PRESETS)
    assert "8x80gb" in listed
    for name in listed:
        count, size = name.split("x")
        (pool,) = OmegaConf.select(source.load_config(f"devices/{name}").config, "pools")
        assert pool["count"] == int(count)
        assert pool["memory_bytes"] == int(size.removesuffix("gb")) * 10**9


def test_machines_are_those_of_a_file_with_them() -> None:
    spec = read("devices=2x8xh100", "transfer_rate=nvlink4")
    file = read("devices=2x_dgx_h100")
    found, expected = (
        build_topology(config.devices, config.transfer_rate) for config in (spec, file)
    )
    assert found.devices == expected.devices
    np.testing.assert_array_equal(found.bytes_per_s, expected.bytes_per_s)
    np.testing.assert_array_equal(found.latency_s, expected.latency_s)


def test_an_adapter_is_no_faster_than_the_link_within_its_machine() -> None:
    config = read("devices=2x2xa10", "transfer_rate=pcie4")
    topology = build_topology(config.devices, config.transfer_rate)
    rates = topology.bytes_per_s
    assert rates[0, 1] == rates[0, 2] == config.transfer_rate.bytes_per_s < 50e9


def test_parts_beside_machines_are_machines_too() -> None:
    mixed = read("devices=2x4xa10+3xt4").devices
    assert [(pool.count, pool.name) for pool in mixed.pools] == [(4, "a10"), (4, "a10"), (3, "t4")]
    assert mixed.nodes == [0, 1, 2]
    one = read("devices=1x4xa10").devices
    assert (one.nodes, one.between_nodes, one.pools) == (
        None,
        None,
        read("devices=4xa10").devices.pools,
    )


def test_hydras_own_groups_are_left_to_hydra() -> None:
    assert not SpecSource("test", "spec://").is_config("hydra/launcher/basic")


def test_a_users_file_adds_a_choice(user_conf: Path) -> None:
    write(user_conf / "model/mine.yaml", "name: mine\narchitecture: GPT2LMHeadModel\n")
    assert read("model=mine").model.name == "mine"


def test_a_users_file_takes_precedence_over_the_spec_of_its_name(user_conf: Path) -> None:
    write(user_conf / "devices/4x16gb.yaml", "defaults: [1xh100, _self_]\nspec: my four\n")
    devices = read("devices=4x16gb").devices
    assert (devices.spec, devices.pools[0].name) == ("my four", "h100")


def test_a_shipped_file_takes_precedence_over_the_users(user_conf: Path) -> None:
    write(user_conf / "mode/single.yaml", "name: other\n")
    assert read("mode=single").mode.name == "single"


def test_a_users_choice_is_among_the_nearest(user_conf: Path) -> None:
    write(user_conf / "model/zebra.yaml", "name: zebra\n")
    with pytest.raises(SpecError, match="nearest: zebra"):
        composed("model=zebr")


@pytest.mark.parametrize(
    "text",
    [
        'n_devices > 2 or mode == "single"',
        "mode in ['single', \"kl_based\"]",
        '"a" == mode or mode == "b"',
        "Which mode, and why?",
        "[1,2]",
        "It's a \\ here",
        "plain",
    ],
)
def test_free_text_is_passed_on_unchanged(text: str) -> None:
    for key in ("where", "question"):
        (quoted,) = quoted_overrides([f"{key}={text}"])
        assert OverridesParser.create().parse_override(quoted).value() == text


@pytest.mark.parametrize("override", ["where='a > 2'", "where=null", "-m", "mode=a,b", "where"])
def test_plain_text_gets_no_quotes(override: str) -> None:
    assert quoted_overrides([override]) == [override]

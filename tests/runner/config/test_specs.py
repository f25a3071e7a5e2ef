"""Choices made from a name, and a user's own ``conf/``."""

from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from fxpart.errors import SpecError
from runner.config.accelerators import device_pools
from runner.config.specs import (
    DEVICE_PRESETS,
    SpecSource,
    choices_text,
    quote_numbers,
    transfer_rate,
)
from tests.runner.composed import GROUPS, composed, read

GIVEN = """\
memory: 6gb
flops_per_s: {float32: 3.0e12}
memory_bandwidth_bytes_per_s: 7.0e9
source: a test
"""


@pytest.fixture
def user_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty ``conf/`` of the working directory, which is changed to its parent."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    return tmp_path / "conf"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def names_of(spec: str) -> list[str]:
    return [pool["name"] for pool in device_pools(spec)]


@pytest.mark.parametrize(
    ("size", "name"),
    [
        ("1mb", "rtx_3070"),
        ("8gb", "rtx_3070"),
        ("9gb", "rtx_a2000_12gb"),
        ("12gb", "rtx_a2000_12gb"),
        ("16gb", "rtx_a4000"),
        ("16gib", "rtx_a4000"),
        ("18gb", "a10"),
        ("24gb", "a10"),
        ("32gb", "rtx_5000_ada"),
        ("40gb", "a100_40gb"),
        ("48gb", "l40s"),
        ("64gb", "a100_80gb"),
        ("80gb", "a100_80gb"),
        ("141gb", "h200"),
        ("192gb", "mi300x"),
        ("1tb", "mi300x"),
    ],
)
def test_a_size_stands_for_the_next_class(size: str, name: str) -> None:
    assert names_of(size) == [name]


def test_a_spec_resolves_to_numbers_of_the_datasheet() -> None:
    fast, small = composed("devices=2x80gb+4x16gb").devices.pools
    assert (fast.count, fast.name, fast.memory_bytes) == (2, "a100_80gb", 80_000_000_000)
    assert fast.flops_per_s.bfloat16 == 312e12
    assert fast.memory_bandwidth_bytes_per_s == 2.039e12
    assert fast.source == "NVIDIA A100 Tensor Core GPU datasheet, SXM"
    assert (small.count, small.name, small.memory_bytes) == (4, "rtx_a4000", 16_000_000_000)
    assert small.flops_per_s.bfloat16 == 76.7e12
    assert small.memory_bandwidth_bytes_per_s == 448e9


def test_a_size_that_no_card_has_is_said_in_the_source() -> None:
    (pool,) = device_pools("2x20gb")
    assert (pool["name"], pool["memory_bytes"]) == ("a10", 20_000_000_000)
    assert pool["source"].endswith("; memory 20.00 GB as asked for")


@pytest.mark.parametrize(
    ("spec", "pools"),
    [
        ("4xa100_80gb", [("a100_80gb", 4, 80_000_000_000)]),
        ("2xh100+4xt4", [("h100", 2, 80_000_000_000), ("t4", 4, 16_000_000_000)]),
        ("rtx_4090", [("rtx_4090", 1, 24_000_000_000)]),
        ("4X1.5GiB", [("rtx_3070", 4, 1_610_612_736)]),
    ],
)
def test_names_and_sizes_compose(spec: str, pools: list[tuple[str, int, int]]) -> None:
    found = composed(f"devices={spec}").devices
    assert found.spec == spec
    assert [(pool.name, pool.count, pool.memory_bytes) for pool in found.pools] == pools


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("devices=4x16", "devices=4x16: size '16' has no unit"),
        ("devices=0x16gb", "devices=0x16gb: count 0"),
        ("devices=4x16gbb", "unknown unit 'gbb'"),
        ("devices=4xa10000", "nearest: a100_80gb, a100_40gb, a10"),
        ("devices=-1", "devices=-1: size '-1' must be positive"),
        ("devices=0", "devices=0: size '0' must be positive"),
        ("devices=dgx_h10", "devices=dgx_h10 does not exist; nearest: dgx_h100"),
        ("devices=2x_dgx_h10", "nearest file: 2x_dgx_h100"),
        ("devices=laptop", "COUNTxSIZE or COUNTxACCELERATOR"),
        ("transfer_rate=-1", "transfer_rate=-1: the rate must be positive and finite"),
        ("transfer_rate=0", "the rate must be positive and finite"),
        ("transfer_rate=1e999", "the rate must be positive and finite"),
        ("transfer_rate=16gbps", "not a number with one of mb, gb, tb, mbit, gbit, tbit"),
        ("transfer_rate=pci4", "transfer_rate=pci4 does not exist; nearest: pcie4"),
        ("mode=kl_basd", "mode=kl_basd does not exist; nearest: kl_based"),
        ("model=llama2_13", "model=llama2_13 does not exist; nearest: llama2_13b"),
        ("tracking=mlfow", "tracking=mlfow does not exist; nearest: mlflow"),
    ],
)
def test_a_wrong_choice_is_one_line_of_ours(override: str, said: str) -> None:
    with pytest.raises(ConfigCompositionException) as caught:
        composed(override)
    assert isinstance(caught.value, SpecError)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "bytes_per_s"),
    [
        ("16e9", 16e9),
        ("16gb", 16e9),
        ("16GB", 16e9),
        ("1.5tb", 1.5e12),
        ("25gbit", 3.125e9),
        ("8mbit", 1e6),
        ("1000", 1000.0),
    ],
)
def test_a_rate_is_bytes_or_bits_per_second(spec: str, bytes_per_s: float) -> None:
    found = read(f"transfer_rate={spec}").transfer_rate
    assert found.name == spec
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-12)
    assert found.latency_s == 10e-6


def test_what_is_no_rate_is_refused() -> None:
    with pytest.raises(SpecError, match="not a number with one of"):
        transfer_rate("16 apples")


def test_quoting_touches_only_numbers_that_choose() -> None:
    given = [
        "transfer_rate=16e9,pcie4,-1",
        "devices=0",
        "model.batch_size=4",
        "-m",
        "tracking=none",
    ]
    assert quote_numbers(given) == [
        "transfer_rate='16e9',pcie4,'-1'",
        "devices='0'",
        "model.batch_size=4",
        "-m",
        "tracking=none",
    ]


@pytest.mark.parametrize(
    ("given", "quoted"),
    [
        ("transfer_rate=choice(16e9,32e9)", "transfer_rate='16e9','32e9'"),
        ("transfer_rate=nan,-inf,info", "transfer_rate='nan','-inf',info"),
        ("transfer_rate=choice(pcie4, 1)", "transfer_rate=pcie4, '1'"),
        ("devices=glob(4x*)", "devices=glob(4x*)"),
        ("mode=shuffle(single,kl_based)", "mode=shuffle(single,kl_based)"),
        ("model.batch_size=range(1,3)", "model.batch_size=range(1,3)"),
    ],
)
def test_functions_of_choices(given: str, quoted: str) -> None:
    assert quote_numbers([given]) == [quoted]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("transfer_rate=range(1,3)", "list the choices with commas"),
        ("transfer_rate=choice(shuffle(16e9,32e9))", "list the choices with commas"),
        ("accelerator=h100", "write devices=1xh100"),
        ("+accelerator=h100,t4", "write devices=1xh100,1xt4"),
    ],
)
def test_what_cannot_be_chosen_is_refused(given: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        quote_numbers([given])


def test_the_help_lists_what_can_be_chosen(user_conf: Path) -> None:
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


def test_hydras_own_groups_are_left_to_hydra() -> None:
    assert not SpecSource("test", "spec://").is_config("hydra/launcher/basic")


def test_a_users_file_adds_a_choice(user_conf: Path) -> None:
    write(user_conf / "model/mine.yaml", "name: mine\narchitecture: GPT2LMHeadModel\n")
    assert read("model=mine").model.name == "mine"


def test_a_users_file_wins_over_the_spec_of_its_name(user_conf: Path) -> None:
    write(user_conf / "devices/4x16gb.yaml", "defaults: [1xh100, _self_]\nspec: my four\n")
    devices = read("devices=4x16gb").devices
    assert (devices.spec, devices.pools[0].name) == ("my four", "h100")


def test_a_shipped_file_wins_over_the_users(user_conf: Path) -> None:
    write(user_conf / "mode/single.yaml", "name: other\n")
    assert read("mode=single").mode.name == "single"


def test_a_users_choice_is_among_the_nearest(user_conf: Path) -> None:
    write(user_conf / "model/zebra.yaml", "name: zebra\n")
    with pytest.raises(SpecError, match="nearest: zebra"):
        composed("model=zebr")


def test_a_users_accelerator_can_be_named(user_conf: Path) -> None:
    write(user_conf / "accelerator/Mine.yaml", GIVEN)
    (pool,) = read("devices=3xmine").devices.pools
    assert (pool.count, pool.memory_bytes, pool.flops_per_s) == (
        3,
        6_000_000_000,
        {"float32": 3e12},
    )


def test_a_users_accelerator_can_stand_for_a_class(user_conf: Path) -> None:
    write(user_conf / "accelerator/mine.yaml", GIVEN + "stands_for_gb: 6\n")
    assert names_of("6gb+8gb") == ["mine", "rtx_3070"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memory: [", "cannot be read"),
        ("- 1\n", "does not state memory, flops_per_s"),
        (GIVEN.replace("source: a test\n", ""), "does not state source"),
        (GIVEN.replace("6gb", "6"), "has no unit"),
        (GIVEN.replace("{float32: 3.0e12}", "3.0e12"), "give a rate for each dtype"),
        (GIVEN.replace("3.0e12", "fast"), "flops_per_s.float32 must be a positive number, is fast"),
        (GIVEN.replace("7.0e9", "-1"), "memory_bandwidth_bytes_per_s must be a positive number"),
        (GIVEN + "stands_for_gb: six\n", "stands_for_gb must be a positive number, is six"),
    ],
)
def test_a_damaged_accelerator_file_is_named(user_conf: Path, text: str, said: str) -> None:
    path = user_conf / "accelerator/mine.yaml"
    write(path, text)
    with pytest.raises(SpecError) as caught:
        composed("devices=mine")
    assert str(path) in str(caught.value)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)

"""The devices that a spec describes, and the table of accelerators, including a user's own."""

import os
from pathlib import Path

import pytest

from fxpart.errors import SpecError
from fxpart.support import host
from runner.config.paths import conf_dir
from runner.config.specs import accelerator_files, device_pools, read_accelerator, transfer_rate
from tests.runner.composed import composed, read

GIVEN = """\
memory: 6gb
flops_per_s: {float32: 3.0e12}
memory_bandwidth_bytes_per_s: 7.0e9
source: a test
"""


@pytest.fixture
def user_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty ``conf/accelerator`` of the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "conf" / "accelerator"
    folder.mkdir(parents=True)
    return folder


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
def test_a_size_names_the_next_class(size: str, name: str) -> None:
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
    (limited,) = composed("devices=2xt4").devices.pools
    assert (limited.flops_per_s.float16, limited.sustained_flops_per_s) == (
        65e12,
        {"float16": 24e12},
    )


def test_a_size_without_a_card_is_noted_in_the_source() -> None:
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
    devices = composed(f"devices={spec}").devices
    assert devices.spec == spec
    assert [(pool.name, pool.count, pool.memory_bytes) for pool in devices.pools] == pools


@pytest.mark.parametrize(
    ("spec", "bytes_per_s"),
    [
        ("16e9", 16e9),
        ("16gb", 16e9),
        ("16GB", 16e9),
        ("1.5tb", 1.5e12),
        ("25gbit", 3.125e9),
        ("8mbit", 1e6),
        ("1000000", 1e6),
    ],
)
def test_a_rate_is_bytes_or_bits_per_second(spec: str, bytes_per_s: float) -> None:
    rate = read(f"transfer_rate={spec}").transfer_rate
    assert rate.name == spec
    assert rate.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-12)
    assert rate.latency_s == 10e-6


def test_an_invalid_rate_is_refused() -> None:
    with pytest.raises(SpecError, match="not a number with one of"):
        transfer_rate("16 apples")


def test_a_users_accelerator_can_be_named(user_table: Path) -> None:
    (user_table / "Mine.yaml").write_text(GIVEN)
    (pool,) = read("devices=3xmine").devices.pools
    assert (pool.count, pool.memory_bytes, pool.flops_per_s) == (
        3,
        6_000_000_000,
        {"float32": 3e12},
    )


@pytest.mark.parametrize(
    "line", ["stands_for_gb: 6", "stands_for_gb: 6.0  # GB", "? stands_for_gb\n: 6"]
)
def test_a_users_accelerator_can_define_a_class(user_table: Path, line: str) -> None:
    (user_table / "mine.yaml").write_text(f"{GIVEN}{line}\n")
    assert names_of("6gb+8gb") == ["mine", "rtx_3070"]


def test_a_damaged_file_matters_only_where_it_is_used(user_table: Path) -> None:
    (user_table / "mine.yaml").write_text("memory: [")
    assert names_of("8gb") == ["rtx_3070"]
    (user_table / "mine.yaml").write_text("stands_for_gb: 6\nmemory: [")
    with pytest.raises(SpecError, match="cannot be read"):
        composed("devices=6gb")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory: [", "cannot be read"),
        ("- 1\n", "does not set memory, flops_per_s"),
        (GIVEN.replace("source: a test\n", ""), "does not set source"),
        (GIVEN.replace("6gb", "6"), "has no unit"),
        (GIVEN.replace("{float32: 3.0e12}", "3.0e12"), "give a rate for each dtype"),
        (GIVEN.replace("{float32: 3.0e12}", '"a\\nb"'), r"flops_per_s is 'a\nb'; give a rate"),
        (GIVEN.replace("3.0e12", "fast"), "float32 must be a positive number, is 'fast'"),
        (
            GIVEN + "sustained_flops_per_s: {float16: -1}\n",
            "sustained_flops_per_s.float16 must be a positive number, is -1",
        ),
        (GIVEN + "efficiencies: {}\n", "efficiencies does not exist; nearest: efficiency"),
        (GIVEN + "efficiency: 0.7\n", "efficiency is 0.7; give shares of the peaks by kind"),
        (GIVEN + "efficiency: {mm: {float32: 1}}\n", "efficiency.mm does not exist"),
        (
            GIVEN + "efficiency: {gemm: {float32: 70}}\n",
            "efficiency.gemm.float32 must be a share of the peak, a number in (1e-06, 1], got 70",
        ),
        (GIVEN.replace("7.0e9", "-1"), "memory_bandwidth_bytes_per_s must be a positive number"),
        (GIVEN + "stands_for_gb: six\n", "stands_for_gb must be a positive number, is 'six'"),
    ],
)
def test_a_damaged_accelerator_file_is_named(user_table: Path, text: str, message: str) -> None:
    path = user_table / "mine.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        composed("devices=mine")
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stated", "launch_s"),
    [("", 29e-6), ("host_launch_s: 0\n", 0.0), ("host_launch_s: 6e-6\n", 6e-6)],
)
def test_a_host_launches_as_that_of_an_a100_unless_stated(
    user_table: Path, stated: str, launch_s: float
) -> None:
    (user_table / "mine.yaml").write_text(GIVEN + stated)
    assert composed("devices=mine").devices.pools[0].host_launch_s == launch_s
    assert composed("devices=1xcpu").devices.pools[0].host_launch_s == 0


def test_one_core_is_slower_than_any_accelerator() -> None:
    core = read_accelerator(accelerator_files()["cpu"])
    assert core["per_core"]
    assert 1e10 <= core["flops_per_s"]["float32"] <= 2e11
    assert 5e9 <= core["memory_bandwidth_bytes_per_s"] < 2e11


def test_one_cpu_is_the_whole_host_and_two_are_halves(
    user_table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = (conf_dir() / "accelerator" / "cpu.yaml").read_text()
    (user_table / "host.yaml").write_text(shipped)
    monkeypatch.setattr("runner.config.specs.available_cores", lambda: 6)
    monkeypatch.setattr("runner.config.specs.host_memory_bytes", lambda: 10**10)
    core = read_accelerator(accelerator_files()["cpu"])
    for count in (1, 2):
        (pool,) = device_pools(f"{count}xhost")
        assert pool["memory_bytes"] == 10**10 // count
        assert pool["flops_per_s"]["float32"] == core["flops_per_s"]["float32"] * 6 / count
        bandwidth = core["memory_bandwidth_bytes_per_s"] * 6 / count
        assert pool["memory_bandwidth_bytes_per_s"] == bandwidth
        assert "times 6 cores" in pool["source"]
    first, second = device_pools("1xhost+1xhost")
    assert first["memory_bytes"] == second["memory_bytes"] == 5 * 10**9


def test_a_container_bounds_the_memory_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host, "_CONTAINER_LIMITS", (limit,))
    for text, expected in (("max", whole), ("123456", 123456)):
        limit.write_text(f"{text}\n")
        assert host.host_memory_bytes() == expected


@pytest.mark.parametrize("name", sorted({*accelerator_files()} - {"cpu"}))
def test_every_accelerator_is_plausible(name: str) -> None:
    entry = read_accelerator(accelerator_files()[name])
    rates = entry["flops_per_s"]
    assert rates.keys() >= {"float64", "float32", "float16"}
    assert 8e9 <= entry["memory_bytes"] <= 192e9
    assert 2e11 <= entry["memory_bandwidth_bytes_per_s"] <= 9e12
    assert rates["float64"] <= rates["float32"] < rates["float16"] <= 2.5e15
    assert rates.get("bfloat16", rates["float16"]) == rates["float16"]
    assert entry["source"]


def test_the_table_has_the_shipped_files_only() -> None:
    shipped = {path.stem for path in (conf_dir() / "accelerator").glob("*.yaml")}
    assert set(accelerator_files()) == shipped
    assert len(shipped) >= 15


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = "memory: {}gb\nflops_per_s: {{float32: 1.0e12}}\n"
    text += "memory_bandwidth_bytes_per_s: 7.0e9\nsource: a test\n"
    path.write_text(text.format(6))
    first = read_accelerator(path)
    first["flops_per_s"]["float32"] = 0.0  # a change by one caller reaches no other
    assert read_accelerator(path)["flops_per_s"] == {"float32": 1e12}
    path.write_text(text.format(16))
    assert (first["memory_bytes"], read_accelerator(path)["memory_bytes"]) == (6e9, 16e9)

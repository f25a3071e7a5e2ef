"""The shipped table of accelerators."""

from pathlib import Path

import pytest

from runner.config.accelerators import accelerator_files, read_accelerator
from runner.config.paths import conf_dir


def test_one_core_is_slower_than_any_accelerator() -> None:
    core = read_accelerator(accelerator_files()["cpu"])
    assert 1e10 <= core["flops_per_s"]["float32"] <= 2e11
    assert 5e9 <= core["memory_bandwidth_bytes_per_s"] < 2e11


@pytest.mark.parametrize("name", sorted({*accelerator_files()} - {"cpu"}))
def test_every_accelerator_is_plausible(name: str) -> None:
    entry = read_accelerator(accelerator_files()[name])
    rates = entry["flops_per_s"]
    assert 8e9 <= entry["memory_bytes"] <= 192e9
    assert 2e11 <= entry["memory_bandwidth_bytes_per_s"] <= 6e12
    assert rates["float64"] <= rates["float32"] < rates["float16"] <= 1.4e15
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
    first["flops_per_s"]["float32"] = 0.0  # what one caller does with it is no other's
    assert read_accelerator(path)["flops_per_s"] == {"float32": 1e12}
    path.write_text(text.format(16))
    assert (first["memory_bytes"], read_accelerator(path)["memory_bytes"]) == (6e9, 16e9)

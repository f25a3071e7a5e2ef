"""Properties of this machine: the name of a device, and the available memory."""

from pathlib import Path

import pytest
import torch

from fxpart.errors import SpecError
from fxpart.execution import device as devices
from fxpart.execution.device import checked_device, device_name, free_bytes
from fxpart.support.host import cpu_name

CPU = torch.device("cpu")


def test_the_cpu_has_the_name_given_by_its_maker() -> None:
    assert device_name(CPU) == cpu_name()


@pytest.mark.parametrize("device", ["cpu", CPU])
def test_the_cpu_is_always_available(device: str | torch.device) -> None:
    assert checked_device(device) == CPU


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "device 'gpu' is not known; give cpu or cuda"),
        ("meta", "device 'meta' is not here; there is "),
        ("cuda:99", "device 'cuda:99' is not here; there is "),
    ],
)
def test_a_missing_device_is_refused(device: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        checked_device(device)
    assert "\n" not in str(caught.value)


def _machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, available_kib: int | None, **group: str
) -> None:
    if available_kib is not None:
        facts = f"MemTotal: 99999 kB\nMemAvailable: {available_kib} kB\n"
        (folder / "meminfo").write_text(facts)
    for name, text in group.items():
        path = folder / name.replace("__", "/").replace("_of_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(devices, "_MEMORY_FACTS", folder / "meminfo")
    monkeypatch.setattr(devices, "_CONTROL_GROUP", folder)


def test_available_memory_is_that_reported_by_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _machine(tmp_path, monkeypatch, 100)
    assert free_bytes(CPU) == 100 * 1024


@pytest.mark.parametrize(
    ("limit", "left"), [("5000", 5000 - 3000 + 500), ("max", 100 * 1024), ("1000", 0)]
)
def test_a_control_group_may_reduce_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, left: int
) -> None:
    group = {"max": f"{limit}\n", "current": "3000\n", "stat": "anon 1\ninactive_file 500\n"}
    _machine(tmp_path, monkeypatch, 100, **{f"memory_of_{k}": v for k, v in group.items()})
    assert free_bytes(CPU) == left


def test_version_1_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = {"limit_in_bytes": "9000", "usage_in_bytes": "2000", "stat": "cache 1\n"}
    names_of = {f"memory__memory_of_{key}": text for key, text in group.items()}
    _machine(tmp_path, monkeypatch, 100, **names_of)
    assert free_bytes(CPU) == 7000


def test_without_such_files_the_pages_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _machine(tmp_path, monkeypatch, None)
    assert 0 < free_bytes(CPU) < 1 << 50

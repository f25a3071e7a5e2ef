"""The name of this machine, as reported by its system."""

from pathlib import Path

import pytest

from fxpart.support import host as machine
from fxpart.support.host import cpu_name, machine_key


def test_the_machine_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Other\n")
    monkeypatch.setattr(machine, "_CPU_INFO", cpu_info)
    assert cpu_name() == "Some CPU @ 2 GHz"
    assert machine_key("cpu")["cpu"] == "Some CPU @ 2 GHz"
    monkeypatch.setattr(machine, "_CPU_INFO", tmp_path / "none")
    assert cpu_name()
    card = tmp_path / "0000:01:00.0"
    card.mkdir()
    (card / "information").write_text("Model: \t\t Some GPU\nIRQ: 3\n")
    monkeypatch.setattr(machine, "_NVIDIA", tmp_path)
    assert machine_key("cuda")["gpus"] == ["Some GPU"]

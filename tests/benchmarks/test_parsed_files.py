"""Shipped files are parsed once, and again after a change; a user's own are always read."""

import os
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from benchmarks import parsed_files


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the list of all that is parsed from here on."""
    Plugins.instance()
    source: Any = SourcesRegistry.instance().resolve("file")
    monkeypatch.setattr(source, "load_config", source.load_config)  # for the time of a test
    parsed_files.keep_parsed_files()
    calls: list[object] = []
    load = OmegaConf.load

    def counted(file: str) -> object:
        calls.append(file)
        return load(file)

    monkeypatch.setattr(OmegaConf, "load", counted)
    return calls


def _value(folder: Path) -> tuple[object, object]:
    source: Any = SourcesRegistry.instance().resolve("file")
    result = source("main", f"file://{folder}").load_config("mine")
    value = result.config.pop("key")  # as Hydra removes the defaults of a file
    return value, result.header["package"]


def test_a_shipped_file_is_parsed_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parsed: list[object]
) -> None:
    monkeypatch.setattr(parsed_files, "conf_dir", lambda: tmp_path)
    path = tmp_path / "mine.yaml"
    path.write_text("# @package _global_\nkey: 1\n")
    assert _value(tmp_path) == _value(tmp_path) == (1, "_global_")
    assert len(parsed) == 1
    path.write_text("key: 23\n")
    assert _value(tmp_path) == (23, None)
    assert len(parsed) == 2


def test_a_file_of_the_user_is_always_read(tmp_path: Path, parsed: list[object]) -> None:
    path = tmp_path / "mine.yaml"
    for number in (1, 2):
        path.write_text(f"key: {number}\n")
        os.utime(path, (0, 0))
        assert _value(tmp_path) == (number, None)
    assert len(parsed) == 2

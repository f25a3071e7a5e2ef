"""Shell completion with Tab."""

from pathlib import Path

import pytest

from runner.config.choices import DEVICE_PRESETS, questions
from tests.runner.command import run


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("devices=4x", [f"devices={name}" for name in DEVICE_PRESETS if name.startswith("4x")]),
        ("-m mode=kl_based experiment=", [f"experiment={name}" for name in questions()]),
    ],
)
def test_names_are_completed(
    typed: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_LINE", f"fxpart {typed}")
    done = run(tmp_path, "-sc", "query=bash")
    assert done.code == 0, done.err
    assert done.out.split() == expected
    assert done.err == ""

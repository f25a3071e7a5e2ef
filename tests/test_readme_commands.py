"""Every command of the README and of the docs is one that the runner takes."""

import re
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from fxpart.data_parallel import split_topology
from fxpart.modes import make_mode
from runner.build_topology import build_topology
from runner.experiment import check, model_spec
from runner.specs import quote_numbers
from tests.runner.composed import read

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_COMMAND = re.compile(r"^ +(?:\$ )?python -m runner (.+)$", re.MULTILINE)


def _commands(page: Path) -> list[str]:
    """Return what follows ``python -m runner`` in each block of a page."""
    # A line broken with a backslash is one.
    text = re.sub(r" *\\\n *", " ", page.read_text(encoding="utf-8"))
    return _COMMAND.findall(text)


COMMANDS = list(dict.fromkeys(command for page in PAGES for command in _commands(page)))


def _of_first_job(overrides: list[str]) -> tuple[list[str], bool]:
    """Return the overrides with the first value of what is swept, and whether anything is."""
    parsed = OverridesParser.create().parse_overrides(quote_numbers(overrides))
    chosen = [
        f"{override.get_key_element()}={next(override.sweep_string_iterator())}"
        if override.is_sweep_override()
        else given
        for override, given in zip(parsed, overrides, strict=True)
    ]
    return chosen, any(override.is_sweep_override() for override in parsed)


def test_pages_have_commands() -> None:
    assert [page.name for page in PAGES if _commands(page)] == [
        "README.md",
        "execution.md",
        "memory.md",
    ]
    assert any("execute=pipeline" in command and "optimizer" in command for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_runner_takes_the_command(command: str) -> None:
    overrides = shlex.split(command)
    swept = overrides[:1] == ["-m"]
    chosen, has_several = _of_first_job(overrides[swept:])
    assert swept == has_several
    config = read(*chosen)
    check(config)
    assert model_spec(config).batch_size * config.data_parallel == config.model.batch_size
    make_mode(config.mode.name, config.mode.options)
    topology = build_topology(config.devices, config.transfer_rate, config.reserve)
    split_topology(topology, config.data_parallel)

"""Every command of the README and of the docs is accepted by the runner."""

import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override

from fxpart.core.data_parallel import split_topology
from fxpart.placement import make_mode
from runner.cli.arguments import hydra_arguments
from runner.config import choices
from runner.config import read as config
from runner.config.paths import conf_dir
from runner.config.schema import RECOMMEND
from runner.experiment.check import check
from runner.experiment.model_spec import model_spec
from runner.experiment.topology import build_topology
from tests.runner.composed import read

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    ROOT / "README.md",
    # Those of extending.md need its files: tests/runner/test_extending.py runs them.
    *sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "extending.md"}),
)
_COMMAND = re.compile(r"^ +(?:\$ )?python -m runner (.+)$", re.MULTILINE)


def _commands(page: Path) -> list[str]:
    """Return the arguments of ``python -m runner`` in each block of a page."""
    # Lines continued with a backslash are one.
    text = re.sub(r" *\\\n *", " ", page.read_text(encoding="utf-8"))
    return _COMMAND.findall(text)


COMMANDS = list(dict.fromkeys(command for page in PAGES for command in _commands(page)))


def _of_first_job(overrides: list[str]) -> tuple[list[str], bool]:
    """Return the overrides with the first value of each sweep, and whether there is any."""
    config.register()
    choices.register()
    quoted = choices.quoted_overrides(overrides)
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(quoted)
        chosen = [
            f"{override.get_key_element()}={_first_value(override)}"
            if override.is_sweep_override()
            else text
            for override, text in zip(parsed, quoted, strict=True)
        ]
    return chosen, any(override.is_sweep_override() for override in parsed)


def _first_value(override: Override) -> str:
    if override.is_interval_sweep():
        interval = override.value()
        assert isinstance(interval, IntervalSweep)
        return str(interval.start)
    return next(override.sweep_string_iterator())


def test_pages_have_commands() -> None:
    assert [page.name for page in PAGES if _commands(page)] == [
        "README.md",
        "choices.md",
        "design.md",
        "execution.md",
        "launchers.md",
        "memory.md",
        "recommend.md",
        "serving.md",
        "sweeps.md",
    ]
    assert any("execute=pipeline" in command and "optimizer" in command for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_runner_accepts_the_command(command: str) -> None:
    # Arguments after a flag such as --cfg are Hydra's own.
    typed = list(takewhile(lambda word: word[:2] != "--", shlex.split(command, comments=True)))
    swept, overrides = "-m" in typed, hydra_arguments(typed)
    chosen, has_several = _of_first_job(overrides[swept:])
    # A named experiment is a sweep by itself.
    assert swept == has_several or (has_several and "experiment=" in command)
    job = read(*chosen)
    check(job)
    assert model_spec(job).batch_size * job.data_parallel == job.model.batch_size
    if job.mode.name != RECOMMEND:  # it looks for one of the others
        make_mode(job.mode.name, job.mode.options)
    topology = build_topology(job.devices, job.transfer_rate, job.reserve)
    split_topology(topology, job.data_parallel)

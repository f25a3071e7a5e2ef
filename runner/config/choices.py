"""What can be chosen: shipped files, the user's own ``conf/``, and names that are specs.

Call `register` before Hydra composes anything. Afterwards a name is looked for in the shipped
files, then in ``conf/`` of the working directory, then read as a spec, such as ``devices=4x16gb``;
whatever remains is refused here, in one line, because Hydra's own refusal knows neither the grammar
nor the nearest names.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from textwrap import fill
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from fxpart.core.device_spec import DEVICE_GRAMMAR
from fxpart.errors import SpecError, nearest_names
from runner.config.paths import conf_dirs, user_conf_dir
from runner.config.specs import (
    TIER_FOLDER,
    TRANSFER_GRAMMAR,
    accelerator_files,
    device_pools,
    looks_like_rate,
    tiers_in,
    transfer_rate,
)

__all__ = [
    "DEVICE_PRESETS",
    "ConfSearchPath",
    "SpecSource",
    "UnknownChoiceError",
    "choices_text",
    "experiments_text",
    "questions",
    "quoted_overrides",
    "register",
]

DEVICE_PRESETS = tuple(f"{count}x{gb}gb" for gb in (16, 24, 40, 80) for count in (1, 2, 4, 8))
"""Specs that ``--help`` lists and ``devices=glob(4x*)`` finds; any other can be written too."""

_ACCELERATORS = "accelerator"
"""A folder of ``conf/`` that specs look into; it is no group of choices."""
_EXPERIMENTS = "experiment"
"""The group of the named experiments, the only one that a run needs no choice of."""


# Plugins of Hydra.


class UnknownChoiceError(SpecError, ConfigCompositionException):
    """A choice that is neither a file nor a spec. Hydra prints it without a traceback."""


def _devices(spec: str) -> dict[str, Any]:
    devices, tiers = tiers_in(spec)
    pools = device_pools(devices)
    return {"spec": spec, "pools": pools, "tiers": tiers, "nodes": None, "between_nodes": None}


_MAKERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "devices": _devices,
    "transfer_rate": transfer_rate,
}


class SpecSource(ConfigSource):
    """Makes a config from its name; must be the last source but Hydra's schema."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme that Hydra finds this source by."""
        return "spec"

    def available(self) -> bool:
        """Return True: there is nothing to be missing."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return whether configs of this group can be made from a name."""
        return config_path in _MAKERS

    def is_config(self, config_path: str) -> bool:
        """Return whether `config_path` starts as a spec does; a wrong one is refused when loaded.

        Raises:
            UnknownChoiceError: for another name in one of our groups; no source before had it.

        """
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        # Hydra asks for "None" where nothing is chosen by default: experiment: null.
        if name in ("", "None") or not _is_our_group(group):
            return False
        if _is_spec(group, name):
            return True
        raise UnknownChoiceError(_refusal(group, name))

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the config that the name says.

        Raises:
            UnknownChoiceError: when it says nothing.

        """
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        if group not in _MAKERS:
            raise ConfigLoadError(f"no spec is known for {config_path}")
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.create(_config_of_spec(group, name)),
            header={"package": None},
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return names that can be loaded: examples, for there is no end of specs."""
        if config_path == "devices" and results_filter is not ObjectType.GROUP:
            return list(DEVICE_PRESETS)
        return []


class ConfSearchPath(SearchPathPlugin):
    """Adds ``conf/`` of the working directory, and after it the specs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append to `search_path`: what comes first wins."""
        user_conf = user_conf_dir()
        if user_conf:
            search_path.append("fxpart-user", f"file://{user_conf}")
        search_path.append("fxpart-spec", "spec://")


def register() -> None:
    """Make Hydra know the specs and the user's ``conf/``; a second call changes nothing."""
    plugins = Plugins.instance()
    plugins.register(SpecSource)
    plugins.register(ConfSearchPath)
    OmegaConf.register_new_resolver("fxpart_choices", choices_text, replace=True)
    OmegaConf.register_new_resolver("fxpart_experiments", experiments_text, replace=True)


_SPEC_START = re.compile(r"[-+.\d]|.*\+|(host|nvme)\d", re.IGNORECASE)


def _is_our_group(group: str) -> bool:
    # Hydra's own groups have choices in its schema, which is asked after this source.
    if not group or group.partition("/")[0] == "hydra":
        return False
    return any((folder / group).is_dir() for folder in conf_dirs())


def _is_spec(group: str, name: str) -> bool:
    if group == "devices":
        return bool(_SPEC_START.match(name)) or name.lower() in accelerator_files()
    return group == "transfer_rate" and looks_like_rate(name)


def _config_of_spec(group: str, name: str) -> dict[str, Any]:
    try:
        return _MAKERS[group](name)
    except SpecError as error:
        # 2x_dgx_h10 starts like a spec; what it means is the file 2x_dgx_h100.
        meant = get_close_matches(name, _file_names(group), n=1, cutoff=0.8)
        hint = f"; nearest file: {meant[0]}" if meant else ""
        raise UnknownChoiceError(f"{error}{hint}") from error


def _file_names(group: str) -> list[str]:
    paths = (path for folder in conf_dirs() for path in sorted((folder / group).glob("*.yaml")))
    return [path.stem for path in paths if path.is_file()]


def _refusal(group: str, name: str) -> str:
    known = _file_names(group)
    grammar = ""
    if group == "devices":
        known += accelerator_files()
        grammar = f"; or write {DEVICE_GRAMMAR}"
    elif group == "transfer_rate":
        grammar = f"; or write {TRANSFER_GRAMMAR}"
    user_conf = user_conf_dir()
    if user_conf and (user_conf / group / f"{name}.yml").is_file():
        return f"{group}={name} does not exist; rename conf/{group}/{name}.yml to {name}.yaml"
    return f"{group}={name} does not exist; {nearest_names(name, known)}{grammar}"


# What ``--help`` lists.

_QUESTION = re.compile(r"^question:[ \t]*(.+(?:\n[ \t]+.+)*)$", re.MULTILINE)


def choices_text() -> str:
    """Return a line for each group with the choices that have a name.

    Hydra's own listing takes the table of accelerators for a group of choices.
    """
    names: dict[str, set[str]] = {"devices": set(DEVICE_PRESETS)}
    for folder in conf_dirs():
        for path in folder.glob("*/**/*.yaml"):
            group, _, name = path.relative_to(folder).with_suffix("").as_posix().partition("/")
            if group not in (_ACCELERATORS, TIER_FOLDER, _EXPERIMENTS, "hydra"):
                names.setdefault(group, set()).add(name)
    return "".join(f"{group}: {', '.join(sorted(names[group]))}\n" for group in sorted(names))


def experiments_text() -> str:
    """Return a line for each experiment, longer ones folded."""
    question_of = questions()
    wide = max(map(len, question_of), default=0) + 2
    return "".join(
        fill(f"{name:<{wide}}{question}".rstrip(), 100, subsequent_indent=" " * wide) + "\n"
        for name, question in question_of.items()
    )


def questions() -> dict[str, str]:
    """Return the question of each named experiment by its name, those of the user's included.

    A file that asks none has an empty one. The shipped file wins, as where it is chosen.
    """
    question_of: dict[str, str] = {}
    for folder in (above / _EXPERIMENTS for above in conf_dirs()):
        for path in sorted(folder.glob("**/*.yaml")):
            name = path.relative_to(folder).with_suffix("").as_posix()
            # YAML's own parser takes longer than all else in --help.
            match = _QUESTION.search(path.read_text(encoding="utf-8", errors="replace"))
            question = " ".join(match[1].split()).strip("'\"") if match else ""
            question_of.setdefault(name, question)
    return dict(sorted(question_of.items()))


# What is typed, as Hydra's grammar needs it.

_FREE_TEXT = ("where", "question")
"""What is written as a user would say it."""
_BETWEEN_CHOICES = re.compile(r"([,()\s]+)")
_FUNCTION = re.compile(r"(\w+)\((.*)\)")
_NUMBER = re.compile(
    r"[-+]?(?:(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:e[-+]?\d+)?|inf|nan)", re.IGNORECASE
)


def quoted_overrides(overrides: Sequence[str]) -> list[str]:
    """Return command-line `overrides` in quotes where they need them.

    Hydra reads ``transfer_rate=16e9`` as a number and then refuses numbers as choices. A condition
    or a sentence, ``where=`` and ``question=``, hardly ever follows its grammar for values.

    Raises:
        SpecError: for a function of numbers, and for choices that are none: a list, null, or of the
            table of accelerators.

    """
    return [_quoted(override) for override in overrides]


def _quoted(override: str) -> str:
    key, equals, value = override.partition("=")
    group = key.lstrip("+")
    if key.startswith("~") and key[1:] != _EXPERIMENTS and _is_our_group(key[1:]):
        raise SpecError(f"{override}: a run needs one; choose another, {key[1:]}=...")
    if equals and key in _FREE_TEXT:
        return _quoted_text(override, key, value)
    if not equals or not _is_our_group(group):
        return override
    _refuse_no_choice(override, group, value)
    function = _FUNCTION.fullmatch(value)
    if function and function[1] == "choice":  # which takes quotes away again
        return _quoted(f"{key}={function[2]}")
    if value.count("(") != value.count(")"):
        return override  # Hydra refuses it as it was typed
    parts = _BETWEEN_CHOICES.split(value)
    quoted = "".join(f"'{part}'" if _NUMBER.fullmatch(part) else part for part in parts)
    if function and quoted != value:
        raise SpecError(f"{override}: {group} is chosen by name; list the choices with commas")
    return f"{key}={quoted}"


def _quoted_text(override: str, key: str, text: str) -> str:
    with suppress(HydraException):
        parsed = OverridesParser.create().parse_override(override)
        if not parsed.is_sweep_override() and isinstance(parsed.value(), str | None):
            return override
    return f"{key}={QuotedString(text, Quote.single).with_quotes()}"


def _refuse_no_choice(override: str, group: str, value: str) -> None:
    if value.lower() == "null":
        raise SpecError(f"{override} names nothing; give a name, which --help lists")
    if value.startswith("["):
        raise SpecError(f"{override}: one is chosen, not a list; write {group}={value.strip('[]')}")
    if group == _ACCELERATORS:
        meant = ",".join(f"1x{name}" for name in value.split(","))
        raise SpecError(f"{override}: accelerators are chosen by devices; write devices={meant}")

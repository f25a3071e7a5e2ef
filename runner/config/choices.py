"""Config choices: shipped files, the user's own ``conf/``, and names that are specs.

Call `register` before Hydra composes anything. A name is then looked up in the shipped files, in
``conf/`` of the working directory, and finally parsed as a spec, such as ``devices=4x16gb``. Other
names are rejected here, in one line, since Hydra's own error has neither the grammar of specs nor
the nearest names.
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
from runner.config.paths import conf_dir, conf_dirs, user_conf_dir
from runner.config.specs import (
    TIER_FOLDER,
    TRANSFER_GRAMMAR,
    accelerator_files,
    device_pools,
    looks_like_rate,
    machines_in,
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
"""Specs listed by ``--help`` and found by ``devices=glob(4x*)``; any other spec works too."""

_ACCELERATORS = "accelerator"
"""A folder of ``conf/`` for specs; not a config group."""
_EXPERIMENTS = "experiment"
"""The group of named experiments, the only optional one."""


_OTHER_NAMES = {"finetune=qlora": "finetune=lora weights=nf4"}
"""Usual names of combinations of choices, and the choices."""


# Hydra plugins.


class UnknownChoiceError(SpecError, ConfigCompositionException):
    """A choice that is neither a file nor a spec. Hydra prints its errors without a traceback."""


_BETWEEN_MACHINES = "infiniband_ndr"
"""The link between machines of a spec such as 2x8xh100."""


def _devices(spec: str) -> dict[str, Any]:
    devices, tiers = tiers_in(spec)
    devices, nodes = machines_in(devices, asked=spec)
    link = _file_of("transfer_rate", _BETWEEN_MACHINES) if nodes else None
    pools = device_pools(devices, asked=spec)
    return {"spec": spec, "pools": pools, "tiers": tiers, "nodes": nodes, "between_nodes": link}


def _file_of(group: str, name: str) -> dict[str, Any]:
    """Return the content of a shipped choice."""
    return dict(OmegaConf.load(conf_dir() / group / f"{name}.yaml"))


_MAKERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "devices": _devices,
    "transfer_rate": transfer_rate,
}


class SpecSource(ConfigSource):
    """Makes configs from names. Must be the last config source before Hydra's schema."""

    @staticmethod
    def scheme() -> str:
        """Return the URL scheme of this source."""
        return "spec"

    def available(self) -> bool:
        """Return True: the source needs no files."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return whether configs of the group can be made from names."""
        return config_path in _MAKERS

    def is_config(self, config_path: str) -> bool:
        """Return whether `config_path` looks like a spec; a wrong spec is rejected when loaded.

        Raises:
            UnknownChoiceError: for another name in one of our groups, which no earlier source has.

        """
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        # Hydra passes "None" for an empty default, such as experiment: null.
        if name in ("", "None") or not _is_our_group(group):
            return False
        if _is_spec(group, name):
            return True
        raise UnknownChoiceError(_refusal(group, name))

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the config made from the name.

        Raises:
            UnknownChoiceError: if the name is not a valid spec.

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
        """Return examples of names that can be loaded: there are infinitely many specs."""
        if config_path == "devices" and results_filter is not ObjectType.GROUP:
            return list(DEVICE_PRESETS)
        return []


class ConfSearchPath(SearchPathPlugin):
    """Adds ``conf/`` of the working directory, and the specs after it."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append to `search_path`, in which earlier entries take precedence."""
        user_conf = user_conf_dir()
        if user_conf:
            search_path.append("fxpart-user", f"file://{user_conf}")
        search_path.append("fxpart-spec", "spec://")


def register() -> None:
    """Register specs and the user's ``conf/`` with Hydra. Idempotent."""
    plugins = Plugins.instance()
    plugins.register(SpecSource)
    plugins.register(ConfSearchPath)
    OmegaConf.register_new_resolver("fxpart_choices", choices_text, replace=True)
    OmegaConf.register_new_resolver("fxpart_experiments", experiments_text, replace=True)


_SPEC_START = re.compile(r"[-+.\d]|.*\+|(host|nvme)\d", re.IGNORECASE)


def _is_our_group(group: str) -> bool:
    # Hydra's own groups have choices in its schema, which is searched after this source.
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
        # 2x_dgx_h10 looks like a spec, but means the file 2x_dgx_h100.
        nearest = get_close_matches(name, _file_names(group), n=1, cutoff=0.8)
        hint = f"; nearest file: {nearest[0]}" if nearest else ""
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
    if usual := _OTHER_NAMES.get(f"{group}={name}"):
        return f"{group}={name} does not exist; use {usual}"
    return f"{group}={name} does not exist; {nearest_names(name, known)}{grammar}"


# Lists for ``--help``.

_QUESTION = re.compile(r"^question:[ \t]*(.+(?:\n[ \t]+.+)*)$", re.MULTILINE)


def choices_text() -> str:
    """Return a line per group with its named choices.

    Hydra's own listing treats the table of accelerators as a group.
    """
    names: dict[str, set[str]] = {"devices": set(DEVICE_PRESETS)}
    for folder in conf_dirs():
        for path in folder.glob("*/**/*.yaml"):
            group, _, name = path.relative_to(folder).with_suffix("").as_posix().partition("/")
            if group not in (_ACCELERATORS, TIER_FOLDER, _EXPERIMENTS, "hydra"):
                names.setdefault(group, set()).add(name)
    return "".join(f"{group}: {', '.join(sorted(names[group]))}\n" for group in sorted(names))


def experiments_text() -> str:
    """Return a line per experiment with its question, wrapped if long."""
    question_of = questions()
    wide = max(map(len, question_of), default=0) + 2
    return "".join(
        fill(f"{name:<{wide}}{question}".rstrip(), 100, subsequent_indent=" " * wide) + "\n"
        for name, question in question_of.items()
    )


def questions() -> dict[str, str]:
    """Return the question of each named experiment, the user's included, by name.

    It is empty for a file without one. Shipped files take precedence, as in choosing.
    """
    question_of: dict[str, str] = {}
    for folder in (above / _EXPERIMENTS for above in conf_dirs()):
        for path in sorted(folder.glob("**/*.yaml")):
            name = path.relative_to(folder).with_suffix("").as_posix()
            # A YAML parser would take longer than everything else in --help.
            match = _QUESTION.search(path.read_text(encoding="utf-8", errors="replace"))
            question = " ".join(match[1].split()).strip("'\"") if match else ""
            question_of.setdefault(name, question)
    return dict(sorted(question_of.items()))


# Quoting of typed overrides for Hydra's grammar.

_FREE_TEXT = ("where", "question")
"""Settings whose values are free text."""
_BETWEEN_CHOICES = re.compile(r"([,()\s]+)")
_FUNCTION = re.compile(r"(\w+)\((.*)\)")
_NUMBER = re.compile(
    r"[-+]?(?:(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:e[-+]?\d+)?|inf|nan)", re.IGNORECASE
)


def quoted_overrides(overrides: Sequence[str]) -> list[str]:
    """Return command-line `overrides` with quotes added where Hydra needs them.

    Hydra parses ``transfer_rate=16e9`` as a number, and then rejects numbers as choices. Free text,
    ``where=`` and ``question=``, rarely follows its grammar of values.

    Raises:
        SpecError: if a choice is a function of numbers, a list, null or an accelerator, or if a
            required group is deleted.

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
    if function and function[1] == "choice":  # Hydra's choice() would remove the quotes
        return _quoted(f"{key}={function[2]}")
    if value.count("(") != value.count(")"):
        return override  # Hydra rejects it as typed
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
        name = value.strip("[]")
        change = f"write {group}={name}" if name else "give a name, which --help lists"
        raise SpecError(f"{override}: choose one, not a list; {change}")
    if group == _ACCELERATORS:
        specs = ",".join(f"1x{name}" for name in value.split(","))
        raise SpecError(f"{override}: accelerators are chosen by devices; write devices={specs}")

"""Preprocess the command line for Hydra: flags in any position, and one of our own."""

import re
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpart.errors import SpecError, nearest_names
from runner.cli.ending import Parser
from runner.config.paths import conf_dir, shown_path, user_conf_dir

if TYPE_CHECKING:
    from runner.config.schema import Config

__all__ = ["hydra_arguments", "refuse_sweep_settings"]

_SWITCHES = {
    "--help": "-h",
    "--hydra-help": None,
    "--version": None,
    "--resolve": None,
    "--run": "-r",
    "--multirun": "-m",
    "--shell-completion": "-sc",
    "--verbose": "-v",  # ours; the others here and below are Hydra's
}
_OPTIONS = {
    "--cfg": "-c",
    "--package": "-p",
    "--config-path": "-cp",
    "--config-name": "-cn",
    "--config-dir": "-cd",
    "--experimental-rerun": None,
    "--info": "-i",
}
_CHOICES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
_CHOSEN_BY_SLASH = ("hydra.launcher", "hydra.sweeper")
"""Sections of Hydra's own groups, which are chosen with a slash instead of a dot."""
_ID = re.compile(r"[0-9a-f]+")
_STARTED = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-\d+_(rerun_)?")
"""How the names of folders of runs begin: `hydra.run.dir` in `conf/config.yaml`."""
_NO_NAME = re.compile(r"[^\w.+-]")
"""Characters that an unquoted override, or a file system, may not take."""
_MOST_LETTERS = 100


def hydra_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments for Hydra, flags first, since it accepts none after an override.

    ``-v`` becomes the override ``verbose=true``. ``rerun=`` gets a folder named after the id or
    folder of the run, since its configuration is only read later.

    Raises:
        SpecError: if a flag is unknown, lacks its value or has no effect, a folder does not exist,
            or an override has no key.

    """
    parsed, unknown = _parser().parse_known_intermixed_args(arguments)
    if unknown:
        _refuse_flag(unknown[0])
    options = vars(parsed)
    _check_flags(options)
    overrides, is_verbose = options.pop("overrides"), options.pop("verbose")
    for override in overrides:
        _refuse_keyless(override)
    flags = [_flag(name, value) for name, value in options.items() if value not in (None, False)]
    if is_verbose:
        overrides.append("verbose=true")
    reruns = [text.partition("=")[2] for text in overrides if text.startswith("rerun=")]
    has_folder = any(text.startswith("hydra.run.dir=") for text in overrides)
    if reruns and not options["multirun"] and not has_folder:
        overrides.append(
            f"hydra.run.dir=outputs/runs/${{now:%Y-%m-%d_%H-%M-%S-%f}}_rerun_{_short(reruns[0])}"
        )
    return [*flags, *overrides]


def _short(run: str) -> str:
    """Return the beginning of a run's id, or what follows the time in the name of its folder."""
    name = _STARTED.sub("", Path(run).name)
    return name[:8] if _ID.fullmatch(name) else _NO_NAME.sub("", name)[:_MOST_LETTERS]


def refuse_sweep_settings(config: "Config") -> None:
    """Check that a single run has no settings of sweeps.

    Raises:
        SpecError: if it has, or if ``rerun=`` is empty.

    """
    for name in ("where", "zip"):
        if getattr(config, name):
            raise SpecError(f"{name}= applies to the jobs of a sweep; add -m, or leave it out")
    if config.rerun == "":
        raise SpecError("rerun= names no run; give the run's id, which its MLflow page shows")


def _parser() -> Parser:
    parser = Parser(prog="python -m runner", add_help=False)
    parser.add_argument("overrides", nargs="*")
    for flag, short in _SWITCHES.items():
        parser.add_argument(flag, *filter(None, [short]), action="store_true")
    for flag, short in _OPTIONS.items():
        # --info without a value means --info all.
        optional: Any = {"nargs": "?", "const": "all"} if flag == "--info" else {}
        names = [flag, *filter(None, [short])]
        parser.add_argument(*names, choices=_CHOICES.get(flag), **optional)
    return parser


def _flag(name: str, value: object) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag}={value}"


def _refuse_flag(flag: str) -> None:
    if "=" in flag.strip("-") and not flag.startswith("-="):
        raise SpecError(f"{flag} is not a flag; write {flag.lstrip('-')}, without -")
    suggestion = (
        f"{nearest_names(flag, [*_SWITCHES, *_OPTIONS])}; " if flag.startswith("--") else ""
    )
    raise SpecError(
        f"{flag} is not a flag; {suggestion}-m runs a sweep, -v says more, --cfg job shows the "
        "values, --help lists all choices"
    )


def _refuse_keyless(override: str) -> None:
    key, equals, value = override.partition("=")
    if not key.strip("+~ "):
        raise SpecError(f"{override!r} has no key; write key=value, such as mode=kl_based")
    if equals and key in _CHOSEN_BY_SLASH and not value.startswith("{"):
        raise SpecError(f"{override} is chosen with a slash; write {key.replace('.', '/')}={value}")


def _check_flags(values: MutableMapping[str, Any]) -> None:
    """Raise `SpecError` for flags without effect; make ``--config-path`` absolute."""
    if values["experimental_rerun"] is not None:
        raise SpecError(
            "--experimental-rerun is Hydra's and reads files that are not written here; use "
            "rerun=<run id> to repeat a logged run"
        )
    if values["package"] is not None and values["cfg"] is None:
        raise SpecError(
            f"--package {values['package']} applies to --cfg; add --cfg job, or leave it out"
        )
    folder, primary = values["config_dir"], values["config_path"]
    if folder is not None:
        _refuse_missing("--config-dir", folder)
    if primary is not None and "://" not in primary:
        _refuse_missing("--config-path", primary)
        # Hydra would resolve it relative to the package.
        values["config_path"] = str(Path(primary).absolute())
    if primary is None or "://" not in primary:
        _check_name(
            values["config_name"], [primary or conf_dir(), user_conf_dir(), folder], primary
        )


def _refuse_missing(flag: str, folder: str) -> None:
    if folder and Path(folder).is_dir():
        return
    is_file = ", it is a file" if folder and Path(folder).is_file() else ""
    raise SpecError(
        f"{flag}: there is no folder {folder!r}{is_file}; give one that exists, or leave it out:"
        " conf/ of this folder is read without it"
    )


def _check_name(name: str | None, folders: list[str | Path | None], primary: str | None) -> None:
    """Raise `SpecError` if no folder has the ``--config-name``."""
    searched = [Path(folder) for folder in folders if folder]
    known = {path.stem for folder in searched for path in folder.glob("*.yaml")}
    file_name = "config" if name is None else name.removesuffix(".yaml")
    if file_name and any((folder / f"{file_name}.yaml").is_file() for folder in searched):
        return
    if name is None:
        raise SpecError(
            f"--config-path {primary} has no config.yaml, which every run needs; to add choices of "
            "your own, use --config-dir"
        )
    where = ", ".join(
        "fxpart's own conf" if folder == conf_dir() else shown_path(folder.absolute())
        for folder in searched
    )
    raise SpecError(f"--config-name {name!r} is in none of {where}; {nearest_names(name, known)}")

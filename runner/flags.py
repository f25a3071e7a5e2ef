"""Hydra's own flags: what they name must be there."""

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from fxpart.errors import SpecError, nearest_names
from runner.paths import conf_dir, shown_path, user_conf_dir

__all__ = ["check_flags"]


def check_flags(given: MutableMapping[str, Any]) -> None:
    """Refuse flags that lead nowhere; make a relative ``--config-path`` one of this folder.

    Raises:
        SpecError: in one line.

    """
    if given["experimental_rerun"] is not None:
        raise SpecError(
            "--experimental-rerun is Hydra's and reads files that are not written here; a logged"
            " run is repeated by rerun=<run id>"
        )
    if given["package"] is not None and given["cfg"] is None:
        raise SpecError(
            f"--package {given['package']} is about --cfg; add --cfg job, or leave it out"
        )
    folder, primary = given["config_dir"], given["config_path"]
    if folder is not None:
        _refuse_missing("--config-dir", folder)
    if primary is not None and "://" not in primary:
        _refuse_missing("--config-path", primary)
        # Hydra takes it for a folder of the package.
        given["config_path"] = str(Path(primary).absolute())
    if primary is None or "://" not in primary:
        _check_name(given["config_name"], [primary or conf_dir(), user_conf_dir(), folder], primary)


def _refuse_missing(flag: str, folder: str) -> None:
    if folder and Path(folder).is_dir():
        return
    is_file = ", it is a file" if folder and Path(folder).is_file() else ""
    raise SpecError(
        f"{flag}: there is no folder {folder!r}{is_file}; give one that exists, or leave it out:"
        " conf/ of this folder is read without it"
    )


def _check_name(name: str | None, folders: list[str | Path | None], primary: str | None) -> None:
    """Refuse a configuration that no folder has."""
    looked = [Path(folder) for folder in folders if folder]
    known = {path.stem for folder in looked for path in folder.glob("*.yaml")}
    asked = "config" if name is None else name.removesuffix(".yaml")
    if asked and any((folder / f"{asked}.yaml").is_file() for folder in looked):
        return
    if name is None:
        raise SpecError(
            f"--config-path {primary}: there is no config.yaml in it, of which every run is made;"
            " to add choices of your own, write --config-dir"
        )
    where = ", ".join(_shown(folder) for folder in looked)
    raise SpecError(f"--config-name {name!r} is in none of {where}; {nearest_names(name, known)}")


def _shown(folder: Path) -> str:
    return "fxpart's own conf" if folder == conf_dir() else shown_path(folder.absolute())

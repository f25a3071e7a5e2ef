"""Paths of the configuration: the shipped ``conf/``, and that of the working directory."""

from pathlib import Path

__all__ = ["conf_dir", "conf_dirs", "plugins_dir", "shown_path", "unread_choices", "user_conf_dir"]


def conf_dir() -> Path:
    """Return the shipped ``conf/``: inside the package if installed, next to it in a checkout.

    The path is absolute, since Hydra resolves relative paths differently under ``python -m`` and in
    an installed command.
    """
    package = Path(__file__).resolve().parent.parent
    candidates = (package / "conf", package.parent / "conf")
    for candidate in candidates:
        if (candidate / "config.yaml").is_file():
            return candidate
    # Only a broken installation gets here, never a user's command.
    raise FileNotFoundError(f"no config.yaml in {' or '.join(map(str, candidates))}; reinstall")


def user_conf_dir() -> Path | None:
    """Return ``conf/`` of the working directory; None if it is missing or the shipped one.

    Its files add choices: ``conf/model/mine.yaml`` makes ``model=mine``.
    """
    folder = Path.cwd() / "conf"
    return folder if folder.is_dir() and folder.resolve() != conf_dir() else None


def conf_dirs() -> list[Path]:
    """Return the shipped ``conf/`` and the user's, if any; the first takes precedence."""
    return [folder for folder in (conf_dir(), user_conf_dir()) if folder]


def unread_choices() -> list[str]:
    """Return the files in the user's ``conf/`` that are shadowed by shipped ones."""
    folder, shipped = user_conf_dir(), conf_dir()
    if folder is None:
        return []
    names = (path.relative_to(folder) for path in folder.glob("**/*.yaml"))
    return sorted(f"conf/{name.as_posix()}" for name in names if (shipped / name).is_file())


def plugins_dir() -> Path:
    """Return the folder of our Hydra plugins, for a checkout that is not installed."""
    return Path(__file__).resolve().parent.parent / "plugins"


def shown_path(path: Path) -> str:
    """Return the path as the user would type it."""
    folder = Path.cwd()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)

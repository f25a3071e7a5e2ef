"""Where the shipped configuration lies."""

from pathlib import Path

__all__ = ["conf_dir", "plugins_dir", "shown_path", "user_conf_dir"]


def conf_dir() -> Path:
    """Return the shipped ``conf/``: inside the package when installed, beside it in a checkout.

    Hydra takes a relative path to mean different things under ``python -m`` and under an installed
    command, so it is always given this absolute one.
    """
    here = Path(__file__).resolve().parent.parent
    candidates = (here / "conf", here.parent / "conf")
    for candidate in candidates:
        if (candidate / "config.yaml").is_file():
            return candidate
    # Only a broken installation gets here: not something that a user's command can cause.
    raise FileNotFoundError(f"no config.yaml in {' or '.join(map(str, candidates))}; reinstall")


def user_conf_dir() -> Path | None:
    """Return ``conf/`` of the working directory, or None if there is none or it is the shipped one.

    What lies there adds to the shipped choices: ``conf/model/mine.yaml`` makes ``model=mine``.
    """
    mine = Path.cwd() / "conf"
    return mine if mine.is_dir() and mine.resolve() != conf_dir() else None


def unread_choices() -> list[str]:
    """Return the files in the user's ``conf/`` that have the name of a shipped one."""
    mine, shipped = user_conf_dir(), conf_dir()
    if mine is None:
        return []
    named = (path.relative_to(mine) for path in mine.glob("**/*.yaml"))
    return sorted(f"conf/{path.as_posix()}" for path in named if (shipped / path).is_file())


def plugins_dir() -> Path:
    """Return the folder with our package of Hydra plugins, for a checkout that is not installed."""
    return Path(__file__).resolve().parent.parent / "plugins"


def shown_path(path: Path) -> str:
    """Return the path as the user would type it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)

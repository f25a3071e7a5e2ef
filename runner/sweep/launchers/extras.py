"""What a launcher or sweeper needs that a plain installation does not have."""

from collections.abc import Iterator
from contextlib import contextmanager

from fxpart.errors import SpecError

__all__ = ["needs", "prefer_own_launchers"]


@contextmanager
def needs(launcher: str, package: str, extra: str) -> Iterator[None]:
    """Import `package` in here; without it, say in one line how to install it.

    Raises:
        SpecError: when the package is not installed.

    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise SpecError(
            f"hydra/launcher={launcher} needs {package};"
            f" pip install -c constraints.txt '.[{extra}]'"
        ) from error


def prefer_own_launchers() -> None:
    """Make Hydra forget launchers of other packages that have the name of one of ours.

    Hydra would check our configuration against theirs. Call it after Hydra's look for plugins.
    """
    from hydra.core.config_store import ConfigStore

    from runner.config.paths import conf_dir

    known = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    for path in (conf_dir() / "hydra" / "launcher").glob("*.yaml"):
        known.pop(path.name, None)

"""``--cfg``: what Hydra says where it shows nothing, and ends the program, as an error of ours."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from traceback import walk_tb
from typing import TYPE_CHECKING

from fxpart.errors import SpecError, nearest_names

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["heeded_warnings", "show_package"]


def show_package(work: Callable[[], None]) -> None:
    """Do `work`, which shows one package of the configuration.

    Raises:
        SpecError: if there is no such package, or nothing in it.

    """
    said = StringIO()
    try:
        with redirect_stderr(said):
            work()
    except SystemExit as ended:
        for frame, _ in walk_tb(ended.__traceback__):
            if frame.f_code.co_name == "show_cfg" and ended.code:
                raise _refused(frame.f_locals["package"], frame.f_locals["cfg"]) from None
        sys.stderr.write(said.getvalue())
        raise
    sys.stderr.write(said.getvalue())


def _refused(package: str, shown: "DictConfig") -> SpecError:
    """Return the error for a `package` that is not in the configuration `shown`."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    section: object = shown
    above = ""
    for name in package.split("."):
        if not isinstance(section, DictConfig) or name not in section:
            names = section if isinstance(section, DictConfig) else ()
            near = nearest_names(name, map(str, names))
            inside = f"in {above}, {near}" if above else near
            kind = (
                "; --cfg all shows Hydra's too" if package.startswith("hydra") and not above else ""
            )
            return SpecError(f"--package {package} does not exist; {inside}{kind}")
        above = f"{above}.{name}" if above else name
        try:
            section = OmegaConf.select(shown, above)
        except OmegaConfBaseException:
            break
    return SpecError(f"--package {package}: {package} is null, there is nothing to show")


# What Hydra warns of: a folder that is missing is a mistake, what was typed is no surprise.

_NO_FOLDER = r"provider=.* is not available"
_MODE = r"\s*Running Hydra app with --multirun, overriding"
"""Said for -m where a file says hydra.mode: RUN."""


@contextmanager
def heeded_warnings() -> Iterator[None]:
    """Raise the one as an error, and leave the other out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=_NO_FOLDER, category=UserWarning)
        warnings.filterwarnings("ignore", message=_MODE, category=UserWarning)
        yield

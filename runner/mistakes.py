"""Mistakes as one line: what was asked, what there is, what to change.

Hydra and OmegaConf know what is wrong but say it over several lines; here their exceptions are
taken apart and put into the form that all our errors have.
"""

import re

from fxpart.errors import FxpartError, nearest_names

__all__ = ["explain"]


def explain(error: BaseException) -> str | None:
    """Return the mistake behind `error` as one line, or None when it is not the user's."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    chain: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and step not in chain:
        chain.append(step)
        step = step.__cause__ or step.__context__
    for link in chain:
        if isinstance(link, FxpartError):
            return " ".join(str(link).split())
    for link in chain:
        if isinstance(link, HydraException | OmegaConfBaseException):
            return _hydra_line(str(link), str(chain[-1]))
    return None


def _hydra_line(said: str, cause: str) -> str:
    missing = re.search(r"Could not find '([^']+)'", said)
    options = re.search(r"Available options in '([^']+)':\s*(.*)", said, re.DOTALL)
    if missing and options:
        group, names = options.group(1), options.group(2).split()
        asked = missing.group(1).removeprefix(f"{group}/")
        return f"{group}={asked} does not exist; {nearest_names(asked, names)}"
    if missing:
        return f"{missing.group(1)} does not exist; see python -m runner --help"
    lines = [line.strip() for line in (said + "\n" + cause).splitlines() if line.strip()]
    kept = [line for line in dict.fromkeys(lines) if not line.startswith("object_type")]
    return "; ".join(kept)

"""Command lines in which a mistake is one line."""

import argparse
from typing import NoReturn

from fxpart.errors import SpecError

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """Raises `SpecError` for what it cannot read, where Python's own ends the program."""

    def error(self, message: str) -> NoReturn:
        """Raise `SpecError` with `message` and where the help is."""
        raise SpecError(f"{message}; see {self.prog} --help")

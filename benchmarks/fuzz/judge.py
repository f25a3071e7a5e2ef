"""How cases end: taken, refused in one line, or one of three ways in which none may."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.time_limit import OverLimitError, limited
from fxpart.errors import FxpartError

__all__ = ["CPU_LIMIT_S", "WAIT_LIMIT_S", "Tally"]

CPU_LIMIT_S = 60
"""Seconds of CPU after which a case hangs, however busy the machine is."""
WAIT_LIMIT_S = 600
"""Seconds after which a case hangs that computes little: it waits for what does not come."""
_Made = TypeVar("_Made")


@dataclass(slots=True)
class Tally:
    """The cases of one kind, counted; those that went wrong in words."""

    kind: str
    taken: int = 0
    refused: int = 0
    tracebacks: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Cases that were invalid on purpose and taken, or whose result cannot be."""

    @property
    def cases(self) -> int:
        """How many cases were tried."""
        bad = len(self.tracebacks) + len(self.hangs) + len(self.wrong)
        return self.taken + self.refused + bad

    def _failed(self, way: str, case: str) -> None:
        """Count what went wrong, and print it at once: a run that is cut off loses none."""
        cases: list[str] = getattr(self, way)
        cases.append(case)
        print(f"{self.kind}: {way}: {case}", flush=True)

    def attempt(
        self,
        case: str,
        work: Callable[[], _Made],
        unsound: Callable[[_Made], str | None],
        *,
        must_fail: bool = False,
    ) -> None:
        """Do `work` and count how it ends; `unsound` says what is wrong with a result."""
        shown = case if len(case) <= 200 else f"{case[:200]}..."
        try:
            with limited(WAIT_LIMIT_S), limited(CPU_LIMIT_S, of_cpu=True):
                result = work()
                why = unsound(result)
        except OverLimitError:
            self._failed("hangs", shown)
        except KeyboardInterrupt:
            raise
        except FxpartError as error:
            if "\n" in str(error):
                self._failed("wrong", f"{shown}: its message has several lines")
            else:
                self.refused += 1
        except BaseException as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            self._failed("tracebacks", f"{shown}: {error!r:.200} ({at.filename}:{at.lineno})")
        else:
            if must_fail or why:
                self._failed("wrong", f"{shown}: {why or 'taken'}")
            else:
                self.taken += 1

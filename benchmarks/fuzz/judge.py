"""Count how cases end: accepted, refused in one line, or in one of three kinds of failure."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.time_limit import OverLimitError, limited
from fxpart.errors import FxpartError

__all__ = ["CPU_LIMIT_S", "WAIT_LIMIT_S", "Tally"]

CPU_LIMIT_S = 60
"""CPU seconds after which a case counts as hanging, however busy the machine is."""
WAIT_LIMIT_S = 600
"""Seconds after which a case counts as hanging that computes little, such as a deadlock."""
_Result = TypeVar("_Result")


@dataclass(slots=True)
class Tally:
    """The counts of one kind of case, and a description of each failure."""

    kind: str
    taken: int = 0
    refused: int = 0
    tracebacks: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Invalid cases that were accepted, or cases with an implausible result."""

    @property
    def cases(self) -> int:
        """Number of cases tried."""
        failed = len(self.tracebacks) + len(self.hangs) + len(self.wrong)
        return self.taken + self.refused + failed

    def _record_failure(self, kind: str, case: str) -> None:
        """Record a failure and print it at once, so that an interrupted run loses none."""
        cases: list[str] = getattr(self, kind)
        cases.append(case)
        print(f"{self.kind}: {kind}: {case}", flush=True)

    def attempt(
        self,
        case: str,
        work: Callable[[], _Result],
        unsound: Callable[[_Result], str | None],
        *,
        must_fail: bool = False,
    ) -> None:
        """Run `work` and count how it ends; `unsound` returns what is wrong with a result."""
        shown = case if len(case) <= 200 else f"{case[:200]}..."
        try:
            with limited(WAIT_LIMIT_S), limited(CPU_LIMIT_S, of_cpu=True):
                result = work()
                fault = unsound(result)
        except OverLimitError:
            self._record_failure("hangs", shown)
        except KeyboardInterrupt:
            raise
        except FxpartError:
            self.refused += 1
        except BaseException as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self._record_failure(
                "tracebacks", f"{shown}: {error!r:.200} ({frame.filename}:{frame.lineno})"
            )
        else:
            if must_fail or fault:
                self._record_failure("wrong", f"{shown}: {fault or 'taken'}")
            else:
                self.taken += 1

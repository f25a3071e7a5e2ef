"""Messages of errors are one line, whatever they quote."""

import pytest

from fxpart.errors import FxpartError, InfeasibleError, SpecError


@pytest.mark.parametrize(
    "error",
    [
        SpecError("latency.file=a\nb does not exist"),
        InfeasibleError("latency.file=a\nb does not exist"),
        InfeasibleError(lambda: ("latency.file=a\nb does not exist", 1)),
    ],
)
def test_a_quoted_line_break_becomes_a_space(error: FxpartError) -> None:
    assert str(error) == "latency.file=a b does not exist"

"""Conditions and sentences on the command line: Hydra gets them as they were typed."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from runner.config.specs import quote_text


@pytest.mark.parametrize(
    "text",
    [
        'n_devices > 2 or mode == "single"',
        "mode in ['single', \"kl_based\"]",
        '"a" == mode or mode == "b"',
        "Which mode, and why?",
        "[1,2]",
        "It's a \\ here",
        "plain",
    ],
)
def test_free_text_comes_through_as_it_is(text: str) -> None:
    for key in ("where", "question"):
        (quoted,) = quote_text([f"{key}={text}"])
        assert OverridesParser.create().parse_override(quoted).value() == text


@pytest.mark.parametrize("given", ["where='a > 2'", "where=null", "-m", "mode=a,b", "where"])
def test_what_needs_no_quotes_gets_none(given: str) -> None:
    assert quote_text([given]) == [given]

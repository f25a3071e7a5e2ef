"""The digest of configuration values: equal for equal values, different otherwise."""

import re
from pathlib import Path

from fxpart.support.digest import stable_digest


def test_order_and_type_of_sequences_do_not_count() -> None:
    digest = stable_digest({"a": 1, "b": {"x": [1, 2], "y": None}})
    assert digest == stable_digest({"b": {"y": None, "x": (1, 2)}, "a": 1})
    assert re.fullmatch("[0-9a-f]{64}", digest)


def test_keys_count_as_text_at_any_depth() -> None:
    assert stable_digest({"a": [{1: 2, "b": 3}]}) == stable_digest({"a": [{"1": 2, "b": 3}]})


def test_values_without_json_form_count_as_their_text() -> None:
    assert stable_digest({"a": Path("b/c")}) == stable_digest({"a": "b/c"})


def test_values_count() -> None:
    digests = {stable_digest({"a": value}) for value in (1, 2, "1", None, [1], {"a": 1})}
    assert len(digests) == 6

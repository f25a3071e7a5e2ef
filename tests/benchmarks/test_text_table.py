"""Columns are aligned."""

from benchmarks.text_table import table


def test_a_table_is_aligned() -> None:
    text = table(["name", "s"], [["a", "1.5"], ["longer", "10.25"]])
    assert text == "name        s\na         1.5\nlonger  10.25"

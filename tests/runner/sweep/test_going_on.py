"""What is said of a sweep that was interrupted: the tests of resume see it as a command's end."""

from pathlib import Path

import pytest

from runner.sweep.about import how_to_go_on


@pytest.mark.parametrize(
    ("resumes", "folder", "said"),
    [
        (True, None, "the same command goes on"),
        (False, None, "the same command without resume=false goes on"),
        (True, "outputs/mine", "the same command with hydra.sweep.dir=outputs/mine goes on"),
        (
            False,
            "outputs/mine",
            "the same command without resume=false and with hydra.sweep.dir=outputs/mine goes on",
        ),
    ],
)
def test_what_to_type(resumes: bool, folder: str | None, said: str) -> None:
    place = Path.cwd() / folder if folder else None
    assert how_to_go_on(resumes=resumes, needs_folder=place) == said

"""Clusters on this machine."""

from collections.abc import Iterator

import pytest

from benchmarks.slurm_here import NoSlurmError, slurm_here


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which a real Slurm is found."""
    try:
        with slurm_here(tmp_path_factory.mktemp("slurm")) as variables:
            yield variables
    except NoSlurmError as error:
        pytest.skip(f"no Slurm: {error}")

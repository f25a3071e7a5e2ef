"""A real PostgreSQL for tests, or the reason for its absence."""

from collections.abc import Iterator

import pytest

from benchmarks.postgres import postgres, postgres_programs


@pytest.fixture(scope="module")
def postgres_server() -> Iterator[str]:
    """The URI of an empty server, without a database."""
    pytest.importorskip("psycopg2", reason="psycopg2 is not installed")
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    with postgres(programs) as server:
        yield server

"""What only the runner's tests need."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker of the tests that drive a browser: ``-m "not browser"`` leaves them out."""
    config.addinivalue_line("markers", "browser: needs a Chromium on PATH, and playwright")

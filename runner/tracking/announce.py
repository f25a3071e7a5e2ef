"""Where to look at what was logged."""

from runner.output.terminal import show
from runner.tracking.tracker import ComparisonPage

__all__ = ["announce_page"]


def announce_page(page: ComparisonPage | None) -> None:
    """Print where runs are compared in MLflow, and the command that serves it if one is needed."""
    if page is None:
        return
    if page.command:
        show(f"dashboard: {page.command}")
    show(f"compare:   {page.url}", f"charts:    {page.charts_url}")

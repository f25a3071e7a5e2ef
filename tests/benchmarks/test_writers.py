from pathlib import Path

import pytest

from benchmarks.writers import log_at_once, wrong_values

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow"),
    pytest.mark.usefixtures("new_forkserver"),
]


def test_no_value_of_concurrent_writers_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    logged = log_at_once(None, tmp_path, writers=3, runs=4)
    assert len(logged.run_s) == 12
    assert wrong_values(None, tmp_path, writers=3, runs=4) == []
    # The check detects missing runs.
    assert wrong_values(None, tmp_path, writers=4, runs=4) == [
        f"3-{n} is missing" for n in range(5)
    ]
    assert wrong_values(None, tmp_path, writers=3, runs=3) == [
        f"{n}-4 is unexpected" for n in range(3)
    ]
    spoiled = next((tmp_path / "outputs" / "mlartifacts").rglob("devices.json"))
    spoiled.write_text("{}")
    (wrong,) = wrong_values(None, tmp_path, writers=3, runs=4)
    assert wrong.endswith(": wrong table")
